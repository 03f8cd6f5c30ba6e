"""Preference pairs with images: losses and gradient norms are those of plain Transformers and PEFT, pair
by pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, metrics, run_cases, write_jsonl
from forked import forked
from image_models import (
    FOR_IMAGES,
    PADDED_ONLY,
    case,
    image_model,
    model_of,
    norm,
    plain_inputs,
    plain_processor,
    write_image,
)
from torch.nn import functional as F

BETA = 0.3
STEPS = 3
LR = 0.005
GAMMA = 0.5  # of SimPO
FAMILIES = ("Qwen2.5-VL", "LLaVA", "Gemma 3", "Llama 3.2 Vision")
PAIRS = 6
SIZES = [(60, 40), (30, 90), (56, 56), (60, 40)]  # the first and the last have the same tokens
LAYOUTS = {
    "padded": "--batching_strategy padding --batch_size_training 3",
    "one by one": "--batching_strategy padding --batch_size_training 1",
    "packed": "--batching_strategy packing --batch_size_training 1",
}


def say(role: str, *parts: str) -> dict[str, Any]:
    """A message of texts, and of images by the names of their files."""
    content = []
    for part in parts:
        is_image = part.endswith(".png")
        content.append(
            {"type": "image", "image": part} if is_image else {"type": "text", "text": part}
        )
    return {"role": role, "content": content}


# prompt, chosen and rejected response of each pair
PLAIN = [
    (say("user", "0.png", "What is it?"), "Noise.", "A cat, sitting on a mat."),
    (say("user", "Who are you?"), "A model, of course.", "Nobody."),
    (say("user", "1.png", "and", "2.png", "Which is larger?"), "The second.", "I see no image."),
    (say("user", "2.png", "What?"), "Noise, in color.", "What?"),
    (say("user", "Why?"), "Because.", "So."),
    # differs from the first one by its image only
    (say("user", "3.png", "What is it?"), "Noise.", "A cat, sitting on a mat."),
]


def chats_of(number: int) -> list[dict[str, Any]]:
    """The chats of the chosen and of the rejected response."""
    prompt, *responses = PLAIN[number]
    return [{"messages": [prompt, say("assistant", response)]} for response in responses]


def write_pairs(folder: Path) -> Path:
    """The pairs, in the forms that people have."""
    for number, (width, height) in enumerate(SIZES):
        write_image(folder / f"{number}.png", width, height, number)
    rows: list[dict[str, Any]] = []
    for prompt, *responses in PLAIN:
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in responses)
        rows.append({"prompt": [prompt], "chosen": chosen, "rejected": rejected})
    whole = [rows[1]["prompt"] + rows[1][column] for column in ("chosen", "rejected")]
    rows[1] = dict(zip(("chosen", "rejected"), whole, strict=True))
    marked = {"role": "user", "content": "<image>and<image>Which is larger?"}
    for column in ("chosen", "rejected"):
        rows[2][column] = [marked, *rows[2][column]]
    rows[2]["images"] = ["1.png", "2.png"]
    del rows[2]["prompt"]
    rows[3] |= {"prompt": "<image>\nWhat?", "image": "2.png"}
    return write_jsonl(folder / "pairs.jsonl", rows)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "data").mkdir()
    write_pairs(folder / "data")
    return folder


OBJECTIVES = {
    "dpo": f"--objective dpo --beta {BETA}",
    "ipo": f"--objective ipo --beta {BETA}",
    "simpo": f"--objective simpo --beta {BETA} --simpo_gamma {GAMMA}",
}
# objective, and what is trained: all weights, a new adapter, or one that is continued
CASES = [("dpo", "full"), ("dpo", "lora"), ("ipo", "continued"), ("simpo", "lora")]


def runs_of(work: Path, family: str, ranks: int) -> dict[str, list[str]]:
    """Flags by name. The first run makes an adapter: A as it is initialized, and B after a step."""
    common = f"--precision fp32 --lr_scheduler constant --lr {LR} --num_epochs {STEPS}"
    folder = work / "runs" / f"{family} {ranks}"
    adapter = folder / "start" / "model"
    lora = "--use_peft --target_modules all-linear --r 4 --lora_dropout 0".split()
    trained = {"full": [], "lora": lora}
    trained["continued"] = ["--use_peft", "--from_peft_checkpoint", str(adapter)]

    def run(name: str, *flags: str) -> list[str]:
        made = case(work, family, f"{folder.name}/{name}", ranks, *common.split(), *flags)
        made[made.index("--dataset") + 1] = str(work / "data" / "pairs.jsonl")
        return made

    first = f"{OBJECTIVES['dpo']} --batching_strategy padding --max_train_step 1"
    runs = {"start": run("start", *first.split(), *lora)}
    for layout, layout_flags in LAYOUTS.items():
        if layout == "packed" and family in PADDED_ONLY:
            continue
        size = int(layout_flags.split()[-1])
        steps = PAIRS // (size * max(1, ranks))
        for objective, kind in CASES:
            name = f"{objective} {kind} {layout}"
            flags = f"{OBJECTIVES[objective]} {layout_flags} --gradient_accumulation_steps {steps}"
            runs[name] = run(name, *flags.split(), *trained[kind])
    return runs


def log_probability(
    model: Any, processor: Any, folder: Path, chat: Any
) -> tuple[torch.Tensor, int]:
    """Of the response of a chat; and its number of tokens."""
    inputs, labels = plain_inputs(processor, folder, chat)
    logits = model(**inputs).logits[0, :-1].float()
    summed = -F.cross_entropy(logits, labels[1:], reduction="sum")
    return summed, int((labels[1:] != -100).sum())


def plain_pair_loss(
    objective: str, policy: list[tuple[torch.Tensor, int]], reference: list[torch.Tensor]
) -> torch.Tensor:
    """The loss of a pair, from the papers. `policy`: log-probability and length of both responses."""
    (chosen, chosen_tokens), (rejected, rejected_tokens) = policy
    if objective == "simpo":
        margin = BETA * (chosen / chosen_tokens - rejected / rejected_tokens) - GAMMA
        return -F.logsigmoid(margin)
    chosen = chosen - reference[0]
    rejected = rejected - reference[1]
    if objective == "ipo":
        difference = chosen / chosen_tokens - rejected / rejected_tokens
        return (difference - 1 / (2 * BETA)).square()
    return -F.logsigmoid(BETA * (chosen - rejected))


def plain_steps(work: Path, family: str, objective: str, kind: str, adapter: Path) -> list[Any]:
    """Loss and gradient norm of each step of a plain loop."""
    from peft import PeftModel

    folder = work / "data"
    model = model_of(work / family)
    base = model_of(work / family)
    processor = plain_processor(work / family)
    if kind != "full":
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
    if kind == "continued":
        base = PeftModel.from_pretrained(base, adapter).eval()
    trained = []
    for name, parameter in model.named_parameters():
        is_frozen = any(part in name for part in FOR_IMAGES)
        parameter.requires_grad_(parameter.requires_grad and not is_frozen)
        if parameter.requires_grad:
            trained.append(parameter)
        if kind == "lora" and "lora_B" in name:
            parameter.data.zero_()
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for number in range(PAIRS):
            chats = chats_of(number)
            policy = [log_probability(model, processor, folder, chat) for chat in chats]
            with torch.no_grad():
                reference = [log_probability(base, processor, folder, chat)[0] for chat in chats]
            total = total + plain_pair_loss(objective, policy, reference) / PAIRS
        total.backward()
        found.append((total.item(), norm(trained)))
        optimizer.step()
        optimizer.zero_grad()
    return found


FAST = ("start", "dpo lora packed")
ALL = [
    pytest.param(family, ranks, (), marks=pytest.mark.large)
    for family in FAMILIES
    for ranks in (0, 2)
    if (family, ranks) != ("LLaVA", 2)
]


@pytest.mark.parametrize(("family", "ranks", "only"), [("LLaVA", 2, FAST), *ALL])
def test_pairs_with_images_have_the_losses_of_a_plain_loop(
    work: Path, family: str, ranks: int, only: tuple[str, ...]
) -> None:
    image_model(work / family, family)
    runs = runs_of(work, family, ranks)
    if only:
        runs = {name: flags for name, flags in runs.items() if name in only}
    finished = run_cases(work, list(runs.values()), ranks)
    assert "training: 10 images in " in finished.output  # of 5, each before two responses
    folders = {name: Path(flags[flags.index("--output_dir") + 1]) for name, flags in runs.items()}
    adapter = folders.pop("start") / "model"
    for objective, kind in CASES:
        if not any(name.startswith(f"{objective} {kind} ") for name in folders):
            continue
        expected = plain_steps(work, family, objective, kind, adapter)
        losses = [loss for loss, _ in expected]
        assert losses[-1] < 0.999 * losses[0], "the losses compared do fall"
        for name, folder in folders.items():
            if not name.startswith(f"{objective} {kind} "):
                continue
            lines = [line for line in metrics(folder) if "train/loss" in line]
            found = [line["train/loss"] for line in lines]
            assert found[0] == pytest.approx(losses[0], rel=1e-5), name
            # AdamW divides by the size of the gradient, so rounding of small ones reaches later
            # losses: up to 1.1e-5, of IPO, which falls by three quarters in a step.
            assert found == pytest.approx(losses, rel=5e-5), name
            norms = [line["train/grad_norm"] for line in lines]
            assert norms == pytest.approx([size for _, size in expected], rel=1e-4), name


BAD = {
    "few": (
        {"prompt": "<image> <image>", "images": ["0.png"]},
        '"images" has 1 images, and the messages have 2 places',
    ),
    "response": (
        {"prompt": "<image>", "images": ["0.png"], "chosen": [say("assistant", "0.png")]},
        "no image in a message of the assistant",
    ),
    "text": (
        {"prompt": "<image>", "images": ["0.png"], "chosen": "Yes"},
        '"chosen" is "Yes"; expected messages, because the pair has images',
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_pairs_with_images_are_reported_with_their_place(work: Path, kind: str) -> None:
    pairs = [json.loads(line) for line in (work / "data" / "pairs.jsonl").open()]
    image_model(work / "LLaVA", "LLaVA")
    changed, message = BAD[kind]
    rejected = [{"role": "assistant", "content": "No"}]
    bad = {"chosen": [{"role": "assistant", "content": "Yes"}], "rejected": rejected, **changed}
    data = write_jsonl(work / "data" / f"{kind}.jsonl", [pairs[0], bad])
    flags = case(work, "LLaVA", f"bad {kind}", 0, *OBJECTIVES["dpo"].split())
    flags[flags.index("--dataset") + 1] = str(data)
    finished = forked(RECIPE, *flags)
    assert finished.exit_code == 2, finished.output
    assert message in finished.output
    assert f"{kind}.jsonl:2" in finished.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective orpo", "--objective orpo does not support images"),
        ("--objective dpo --reference_model {model}", "--reference_model: not supported if"),
    ],
)
def test_what_pairs_with_images_do_not_support_is_an_error(
    work: Path, flags: str, message: str
) -> None:
    asked = flags.format(model=image_model(work / "LLaVA", "LLaVA")).split()
    run = case(work, "LLaVA", f"not supported {asked[1]}", 0, *asked)
    run[run.index("--dataset") + 1] = str(work / "data" / "pairs.jsonl")
    finished = forked(RECIPE, *run)
    assert finished.exit_code == 2, finished.output
    assert message in finished.output
