"""The last lines of a run."""

import sys
from pathlib import Path

import pytest

from llama_ft.config import load
from llama_ft.observe.summary import RunOutcome, summary


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
    outcome = RunOutcome(
        ended="step 2 of 2",
        seconds=1.0,
        best_of="validation loss",
        best_value=1.0,
        best_step=2,
        weights_of=2,
        has_validation=True,
    )
    config, _ = load(["--model_name", "demo"], paths=False)
    said = summary(config, Path("out/a"), Path("recipes"), outcome)
    assert expected in said
    assert ("llama-ft" in said) == ("llama-ft" in script)
