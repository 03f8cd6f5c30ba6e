"""The last lines of a run."""

import sys
from pathlib import Path

import pytest

from llama_ft.config import load
from llama_ft.config.paths import RUN_MARKER
from llama_ft.observe.summary import RunOutcome, summary

OUTCOME = RunOutcome(
    ended="step 2 of 2",
    seconds=1.0,
    best_of="validation loss",
    best_value=1.0,
    best_step=2,
    weights_of=2,
    has_validation=True,
)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/usr/bin/llama-ft train", "Chat with it: llama-ft chat out/a"),
        ("recipes/finetuning.py", "python recipes/inference.py out/a"),
    ],
)
def test_the_next_commands_are_those_of_the_command_that_was_used(
    script: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    config, _ = load(["--model_name", "demo"], paths=False)
    said = summary(config, Path("out/a"), Path("recipes"), OUTCOME)
    assert expected in said
    assert ("llama-ft" in said) == ("llama-ft" in script)


@pytest.mark.parametrize(("objective", "is_named"), [("sft", True), ("grpo", False)])
def test_an_evaluation_is_named_if_samples_have_responses(objective: str, is_named: bool) -> None:
    config, _ = load(["--model_name", "demo", "--objective", objective], paths=False)
    said = summary(config, Path("out/a"), Path("recipes"), OUTCOME)
    assert ("Evaluate it: " in said) == is_named


def test_the_newest_run_is_not_named_in_the_commands_that_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llama-ft train"])
    monkeypatch.chdir(tmp_path)
    run = Path("output/run")
    run.mkdir(parents=True)
    (run / RUN_MARKER).touch()
    config, _ = load(["--model_name", "demo", "--use_peft"], paths=False)
    said = summary(config, run, Path("recipes"), OUTCOME)
    assert "Chat with it: llama-ft chat\nEvaluate it: llama-ft evaluate --base\n" in said
    assert "Merge it: llama-ft export output/run output/run-exported --merge" in said
