"""Files of answers: what a second start goes on with, and what it leaves alone."""

import json
import math
import re
from pathlib import Path

import pytest

from llama_ft.errors import RunFailure, UserError
from llama_ft.inference import AnswersFile

SETTINGS = {"model": "output/run", "temperature": 0.5, "prompts": "1a", "stop": ("#",), "output_key": "answer"}
ROWS = [{"prompt": "a"}, {"prompt": "b", "share": math.nan}, {"prompt": "c"}]


def test_a_second_start_goes_on_after_whole_lines_of_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "new" / "answers.jsonl"
    with AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS) as first:
        assert first.held == 0
        first.write([{**ROWS[0], "answer": "Lima \u2028 é"}, {**ROWS[1], "answer": "two"}])
        with pytest.raises(UserError, match="another process"):
            AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS)
    whole = file.read_bytes()
    with open(file, "ab") as torn:
        torn.write(b'{"prompt": "c", "answer": "thr')
    with AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS) as second:
        assert second.held == 2 and file.read_bytes() == whole
        second.write([{**ROWS[2], "answer": "three"}])
    assert [json.loads(line)["answer"] for line in file.read_text().split("\n")[:-1]] == [
        "Lima \u2028 é",
        "two",
        "three",
    ]

    changed = {**SETTINGS, "temperature": 0.7, "prompts": "2b"}
    with pytest.raises(UserError) as told:
        AnswersFile(file, changed, overwrite=False, rows=ROWS)
    assert "temperature: 0.5 then, 0.7 now" in str(told.value) and "the prompts are others" in str(told.value)
    assert "model" not in str(told.value)
    with AnswersFile(file, changed, overwrite=True, rows=ROWS) as third:
        assert third.held == 0
    assert file.read_text() == ""


A, B, C = (json.dumps({**row, "answer": "x"}) for row in ROWS)


@pytest.mark.parametrize(
    ("lines", "line", "told"),
    [
        ([A, "", B], 2, "is blank."),
        ([A, C], 2, "is not the answer to the prompt of this place."),
        ([B, A], 1, "is not the answer to the prompt of this place."),
        ([A, B, C, A], 4, "there are fewer prompts than answers."),
        ([A, '{"prompt": "b", "share": NaN}'], 2, 'is no row with "answer".'),
        ([A, "[]"], 2, 'is no row with "answer".'),
    ],
    ids=["blank", "missing", "order", "more", "key", "list"],
)
def test_answers_that_are_not_those_to_the_prompts_are_not_gone_on_with(
    lines: list[str], line: int, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "answers.jsonl"
    AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS).__exit__(None, None, None)
    file.write_text(text := "".join(f"{line}\n" for line in lines) + '{"promp')
    with pytest.raises(UserError, match=re.escape(f"answers.jsonl:{line}: {told}")):
        AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS)
    assert file.read_text() == text


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"answer": "mine"}\n')
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"no mine\.jsonl\.settings\.json beside it, which would say what"):
            AnswersFile(file, SETTINGS, overwrite, rows=ROWS)
    assert json.loads(file.read_text()) == {"answer": "mine"} and len(list(tmp_path.iterdir())) == 1
    for beside in ("[]", "7", "[" * 100_000):
        (tmp_path / "mine.jsonl.settings.json").write_text(beside)
        with pytest.raises(UserError, match="cannot be read"):
            AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS)


def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.symlink_to("/dev/full")
    with (
        pytest.raises(RunFailure, match=r"answers\.jsonl: could not be written \(No space left on device\)") as told,
        AnswersFile(file, SETTINGS, overwrite=False, rows=ROWS) as answers,
    ):
        answers.write([{"answer": "one"}])
    assert "The same command goes on after the answers that are there." in str(told.value)
