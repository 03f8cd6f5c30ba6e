"""Runs on images and text: the first loss and gradient norm are those of plain Transformers and PEFT
on the same samples one by one."""

import json
import re
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
    plain_processor,
    write_samples,
)
from PIL import Image

LORA = "--use_peft --target_modules all-linear --r 4 --lora_dropout 0 --weight_decay 0".split()
OTHERS = ("Qwen2.5-VL", "Gemma 3")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_samples(folder / "data")
    return folder


FAST = (("Qwen2.5-VL", 2),)  # family, ranks
# Decoders and towers that differ; the others are one of these with another tower or on more ranks.
SLOW = ("Gemma 3", "Llama 3.2 Vision", "Qwen3-VL")
NOT_SHARED = ("Gemma 4",)  # a run of ranks that share its sequences ends with a message


def marks_of(family: str, ranks: int) -> list[pytest.MarkDecorator]:
    if (family, ranks) in FAST:
        return []
    is_slow = (family in SLOW and ranks == 2) or (family, ranks) == ("LLaVA", 0)
    return [pytest.mark.slow if is_slow else pytest.mark.large]


def cases_of(work: Path, family: str, ranks: int) -> dict[str, list[str]]:
    """Name -> flags: full fine-tuning in every layout, and LoRA. The fast test has it in one. Packed
    sequences also of ranks that share each of them."""
    cases = {}
    layouts = layouts_of(family)
    if ranks > 1 and "packed" in layouts and family not in NOT_SHARED:
        layouts["shared"] = f"--sequence_parallel_size {ranks} {layouts['packed']}"
    for layout, layout_flags in layouts.items():
        data_ranks = 1 if layout == "shared" else ranks
        steps = micro_batches(layout_flags, data_ranks)
        flags = f"--precision fp32 --max_train_step 1 --gradient_accumulation_steps {steps}"
        for method, more in (("full", []), ("lora", LORA)):
            if method == "lora" and layout != "packed" and (family, ranks) in FAST:
                continue
            name = f"{family}, {layout}, {method}, {ranks}"
            words = [*flags.split(), *layout_flags.split(), *more]
            cases[name] = case(work, family, name, ranks, *words)
    return cases


# On 4 ranks most micro-batches have no image, and some no sample.
ON_4 = ("Qwen2.5-VL", "Qwen3.5", "Gemma 3", "LLaVA-OneVision", "Llama 3.2 Vision")


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=marks_of(family, ranks))
        for family in FAMILIES
        for ranks in (0, 2, 4)
        if ranks < 4 or family in ON_4
    ],
)
def test_first_loss_and_gradient_norm_are_those_of_plain_transformers(
    work: Path, family: str, ranks: int
) -> None:
    image_model(work / family, family)
    cases = cases_of(work, family, max(1, ranks))
    finished = run_cases(work, [*cases.values()], ranks)
    assert "Frozen, not quantized, without adapters: " in finished.output
    assert "training: 4 images in " in finished.output
    model = model_of(work / family)
    trained = [
        parameter
        for name, parameter in model.named_parameters()
        if not any(part in name for part in FOR_IMAGES)
    ]
    loss, count = plain_loss(model, work / family, work / "data" / "chats.jsonl")
    (loss / count).backward()
    for name in cases:
        [first] = [line for line in metrics(work / "runs" / name) if "train/loss" in line]
        assert first["train/loss"] == pytest.approx(loss.item() / count, rel=1e-5), name
        if ", full, " in name:
            assert first["train/grad_norm"] == pytest.approx(norm(trained), rel=1e-5), name


