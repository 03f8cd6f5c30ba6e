"""At its end a run writes the log-probabilities of a few prompts, which Transformers and PEFT
compute from what it has written."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_cases, write_rows
from model_server import log_probabilities
from peft import PeftModel
from transformers import AutoModelForCausalLM

from llama_ft.errors import UserError
from llama_ft.extensions.serving.probes.probes import Probe, Probes, find_probes

SETTINGS = "--context_length 64 --max_train_step 3 --lr 3e-2 --precision fp32 --seed 3"
LORA = "--use_peft --peft.r 4 --peft.lora_dropout 0.1"
CASES = {
    "lora": f"{LORA} --validation 0.5",
    "padded": f"{LORA} --enable_fsdp --batching_strategy padding --micro_batch 2",
    "full": "--enable_fsdp",
    "8bit": f"{LORA} --enable_fsdp --quantization 8bit",
    "norms": f"{LORA} --peft.modules_to_save [norm]",
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each case on two ranks."""
    folder = tmp_path_factory.mktemp("probes")
    rows = write_rows(folder / "rows.jsonl", 40)
    cases = []
    for name, flags in CASES.items():
        paths = f"--model_name {tiny_model} --dataset {rows} --output_dir {folder / name}"
        cases.append(f"{paths} {SETTINGS} {flags}".split())
    run_cases(folder, cases, ranks=2)
    return folder


def largest_difference(model: Any, probes: Probes, which: str) -> float:
    """Between a model and the numbers of a run, over all probes."""
    largest = 0.0
    for probe in probes.probes:
        found = log_probabilities(model.eval(), probe.token_ids)
        of_tokens = found[:-1].gather(1, torch.tensor(probe.token_ids[1:]).unsqueeze(1)).squeeze(1)
        pairs = [
            (of_tokens, getattr(probe.scores, which)),
            (found[-1][list(probe.next_ids)], getattr(probe.next_scores, which)),
        ]
        for expected, stored in pairs:
            largest = max(largest, float((expected - torch.tensor(stored)).abs().max()))
    return largest


@pytest.mark.parametrize("name", ["lora", "padded"])
def test_probes_of_an_adapter_are_those_of_peft_and_of_the_base_model(
    runs: Path, tiny_model: Path, name: str
) -> None:
    _, probes = find_probes(str(runs / name))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert len(probes.probes) == 8 and probes.is_adapter
    assert largest_difference(base, probes, "base") < 1e-3
    tuned = PeftModel.from_pretrained(base, runs / name / "model")
    assert largest_difference(tuned, probes, "fine_tuned") < 1e-3
    assert largest_difference(tuned, probes, "base") > 0.1
    for layer in tuned.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] *= 0.9
    assert largest_difference(tuned, probes, "weaker") < 1e-3
    assert largest_difference(tuned, probes, "fine_tuned") > 1e-2


def test_probes_of_a_whole_model_have_no_base(runs: Path) -> None:
    _, probes = find_probes(str(runs / "full" / "model"))
    tuned = AutoModelForCausalLM.from_pretrained(runs / "full" / "model", dtype=torch.float32)
    assert largest_difference(tuned, probes, "fine_tuned") < 1e-3
    assert not probes.is_adapter
    assert all(
        probe.scores.base is None and probe.next_scores.base is None for probe in probes.probes
    )


def test_probes_of_a_quantized_base_model_name_the_quantization(
    runs: Path, tiny_model: Path
) -> None:
    _, probes = find_probes(str(runs / "8bit"))
    assert probes.quantization == "8bit"
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert 1e-3 < largest_difference(base, probes, "base") < 3
    tuned = PeftModel.from_pretrained(base, runs / "8bit" / "model")
    assert largest_difference(tuned, probes, "fine_tuned") < largest_difference(
        tuned, probes, "base"
    )


def test_without_the_adapter_trained_norms_are_not_the_base_model(runs: Path) -> None:
    _, probes = find_probes(str(runs / "norms"))
    assert probes.is_adapter and probes.probes[0].scores.base is None


def test_probes_are_validation_samples_and_a_chat_as_it_was_rendered(
    runs: Path, tiny_model: Path
) -> None:
    file, probes = find_probes(str(runs / "lora"))
    assert file == runs / "lora" / "model" / "probes.json"
    assert len({tuple(probe.token_ids) for probe in probes.probes}) == 8
    assert all(4 <= len(probe.token_ids) <= 63 for probe in probes.probes)
    assert probes.chat is not None and probes.chat.messages[-1]["role"] == "user"
    rendered = list(probes.chat.token_ids)
    assert any(list(probe.token_ids[: len(rendered)]) == rendered for probe in probes.probes)
    scores = [score for probe in probes.probes for score in probe.next_scores.fine_tuned]
    assert all(math.isfinite(score) and score < 0 for score in scores)


def test_probes_are_read_as_they_were_written(tmp_path: Path, runs: Path) -> None:
    file, probes = find_probes(str(runs / "lora"))
    probes.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(file.read_text())
    assert isinstance(probes.probes[0], Probe)


def test_probes_that_are_nested_too_deep_are_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "probes.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"probes\.json: cannot be read"):
        find_probes(str(tmp_path))
