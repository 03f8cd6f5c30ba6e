"""Runs on checkpoints that are published quantized, compared with Transformers' dequantized model."""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, build_model, losses, run_cases
from forked import forked
from models.published.test_compressed_tensors import HAS_LIBRARY, INT4, SHAPE, publish_compressed
from models.published.test_sources import (
    GPT_OSS,
    LLAMA,
    MXFP4_NOTE,
    SCALE,
    broken,
    experts_in_mxfp4,
    fp8_note,
    in_blocks,
    publish,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

WORLD_SIZES = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.large)]
MODELS: dict[str, tuple[Any, ...]] = {
    "fp8": ("llama", LLAMA, fp8_note(), in_blocks),
    "mxfp4": ("gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4),
}
DEQUANTIZE = {
    "fp8": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
}
FULL = ["--enable_fsdp", "--save_steps", "1"]
LORA = ["--enable_fsdp", "--low_cpu_fsdp", "--use_peft", "--lora_dropout", "0", "--save_steps", "1"]
LORA += ["--target_modules", "q_proj,o_proj"]
BITS = {"4bit": ["4bit"], "8bit": ["8bit"], "4bit-double": ["4bit", "--double_quant"]}
CASES = {
    "fp8-full": ("fp8", FULL),
    "fp8-lora": ("fp8", LORA),
    "fp8-bf16": ("fp8", [*LORA, "--precision", "bf16_mixed"]),
    "mxfp4-full": ("mxfp4", [*FULL, "--low_cpu_fsdp"]),
    "mxfp4-lora": ("mxfp4", LORA),
}
if HAS_LIBRARY:
    CASES |= {
        "int4-full": ("int4", FULL),
        "int4-lora": ("int4", LORA),
    }
    MODELS["int4"] = ()
for model in MODELS:
    for bits, words in BITS.items():
        CASES[f"{model}-lora-{bits}"] = (model, [*LORA, "--quantization", *words])
LINES = {
    "fp8": "FP8 in blocks of 128 x 128",
    "mxfp4": "experts in MXFP4",
    "int4": "integers of 4 or 8 bits in groups",
}
SAMPLES = 8
Launch = Callable[[str], Path]


# One way to load each kind of weights, in full fine-tuning and in both kinds of LoRA. The other
# formats are loaded in one process by test_published and test_compressed_tensors.
FAST = ("fp8-full", "fp8-lora", "fp8-lora-4bit", "int4-lora")


def marked(names: Iterable[str]) -> list[Any]:
    """Names of cases."""
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def launch(
    request: pytest.FixtureRequest,
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Launch:
    """The runs of a case, in one launch with the other fast, or slow, cases of its model."""

    @functools.cache
    def runs_of(model: str, fast: bool) -> Path:
        folder = tmp_path_factory.mktemp("published")
        publish_model(folder, model, save_tokenizer)
        plain = save_dequantized(folder, model, save_tokenizer)
        run_all(folder, model, plain, request.param, fast)
        return folder

    return lambda name: runs_of(CASES[name][0], name in FAST)


def publish_model(folder: Path, model: str, save_tokenizer: Callable[..., Path]) -> None:
    save_tokenizer(folder / model)
    if MODELS[model]:
        publish(folder / model, *MODELS[model])
    else:
        expected = publish_compressed(folder / model, "pack-quantized", INT4)
        torch.save(expected, folder / "int4.pt")


def run_all(folder: Path, model: str, plain: Path, ranks: int, fast: bool) -> None:
    """Two steps of each case, with all samples in each step, and a second run of each from the
    first step's checkpoint."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 301, (10 + number,), generator=generator).tolist()
        samples.append(json.dumps({"input_ids": ids, "labels": ids}))
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(samples))
    common = ["--dataset", str(rows), "--device", "cpu", "--precision", "fp32", "--lr", "1e-3"]
    common += ["--batching_strategy", "padding", "--batch_size_training", str(SAMPLES // ranks)]
    common += ["--max_train_step", "2", "--num_epochs", "2"]
    flags = []
    for bits, words in BITS.items():
        if (f"{model}-lora-{bits}" in FAST) != fast:
            continue
        run = [*common, *LORA, "--model_name", str(plain), "--quantization", *words]
        flags.append([*run, "--output_dir", f"{folder}/{model}-plain-{bits}"])
    for name, (base, settings) in CASES.items():
        if base == model and (name in FAST) == fast:
            run = [*common, "--model_name", f"{folder}/{model}", *settings]
            again = ["--resume", f"{folder}/{name}/checkpoints/step-000001"]
            flags.append([*run, "--output_dir", f"{folder}/{name}"])
            flags.append([*run, "--output_dir", f"{folder}/{name}-resumed", *again])
    finished = run_cases(folder, flags, ranks=0 if ranks == 1 else ranks)
    (folder / "output.txt").write_text(finished.output)


def dequantized(folder: Path, name: str) -> Any:
    """Return Transformers' model, dequantized to bf16 and then widened to fp32. That of
    compressed-tensors has the weights that the library decompressed."""
    if name == "int4":
        config = AutoConfig.for_model("llama", **SHAPE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = torch.load(folder / "int4.pt")
        stored = load_file(folder / name / "model.safetensors")
        tensors |= {key: value for key, value in stored.items() if ".weight_" not in key}
        model.load_state_dict(tensors)
        return model.float()
    model = AutoModelForCausalLM.from_pretrained(
        folder / name, dtype="auto", quantization_config=DEQUANTIZE[name]
    )
    return model.float()


def save_dequantized(folder: Path, name: str, save_tokenizer: Callable[..., Path]) -> Path:
    """Save Transformers' dequantized model as a plain checkpoint in bf16."""
    model = dequantized(folder, name).bfloat16()
    config = AutoConfig.for_model(**{**model.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    place = save_tokenizer(folder / f"{name}-plain")
    plain.save_pretrained(place)
    return place


@pytest.mark.parametrize("name", marked(name for name in CASES if "bit" in name))
def test_quantized_again_it_trains_as_the_dequantized_model(launch: Launch, name: str) -> None:
    runs = launch(name)
    assert losses(runs / name) == losses(runs / name.replace("lora", "plain"))


@pytest.mark.parametrize("name", marked(name for name in CASES if "bit" not in name))
def test_the_first_loss_is_that_of_the_dequantized_model(launch: Launch, name: str) -> None:
    runs = launch(name)
    model = dequantized(runs, CASES[name][0])
    if "bf16" in name:
        model = model.bfloat16()
    total = 0.0
    tokens = 0
    for line in (runs / "rows.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        total += loss.item()
        tokens += ids.shape[1] - 1
    assert losses(runs / name)[0] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("name", marked(CASES))
def test_a_resumed_run_has_the_same_last_loss(launch: Launch, name: str) -> None:
    runs = launch(name)
    assert losses(runs / f"{name}-resumed")[-1] == losses(runs / name)[-1]


@pytest.mark.parametrize("name", marked(f"{model}-lora" for model in MODELS))
def test_the_start_says_what_was_found(launch: Launch, name: str) -> None:
    output = " ".join((launch(name) / "output.txt").read_text().split())
    assert f"quantized: {LINES[CASES[name][0]]}" in output


@pytest.mark.parametrize("name", marked(f"{model}-full" for model in MODELS))
def test_full_fine_tuning_writes_16_bits(launch: Launch, name: str) -> None:
    runs = launch(name)
    folder = runs / name / "model"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    expected = dequantized(runs, CASES[name][0]).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert trained.keys() == expected.keys()
    for key, tensor in trained.items():
        # two steps of AdamW with a learning rate of 1e-3, rounded to bf16
        torch.testing.assert_close(tensor, expected[key], rtol=1e-2, atol=3e-3)


@pytest.mark.parametrize("name", marked(name for name in CASES if "lora" in name))
def test_an_adapter_names_the_published_base_and_merges_into_16_bits(
    launch: Launch, tmp_path: Path, name: str
) -> None:
    from peft import PeftModel

    from llama_ft.export import Exporter, find_valid

    runs = launch(name)
    model = CASES[name][0]
    adapter = runs / name / "model"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(runs / model)
    checkpoint = find_valid(runs / name)
    exporter = Exporter.prepare(
        checkpoint, build_model(), None, None, trust_remote_code=False, merge=True
    )
    exporter.write_model(tmp_path / "merged", None, 10**9)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    by_peft: Any = PeftModel.from_pretrained(dequantized(runs, model), adapter)
    expected = by_peft.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for key, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), expected[key], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("ways", [[], pytest.param(["--low_cpu_fsdp"], marks=pytest.mark.slow)])
def test_a_scale_that_is_not_finite_ends_the_run_while_loading(
    save_tokenizer: Callable[..., Path], rows16: Path, tmp_path: Path, ways: list[str]
) -> None:
    """Only the rank that reads it knows; the others do not hang."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALE][-1, 0] = float("nan")

    base = broken(save_tokenizer(tmp_path / "base"), change)
    flags = ["--model_name", str(base), "--dataset", str(rows16), "--enable_fsdp", "--no_plan"]
    flags += ["--use_peft", "--output_dir", f"{tmp_path}/run", *ways]
    finished = forked(RECIPE, *flags, ranks=2)
    assert finished.exit_code == 2
    text = " ".join(finished.output.split())
    assert f"model.safetensors: {SCALE} has values that are not finite" in text
    assert text.count("error: ") == 1 and "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_a_scale_of_another_shape_is_found_before_samples_are_read(
    save_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    base = broken(
        save_tokenizer(tmp_path / "base"), lambda tensors: tensors.update({SCALE: torch.ones(9, 1)})
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("not JSON")
    flags = ["--model_name", str(base), "--dataset", str(rows), "--output_dir", f"{tmp_path}/run"]
    finished = forked(RECIPE, *flags)
    assert finished.exit_code == 2
    text = " ".join(finished.output.split())
    assert f"model.safetensors: {SCALE} has the shape [9, 1]; expected [3, 2]" in text
    assert "rows.jsonl" not in text.rpartition("error: ")[2] and "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_a_merge_says_how_to_quantize_again(launch: Launch, tmp_path: Path) -> None:
    script = RECIPE.with_name("export.py")
    finished = forked(
        script, str(launch("fp8-lora") / "fp8-lora"), str(tmp_path / "merged"), "--merge"
    )
    assert finished.exit_code == 0, finished.output
    text = " ".join(finished.output.split())
    assert "quantized: FP8 in blocks of 128 x 128. It is read in 16 bits" in text
    assert "To quantize the result again, use for example llm-compressor" in text