PRECISE = ("--precision", "fp32", "--gradient_accumulation_steps", "1", "--num_epochs", "2")
SMALL_BATCHES = ("--batch_size_training", "1", "--batching_strategy", "padding")


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("LLaVA", 2), *[pytest.param(family, 2, marks=pytest.mark.large) for family in OTHERS]],
)
def test_results_load_in_plain_classes_and_a_resumed_run_is_the_same(
    work: Path, family: str, ranks: int
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    image_model(work / family, family)
    data = work / "data" / "chats.jsonl"
    validated = ("--validation", str(data))

    def run(name: str, *more: str) -> list[str]:
        return case(work, family, f"{family} {name}", ranks, *validated, *more)

    def folder(name: str) -> Path:
        return work / "runs" / f"{family} {name}"

    resume = str(folder("full") / "checkpoints" / "step-000002")
    quantized = ("--quantization", "8bit", "--max_train_step", "1")
    runs = [
        run("full", *PRECISE, *SMALL_BATCHES, "--save_steps", "2"),
        run("resumed", *PRECISE, *SMALL_BATCHES, "--save_steps", "2", "--resume", resume),
        run("lora", *PRECISE, *LORA),
    ]
    if family in OTHERS:
        runs.append(run("8bit", *LORA, *quantized, "--activation_checkpointing", "full"))
        runs.append(run("bf16", "--max_train_step", "1", "--activation_checkpointing", "full"))
    run_cases(work, runs, ranks)

    whole = reproducible_metrics(folder("full"))
    assert len([line for line in whole if "train/loss" in line]) == 6
    assert whole == reproducible_metrics(folder("resumed"))
    for file in sorted((folder("full") / "model").glob("*.safetensors")):
        assert file.read_bytes() == (folder("resumed") / "model" / file.name).read_bytes()

    # all parts, those for images byte for byte, and the processor's files
    before = {}
    after = {}
    for file in (work / family).glob("*.safetensors"):
        before |= load_file(file)
    for file in (folder("full") / "model").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    for_images = {name for name in before if any(part in name for part in FOR_IMAGES)}
    assert for_images and not changed & for_images
    for name in ("processor_config.json", "preprocessor_config.json"):
        saved = (folder("full") / "model" / name).read_text()
        assert json.loads(saved) == json.loads((work / family / name).read_text())
    assert plain_processor(folder("full") / "model").chat_template

    def check_loss(name: str, model: Any) -> None:
        with torch.no_grad():
            loss, count = plain_loss(model.eval(), work / family, data)
        last = series(folder(name), "eval/loss")[-1]
        assert last == pytest.approx(loss.item() / count, rel=1e-5), name

    check_loss("full", model_of(folder("full") / "model"))
    adapted = PeftModel.from_pretrained(model_of(work / family), folder("lora") / "model")
    check_loss("lora", adapted)
    plain, count = plain_loss(model_of(work / family), work / family, data)
    for name in ("8bit", "bf16") if family in OTHERS else ():
        assert losses(folder(name))[0] == pytest.approx(plain.item() / count, rel=0.05), name


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ("charts_qwen3_vl", "Qwen3-VL"),
        pytest.param("charts_gemma3", "Gemma 3", marks=pytest.mark.slow),
    ],
)
def test_the_example_trains_on_its_charts(
    work: Path, tmp_path: Path, config: str, family: str
) -> None:
    image_model(work / family, family)
    examples = REPOSITORY / "examples"
    charts = tmp_path / "charts"
    drawn = forked(examples / "draw_charts.py", charts, "--count", "40")
    assert drawn.exit_code == 0, drawn.output
    flags = "--context_length 256 --max_train_step 1 --device cpu --no_plan --validation"
    paths = [f"--model_name={work / family}", f"--output_dir={tmp_path / 'run'}"]
    finished = forked(
        RECIPE,
        f"--config={examples / config}.yaml",
        f"--dataset={charts / 'train.jsonl'}",
        *flags.split(),
        charts / "validation.jsonl",
        *paths,
    )
    assert finished.exit_code == 0, finished.output
    assert "training: 36 images in " in finished.output
    assert "validation: 4 images in " in finished.output
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


def test_the_guide_names_the_families_that_are_compared_here() -> None:
    page = (REPOSITORY / "docs" / "guides" / "images.md").read_text()
    named = set[str]()
    for line in page.partition("## Families")[2].partition("## ")[0].splitlines():
        cells = line.split("|")
        if len(cells) == 6:  # with the empty ones around the four
            named.update(re.findall(r"`(\w+)`", cells[2]))
    assert named - {"model_type"} == {family[0] for family in FAMILIES.values()}


