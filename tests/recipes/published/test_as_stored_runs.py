"""LoRA on weights that stay as they are published computes what LoRA on the dequantized model does."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, build_model, losses, run_cases
from forked import forked
from models.published.test_sources import (
    GPT_OSS,
    LLAMA,
    MXFP4_NOTE,
    experts_in_mxfp4,
    fp8_note,
    in_blocks,
    publish,
)
from safetensors.torch import load_file

from llama_ft.export import Exporter, find_valid

WORLD_SIZES = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
SAMPLES = 8
# 576 rows are 4.5 blocks
EDGE = LLAMA | {"intermediate_size": 576, "num_hidden_layers": 2}
MODELS: dict[str, tuple[Any, ...]] = {
    "fp8": ("llama", EDGE, fp8_note(), in_blocks),
    "mxfp4": ("gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4),
}
EXPERTS = ["--target_parameters", "mlp.experts.gate_up_proj,mlp.experts.down_proj"]
CASES = {
    "fp8": ("fp8", ["--target_modules", "q_proj,down_proj"]),
    "fp8-scatter": ("fp8", ["--target_modules", "q_proj,down_proj", "--low_cpu_fsdp"]),
    "mxfp4": ("mxfp4", ["--target_modules", "q_proj,o_proj"]),
    "mxfp4-experts": ("mxfp4", ["--target_modules", "q_proj", *EXPERTS, "--low_cpu_fsdp"]),
}
FAST = ("fp8-scatter", "mxfp4-experts")
Launch = Callable[[str], Path]
# With this optimizer the change of an adapter is its gradient.
OPTIMIZER = """
import torch

def sgd(groups):
    return torch.optim.SGD(groups)
"""


@pytest.fixture(scope="module", params=WORLD_SIZES)
def runs(
    request: pytest.FixtureRequest,
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Launch:
    """The runs of a case, in one launch with those of the fast cases or of the others."""

    @functools.cache
    def runs_of(fast: bool) -> Path:
        folder = tmp_path_factory.mktemp("as-stored")
        run_all(folder, save_tokenizer, request.param, fast)
        return folder

    return lambda name: runs_of(name in FAST)


def run_all(folder: Path, save_tokenizer: Callable[..., Path], ranks: int, fast: bool) -> None:
    """Two steps of each case as stored and dequantized, and the first from its first checkpoint."""
    for name, published in MODELS.items():
        publish(save_tokenizer(folder / name), *published)
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(SAMPLES):
        ids = torch.randint(0, 301, (10 + number,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": ids}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    (folder / "sgd.py").write_text(OPTIMIZER)
    common = ["--dataset", f"{folder}/samples.jsonl", "--device", "cpu", "--precision", "fp32"]
    common += ["--batching_strategy", "padding", "--batch_size_training", str(SAMPLES // ranks)]
    common += ["--max_train_step", "2", "--num_epochs", "2", "--save_steps", "1", "--enable_fsdp"]
    common += ["--use_peft", "--lora_dropout", "0", "--optimizer", f"{folder}/sgd.py:sgd"]
    common += ["--lr", "1", "--weight_decay", "0", "--lr_scheduler", "constant"]
    flags = []
    for name, (model, of_case) in CASES.items():
        if (name in FAST) != fast:
            continue
        run = [*common, *of_case, "--model_name", f"{folder}/{model}"]
        stored = [*run, "--quantization", "as_stored"]
        flags.append([*run, "--output_dir", f"{folder}/{name}-dequantized"])
        flags.append([*stored, "--output_dir", f"{folder}/{name}-stored"])
        checkpoint = f"{folder}/{name}-stored/checkpoints/step-000001"
        again = [*stored, "--resume", checkpoint]
        flags.append([*again, "--output_dir", f"{folder}/{name}-resumed"])
    finished = run_cases(folder, flags, ranks=0 if ranks == 1 else ranks)
    (folder / "output.txt").write_text(finished.output)


MARKED = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", MARKED)
def test_losses_and_gradients_are_those_of_the_dequantized_model(runs: Launch, name: str) -> None:
    stored = runs(name) / f"{name}-stored"
    expected = runs(name) / f"{name}-dequantized"
    assert losses(stored) == pytest.approx(losses(expected), rel=1e-5)
    changes = adapter(expected)
    found = adapter(stored)
    assert found.keys() == changes.keys()
    changed = [key for key, tensor in changes.items() if "lora_B" in key and tensor.any()]
    assert len(changed) > 3  # lora_B begins with zeros
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, changes[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MARKED)
def test_a_resumed_run_has_the_same_last_loss(runs: Launch, name: str) -> None:
    assert losses(runs(name) / f"{name}-resumed")[-1] == losses(runs(name) / f"{name}-stored")[-1]


@pytest.mark.parametrize("name", FAST)
def test_an_adapter_names_the_published_base_and_merges_as_that_of_the_dequantized_model(
    runs: Launch, tmp_path: Path, name: str
) -> None:
    folder = runs(name)
    settings = json.loads((folder / f"{name}-stored/model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder / CASES[name][0])
    merged = []
    for kind in ("stored", "dequantized"):
        exporter = Exporter.prepare(
            find_valid(folder / f"{name}-{kind}"),
            build_model(),
            None,
            None,
            trust_remote_code=False,
            merge=True,
        )
        exporter.write_model(tmp_path / kind, None, 10**9)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert "quantization_config" not in config
        merged.append(load_file(tmp_path / kind / "model.safetensors"))
    stored, expected = merged
    assert stored.keys() == expected.keys()
    for key, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, expected[key], rtol=1e-2, atol=1e-6)


def test_the_start_says_what_is_kept(runs: Launch) -> None:
    output = " ".join((runs(FAST[0]) / "output.txt").read_text().split())
    assert "Other weights than those kept as stored are read in 16 bits" in output
    assert "Kept in FP8, as stored: 14 linear layers" in output
    assert "Kept in MXFP4, as stored: 0 linear layers and 4 stacks of experts" in output


def test_inference_reads_the_base_as_the_run_did(runs: Launch) -> None:
    script = RECIPE.with_name("inference.py")
    flags = ["--prompt", "a", "--max_new_tokens", "2", "--device", "cpu"]
    finished = forked(script, str(runs("mxfp4-experts") / "mxfp4-experts-stored"), *flags)
    assert finished.exit_code == 0, finished.output
    assert "MXFP4, as stored" in " ".join(finished.output.split())


def test_full_fine_tuning_as_stored_is_rejected(
    save_tokenizer: Callable[..., Path], rows16: Path, tmp_path: Path
) -> None:
    base = publish(save_tokenizer(tmp_path / "base"), *MODELS["fp8"])
    flags = ["--model_name", str(base), "--dataset", str(rows16), "--quantization", "as_stored"]
    finished = forked(RECIPE, *flags, "--output_dir", f"{tmp_path}/run")
    assert finished.exit_code == 2
    text = " ".join(finished.output.split())
    assert "--quantization is as_stored, but quantized weights cannot be trained" in text
    assert "Traceback" not in text and not (tmp_path / "run").exists()
