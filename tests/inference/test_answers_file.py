"""Files of answers: what a second start goes on with, and what it leaves alone."""

import json
from pathlib import Path

import pytest

from llama_ft.errors import UserError
from llama_ft.inference import AnswersFile

SETTINGS = {"model": "output/run", "temperature": 0.5, "prompts": "1a", "stop": ("#",)}


def test_a_second_start_goes_on_after_whole_lines_of_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "new" / "answers.jsonl"
    with AnswersFile(file, SETTINGS, overwrite=False) as first:
        assert first.held == 0
        first.write([{"answer": "Lima \u2028 é"}, {"answer": "two"}])
        with pytest.raises(UserError, match="another process"):
            AnswersFile(file, SETTINGS, overwrite=False)
    whole = file.read_bytes()
    with open(file, "ab") as torn:
        torn.write(b'{"answer": "thr')
    with AnswersFile(file, SETTINGS, overwrite=False) as second:
        assert second.held == 2 and file.read_bytes() == whole
        second.write([{"answer": "three"}])
    assert [json.loads(line)["answer"] for line in file.read_text().split("\n")[:-1]] == [
        "Lima \u2028 é",
        "two",
        "three",
    ]

    changed = {**SETTINGS, "temperature": 0.7, "prompts": "2b"}
    with pytest.raises(UserError) as told:
        AnswersFile(file, changed, overwrite=False)
    assert "temperature: 0.5 then, 0.7 now" in str(told.value) and "the prompts are others" in str(told.value)
    assert "model" not in str(told.value)
    with AnswersFile(file, changed, overwrite=True) as third:
        assert third.held == 0
    assert file.read_text() == ""


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"answer": "mine"}\n')
    with pytest.raises(UserError, match=r"mine\.jsonl\.settings\.json, which would say what is in it"):
        AnswersFile(file, SETTINGS, overwrite=False)
    assert json.loads(file.read_text()) == {"answer": "mine"} and len(list(tmp_path.iterdir())) == 1
    for beside in ("[]", "7", "[" * 100_000):
        (tmp_path / "mine.jsonl.settings.json").write_text(beside)
        with pytest.raises(UserError, match="cannot be read"):
            AnswersFile(file, SETTINGS, overwrite=False)