STREAM = (
    "--streaming --shuffle_buffer 60 --max_train_step 8 --save_steps 2 --batch_size_training 24"
)


@pytest.mark.slow  # pixels are freed in data/batches, and streams resume in test_resume
def test_a_stream_with_images_resumes_in_its_second_window_with_the_same_metrics(
    work: Path,
) -> None:
    image_model(work / "LLaVA", "LLaVA")
    lines = (work / "data" / "chats.jsonl").read_text().splitlines()
    rows = []
    for number in range(300):
        chat = json.loads(lines[number % len(lines)])
        chat["messages"][-1]["content"] = f"Number {number}."
        rows.append(chat)
    data = write_jsonl(work / "data" / "many.jsonl", rows)

    def run(name: str, *more: str) -> list[str]:
        flags = case(work, "LLaVA", name, 2, *STREAM.split(), "--precision", "fp32", *more)
        flags[flags.index("--dataset") + 1] = str(data)
        return [*flags, "--batching_strategy", "padding"]

    folder = work / "runs" / "stream"
    # 256 samples are the first window of 6 steps, of which the last one is smaller
    # the first window has 256 samples, a chunk, and 6 steps
    resume = str(folder / "checkpoints" / "step-000006")
    finished = run_cases(work, [run("stream"), run("streamed again", "--resume", resume)], 2)
    assert (
        "chats.jsonl" not in finished.output and "is streamed, 60 samples ahead" in finished.output
    )
    whole = reproducible_metrics(folder)
    assert len([line for line in whole if "train/loss" in line]) == 8
    assert whole == reproducible_metrics(work / "runs" / "streamed again")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("Qwen3-VL", 2), ("LLaVA", 0), ("Gemma 3", 2)])
def test_smaller_images_checkpointing_and_4_bits_have_the_losses_of_plain_transformers(
    work: Path, family: str, ranks: int
) -> None:
    image_model(work / family, family)
    data = work / "data" / "chats.jsonl"
    step = "--max_train_step 1 --batching_strategy packing --batch_size_training 1".split()
    steps = micro_batches("--batch_size_training 1", max(1, ranks))
    step += ["--gradient_accumulation_steps", str(steps)]
    kinds = {
        "full checkpointing": "--precision fp32 --activation_checkpointing full",
        "every second layer": "--precision fp32 --activation_checkpointing every_k",
        "small": "--precision fp32 --max_pixels 1200",
        "4bit": "--use_peft --quantization 4bit",
    }
    if ranks:
        kinds["selective"] = "--precision fp32 --activation_checkpointing selective"
    runs = []
    for name, flags in kinds.items():
        runs.append(case(work, family, f"{family} {name} {ranks}", ranks, *step, *flags.split()))
    run_cases(work, runs, ranks)

    folder = work / "smaller"
    folder.mkdir(exist_ok=True)
    for file in (work / "data").glob("[0-9].png"):
        image = Image.open(file).convert("RGB")
        pixels = image.width * image.height
        factor = min(1.0, (1200 / pixels) ** 0.5)
        size = (int(image.width * factor), int(image.height * factor))
        image.resize(size, Image.Resampling.BICUBIC).save(folder / file.name)
    (folder / "chats.jsonl").write_text(data.read_text())

    model = model_of(work / family)
    loss, count = plain_loss(model, work / family, data)
    small, small_count = plain_loss(model, work / family, folder / "chats.jsonl")
    assert small.item() / small_count != pytest.approx(loss.item() / count, rel=1e-4)
    for name in kinds:
        expected = loss.item() / count
        tolerance = 1e-5
        if name == "small":
            expected = small.item() / small_count
        elif name == "4bit":
            tolerance = 0.1
        found = losses(work / "runs" / f"{family} {name} {ranks}")[0]
        assert found == pytest.approx(expected, rel=tolerance), name
