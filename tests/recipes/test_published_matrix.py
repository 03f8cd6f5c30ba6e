"""Every published format, with every method, on 1, 2 and 4 ranks and with both ways of loading, is
trained as the same checkpoint in 16 bits, and comes out in 16 bits."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_model, losses, run_cases
from models.test_load_weights import SCRIPT as LOAD_AND_DUMP
from published_models import PUBLISHED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llama_ft.checkpoint import Exporter, find_valid

pytestmark = pytest.mark.slow

SAMPLES = 8
SECONDS = 1500.0
LORA = ["--use_peft", "--lora_dropout", "0"]
METHODS: dict[str, list[str]] = {
    "full": [],
    "lora": LORA,
    "4bit": [*LORA, "--quantization", "4bit"],
    "8bit": [*LORA, "--quantization", "8bit"],
}
WAYS: dict[str, list[str]] = {"slices": [], "scatter": ["--low_cpu_fsdp"]}


@dataclass(frozen=True)
class Runs:
    """The output of a launch, and how many ranks it had."""

    folder: Path
    ranks: int


@pytest.fixture(scope="module")
def models(save_tokenizer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each model as it is published, and in 16 bits as <name>-plain."""
    folder = tmp_path_factory.mktemp("models")
    for name, (write, _) in PUBLISHED.items():
        write(save_tokenizer(folder / name), save_tokenizer(folder / f"{name}-plain"))
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 301, (10 + number,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": ids}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1rank", "2ranks", "4ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def runs(ranks: int, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps of each case, with all samples in each step. One way of loading is repeated from the
    first step's checkpoint, loading in the other way; quantized runs also from the checkpoint in 16
    bits."""
    folder = tmp_path_factory.mktemp(f"runs{ranks}")
    common = ["--dataset", str(models / "samples.jsonl"), "--device", "cpu", "--enable_fsdp"]
    common += ["--batching_strategy", "padding", "--batch_size_training", str(SAMPLES // ranks)]
    common += ["--precision", "fp32", "--lr", "1e-3", "--save_steps", "1", "--num_epochs", "2"]
    common += ["--max_train_step", "2"]
    flags = []
    for model, (_, targets) in PUBLISHED.items():
        for method, of_method in METHODS.items():
            settings = [*common, *of_method]
            if method != "full":
                settings += ["--target_modules", targets]
            if "bit" in method:
                plain = [*settings, "--model_name", str(models / f"{model}-plain")]
                flags.append([*plain, "--output_dir", f"{folder}/{model}-{method}-plain"])
            settings += ["--model_name", str(models / model)]
            for way, of_way in WAYS.items():
                place = f"{folder}/{model}-{method}-{way}"
                flags.append([*settings, *of_way, "--output_dir", place])
                if way == "slices":
                    again = [*settings, *WAYS["scatter"], "--output_dir", f"{place}-resumed"]
                    flags.append([*again, "--resume", f"{place}/checkpoints/step-000001"])
    run_cases(folder, flags, ranks=0 if ranks == 1 else ranks, timeout=SECONDS)
    return Runs(folder, ranks)


@pytest.fixture(scope="module")
def first_loss(models: Path) -> Callable[[str], float]:
    """Model -> plain Transformers' mean loss of all samples."""

    def measure(name: str) -> float:
        model = AutoModelForCausalLM.from_pretrained(models / f"{name}-plain", dtype=torch.float32)
        total = 0.0
        tokens = 0
        for line in (models / "samples.jsonl").read_text().splitlines():
            ids = torch.tensor([json.loads(line)["input_ids"]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
            total += loss.item()
            tokens += ids.shape[1] - 1
        return total / tokens

    return functools.cache(measure)


def test_each_rank_holds_the_rows_of_the_checkpoint_in_16_bits(
    ranks: int, models: Path, tmp_path: Path
) -> None:
    """Weights, quantized weights and their scales are equal to the last bit."""
    peft = {"use_peft": True, "r": 6, "target_modules": "all-linear"}
    settings: dict[str, dict[str, Any]] = {
        "full": {"peft": {}, "precision": "fp32"},
        "lora": {"peft": peft, "precision": "bf16_mixed"},
    }
    for bits in ("4bit", "8bit"):
        settings[bits] = settings["lora"] | {"quantization": {"mode": bits}}
    cases = {}
    for model in PUBLISHED:
        for method, of_method in settings.items():
            for way in WAYS:
                for form in (model, f"{model}-plain"):
                    cases[f"{form}-{method}-{way}"] = {
                        "model": str(models / form),
                        "shard_degree": "world",
                        "scatter": way == "scatter",
                        **of_method,
                    }
    count = 0 if ranks == 1 else ranks
    run_cases(tmp_path, cases, ranks=count, script=LOAD_AND_DUMP, timeout=SECONDS)
    compared = 0
    for model in PUBLISHED:
        for method in settings:
            for rank in range(ranks):
                plain = tmp_path / f"{model}-plain-{method}-slices-rank{rank}.pt"
                expected = torch.load(plain)
                for way in WAYS:
                    held = torch.load(tmp_path / f"{model}-{method}-{way}-rank{rank}.pt")
                    assert held.keys() == expected.keys()
                    for name, tensor in held.items():
                        assert tensor.dtype == expected[name].dtype
                        assert torch.equal(tensor, expected[name]), (model, method, way, name)
                        compared += 1
    assert compared > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_run_is_that_of_the_checkpoint_in_16_bits(
    runs: Runs,
    models: Path,
    first_loss: Callable[[str], float],
    tmp_path: Path,
    model: str,
    method: str,
    way: str,
) -> None:
    run = runs.folder / f"{model}-{method}-{way}"
    by_step = losses(run)
    resumed = runs.folder / f"{model}-{method}-slices-resumed"
    assert losses(resumed)[-1] == by_step[-1]
    if "bit" in method:
        assert by_step == losses(runs.folder / f"{model}-{method}-plain")
    else:
        assert by_step[0] == pytest.approx(first_loss(model), rel=1e-5)
    check_result(run, models, model, tmp_path / "exported", merge=method != "full")


def check_result(run: Path, models: Path, model: str, exported: Path, merge: bool) -> None:
    """Compare the final model with the checkpoint in 16 bits, or the merged adapter with PEFT's."""
    from peft import PeftModel

    base: Any = AutoModelForCausalLM.from_pretrained(models / f"{model}-plain", dtype=torch.float32)
    if merge:
        settings = json.loads((run / "model" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(models / model)
        base = PeftModel.from_pretrained(base, run / "model").merge_and_unload()
    expected = base.state_dict()
    exporter = Exporter.prepare(
        find_valid(run), build_model(), None, None, trust_remote_code=False, merge=merge
    )
    exporter.write_model(exported, None, 10**9)
    config = json.loads((exported / "config.json").read_text())
    assert "quantization_config" not in config
    stored = load_file(exported / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} <= {torch.bfloat16, torch.float32}
    whole = load_file(models / f"{model}-plain" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        name: tensor.dtype for name, tensor in whole.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    # full fine-tuning: two steps of AdamW with a learning rate of 1e-3, rounded to bf16
    largest_change = 1e-5 if merge else 3e-3
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=largest_change)
    if not merge:
        written = load_file(run / "model" / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
