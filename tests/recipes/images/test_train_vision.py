"""Training of the parts for images: gradients are those of plain Transformers, whatever is frozen, and
results load in plain classes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    RECIPE,
    REPOSITORY,
    losses,
    metrics,
    reproducible_metrics,
    run_cases,
    series,
    write_jsonl,
)
from forked import forked
from image_models import (
    FAMILIES,
    FOR_IMAGES,
    case,
    image_model,
    layouts_of,
    micro_batches,
    model_of,
    norm,
    plain_loss,
    write_samples,
)
from safetensors.torch import load_file

PROJECTOR = (
    "merger",
    "projector",
    "connector",
    "image_newline",
    "embed_vision",
)  # in names of weights
TRAINED = {
    "projector": "--train_vision projector",
    "all": "--train_vision all",
    "only the projector": "--freeze_LLM_only --train_vision projector",
    "no text": "--freeze_LLM_only",
}
# so large that rounding of the weights does not hide the gradients
LR = 1000.0
SGD = f"--precision fp32 --max_train_step 1 --optimizer SGD --momentum 0 --lr_scheduler constant --lr {LR}"


def is_trained(name: str, method: str) -> bool:
    is_for_images = any(part in name for part in FOR_IMAGES)
    is_projector = any(part in name for part in PROJECTOR)
    return {
        "projector": not is_for_images or is_projector,
        "all": True,
        "only the projector": is_projector,
        "no text": is_for_images,
    }[method]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_samples(folder / "data")
    return folder


FAST = (("LLaVA", 2),)  # family, ranks
FAST_RUNS = (("padded, one by one", "all"), ("packed", "projector"), ("packed", "no text"))


def runs_of(work: Path, family: str, ranks: int) -> Iterator[tuple[str, list[str]]]:
    """Method and flags of each run, without its first steps."""
    for layout, layout_flags in layouts_of(family).items():
        steps = micro_batches(layout_flags, max(1, ranks))
        for method, method_flags in TRAINED.items():
            if (family, ranks) in FAST and (layout, method) not in FAST_RUNS:
                continue
            name = f"{family}, {layout}, {method}, {ranks}"
            flags = f"{SGD} --gradient_accumulation_steps {steps} {layout_flags} {method_flags}"
            yield method, case(work, family, name, ranks, *flags.split())


ON_4 = ("Qwen3-VL", "Gemma 3")
# Towers and projectors that differ; on other ranks and in other families nothing else is trained.
SLOW = (("Qwen3-VL", 4), ("Llama 3.2 Vision", 2), ("LLaVA", 0))


def marks_of(family: str, ranks: int) -> list[pytest.MarkDecorator]:
    if (family, ranks) in FAST:
        return []
    return [pytest.mark.slow if (family, ranks) in SLOW else pytest.mark.large]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=marks_of(family, ranks))
        for family in FAMILIES
        for ranks in (0, 2, 4)
        if ranks < 4 or family in ON_4
    ],
)
def test_first_loss_and_all_gradients_are_those_of_plain_transformers(
    work: Path, family: str, ranks: int
) -> None:
    image_model(work / family, family)
    runs = list(runs_of(work, family, ranks))
    finished = run_cases(work, [flags for _, flags in runs], ranks)
    assert "Fully trained, not quantized: " in finished.output
    model = model_of(work / family)
    loss, count = plain_loss(model, work / family, work / "data" / "chats.jsonl")
    (loss / count).backward()
    before = weights_of(work / family)
    parameters = dict(model.named_parameters())
    for method, flags in runs:
        folder = Path(flags[flags.index("--output_dir") + 1])
        trained = [name for name in parameters if is_trained(name, method)]
        [first] = [line for line in metrics(folder) if "train/loss" in line]
        assert first["train/loss"] == pytest.approx(loss.item() / count, rel=1e-5), folder
        expected = norm([parameters[name] for name in trained])
        assert first["train/grad_norm"] == pytest.approx(expected, rel=1e-5), folder
        after = weights_of(folder / "model")
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert is_trained(name, method) or after[name].equal(tensor), name
        for name, updated in model_of(folder / "model").named_parameters():
            gradient = parameters[name].grad
            if name in trained and gradient is not None:
                found = (parameters[name].double() - updated.double()) / LR
                # A tensor with a small gradient has rounding of the large ones.
                tolerance = 1e-5 * max(gradient.norm().item(), expected / 10)
                assert (found - gradient).norm().item() <= tolerance, (folder, name)


PRECISE = "--precision fp32 --gradient_accumulation_steps 1 --num_epochs 2 --save_steps 2"
SMALL = "--batch_size_training 1 --batching_strategy padding"
LORA = "--use_peft --target_modules all-linear --r 4 --lora_dropout 0 --train_vision projector"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks"), [pytest.param("Qwen3-VL", 2, marks=pytest.mark.large), ("LLaVA", 2)]
)
def test_trained_parts_resume_and_load_in_plain_classes_and_merge(
    work: Path, family: str, ranks: int
) -> None:
    from peft import PeftModel

    image_model(work / family, family)
    data = work / "data" / "chats.jsonl"

    def flags(name: str, *more: str) -> list[str]:
        validated = ("--validation", str(data), "--run_validation")
        return case(work, family, f"{family} {name}", ranks, *PRECISE.split(), *validated, *more)

    def folder(name: str) -> Path:
        return work / "runs" / f"{family} {name}"

    def out(name: str) -> Path:
        return work / f"{family} {name}"

    whole = (*SMALL.split(), "--train_vision", "all", "--activation_checkpointing", "full")
    resume = str(folder("all") / "checkpoints" / "step-000002")
    quantized = ("--quantization", "8bit")
    finished = run_cases(
        work,
        [
            flags("all", *whole),
            flags("resumed", *whole, "--resume", resume),
            flags("lora", *LORA.split()),
            flags("8bit", *LORA.split(), *quantized),
        ],
        ranks,
    )
    assert "Fully trained, not quantized: " in finished.output
    assert reproducible_metrics(folder("all")) == reproducible_metrics(folder("resumed"))
    assert weights_of(folder("all") / "model").keys() == weights_of(work / family).keys()
    for name, tensor in weights_of(folder("all") / "model").items():
        assert tensor.equal(weights_of(folder("resumed") / "model")[name]), name

    exports = {
        "of a checkpoint": [folder("all") / "checkpoints" / "step-000002"],
        "merged": [folder("lora") / "model"],
        "merged checkpoint": [folder("lora"), "--merge"],
    }
    for name, (source, *options) in exports.items():
        exported = forked(REPOSITORY / "recipes" / "export.py", source, out(name), *options)
        assert exported.exit_code == 0, exported.output

    def loss_of(model: Any) -> float:
        with torch.no_grad():
            loss, count = plain_loss(model.eval(), work / family, data)
        return loss.item() / count

    def last_loss(name: str) -> float:
        return series(folder(name), "eval/loss")[-1]

    assert last_loss("all") == pytest.approx(loss_of(model_of(folder("all") / "model")), rel=1e-5)
    checkpoint = weights_of(out("of a checkpoint"))
    assert checkpoint.keys() == weights_of(work / family).keys()
    before = weights_of(work / family)
    for_images = [name for name in before if any(part in name for part in FOR_IMAGES)]
    assert any(not checkpoint[name].equal(before[name]) for name in for_images)
    adapted = PeftModel.from_pretrained(model_of(work / family), folder("lora") / "model")
    assert last_loss("lora") == pytest.approx(loss_of(adapted), rel=1e-5)
    for name in ("merged", "merged checkpoint"):
        merged = model_of(out(name))
        assert last_loss("lora") == pytest.approx(loss_of(merged), rel=1e-4), name
        files = weights_of(out(name))
        for key in for_images:
            if not is_trained(key, "projector"):
                assert files[key].equal(before[key]), key
    # a text prompt, with weights for images among those of the adapter or of the checkpoint
    prompt = "--prompt Hi --max_new_tokens 2 --device cpu --precision fp32".split()
    for source in (folder("lora") / "model", folder("all") / "checkpoints" / "step-000002"):
        answered = forked(REPOSITORY / "recipes" / "inference.py", source, *prompt)
        assert answered.exit_code == 0, answered.output
    first = losses(folder("8bit"))[0]
    assert first == pytest.approx(losses(folder("lora"))[0], rel=0.05)


def test_training_of_the_parts_for_images_needs_samples_with_images(work: Path) -> None:
    text = write_jsonl(work / "text.jsonl", [{"instruction": "Why?", "output": "So."}])
    image_model(work / "LLaVA", "LLaVA")
    flags = case(work, "LLaVA", "text", 0, "--train_vision", "all")
    flags[flags.index("--dataset") + 1] = str(text)
    finished = forked(RECIPE, *flags)
    assert finished.exit_code == 2, finished.output
    assert "no sample has images" in finished.output
