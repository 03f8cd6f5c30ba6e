"""Runs with groups of parameters and LoRA+, DPO or a quantized base, and their resumes. LoRA+ is the
reference: it trains every lora_B at a multiple of the learning rate, as a group can."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import losses, run_cases
from conftest import reproducible_metrics as facts
from plain_losses import write_pairs, write_tokenized
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FOUR_TIMES = "[{match: lora_B, lr: 4x}]"
TWICE = "[{match: lora_B, lr: 2x}]"
FROZEN = "[{match: embed_tokens|lm_head, freeze: true}, {match: norm, lr: 0.1x}]"
LORA = "--use_peft --target_modules all-linear --lora_dropout 0"
DPO = "--objective dpo --beta 0.3 --dataset @pairs.jsonl"
KINDS = {
    "sft": LORA,
    "sft-8bit": f"{LORA} --quantization 8bit",
    "sft-4bit": f"{LORA} --quantization 4bit",
    "dpo": f"{LORA} {DPO}",
    "dpo-8bit": f"{LORA} {DPO} --quantization 8bit",
    "dpo-4bit": f"{LORA} {DPO} --quantization 4bit",
}


def flags(folder: Path, name: str, more: str, groups: str = "", resume: str = "") -> list[str]:
    """The flags of a run: 4 steps, each with the whole data."""
    words = more.split()
    defaults = {
        "--model_name": "@model",
        "--dataset": "@samples.jsonl",
        "--context_length": "64",
        "--num_epochs": "4",
        "--save_steps": "2",
        "--precision": "fp32",
        "--lr": "3e-3",
        "--batching_strategy": "padding",
        "--batch_size_training": "2",
        "--gradient_accumulation_steps": "3",
        "--output_dir": f"@{name}",
    }
    kept = [word for flag, value in defaults.items() if flag not in words for word in (flag, value)]
    found = [word.replace("@", f"{folder}/") for word in [*kept, *words]]
    if groups:
        found += ["--groups", groups]
    if resume:
        found += ["--resume", f"{folder}/{resume}/checkpoints/step-000002"]
    return found


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group-runs")
    save_model(folder / "model", hidden_size=64, intermediate_size=128)  # whole blocks of 64
    write_tokenized(folder / "samples.jsonl", range(12, 18), seed=1)
    write_pairs(folder / "pairs.jsonl", 6)
    cases = []
    for kind, more in KINDS.items():
        cases += [
            flags(folder, f"{kind}-plus", f"{more} --loraplus_lr_ratio 4"),
            flags(folder, f"{kind}-plain", more),
            flags(folder, f"{kind}-group", more, FOUR_TIMES),
            flags(folder, f"{kind}-both", f"{more} --loraplus_lr_ratio 2", TWICE),
            flags(folder, f"{kind}-again", more, FOUR_TIMES, resume=f"{kind}-group"),
        ]
    frozen = f"{DPO} --rpo_alpha 0.5"
    cases.append(flags(folder, "frozen", frozen, FROZEN))
    cases.append(flags(folder, "frozen-again", frozen, FROZEN, resume="frozen"))
    run_cases(folder, cases, timeout=900)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def differing(one: Path, other: Path) -> list[str]:
    """Names of the weights that two directories have otherwise."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and ours
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_the_b_matrices_is_lora_plus(folder: Path, kind: str) -> None:
    """Alone, and as a factor of LoRA+'s own."""
    plus = folder / f"{kind}-plus"
    assert len(losses(plus)) == 4
    assert losses(plus) != losses(folder / f"{kind}-plain")
    for run in (folder / f"{kind}-group", folder / f"{kind}-both"):
        assert losses(run) == losses(plus)
        assert not differing(run / "model", plus / "model")


@pytest.mark.parametrize("run", [*(f"{kind}-group" for kind in KINDS), "frozen"])
def test_a_run_with_groups_resumes_bit_for_bit(folder: Path, run: str) -> None:
    resumed = folder / (f"{run}-again" if run == "frozen" else run.replace("-group", "-again"))
    assert facts(resumed) == facts(folder / run)
    assert not differing(resumed / "model", folder / run / "model")


def test_dpo_leaves_frozen_groups_as_they_were(folder: Path) -> None:
    """The reference is the base model, whose other weights have changed."""
    changed = differing(folder / "frozen" / "model", folder / "model")
    assert changed
    assert not [name for name in changed if "embed_tokens" in name or "lm_head" in name]
    same = weights(folder / "model").keys() - set(changed)
    assert all("embed_tokens" in name or "lm_head" in name for name in same)
