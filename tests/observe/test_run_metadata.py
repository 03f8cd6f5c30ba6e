"""facts.json: what is merged, what is kept of an earlier attempt, and what a full disk does."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ft.observe import RunMetadata, environment
from llama_ft.observe.run_metadata import FACTS_FILE, git_commit


def facts(folder: Path) -> dict:
    return dict(json.loads((folder / FACTS_FILE).read_text()))


def test_facts_are_merged_key_by_key_and_lists_replaced(tmp_path: Path) -> None:
    kept = RunMetadata(tmp_path)
    kept.add(memory={"phases": {"load": [1]}, "unit": "device"}, units=[1, 2])
    kept.add(memory={"phases": {"load": [2], "save": [3]}}, units=[4])
    RunMetadata(tmp_path, enabled=False).add(units=[5])
    assert facts(tmp_path) == {
        "memory": {"phases": {"load": [2], "save": [3]}, "unit": "device"},
        "units": [4],
    }


def test_a_resumed_run_keeps_the_answers_before_fine_tuning(tmp_path: Path) -> None:
    RunMetadata(tmp_path).add_samples(
        "before", [{"question": "?", "answer": "half a character \udc80"}]
    )
    resumed = RunMetadata(tmp_path)
    resumed.add_samples("after", [{"question": "?", "answer": "1"}])
    resumed.add_samples(
        "after", [{"question": "?", "answer": "2"}, {"question": "!", "answer": "3"}]
    )
    resumed.add_samples("after", [])
    answers = [(sample["when"], sample["answer"]) for sample in facts(tmp_path)["samples"]]
    assert answers == [("before", "half a character \udc80"), ("after", "2"), ("after", "3")]


@pytest.mark.parametrize(
    "content",
    [
        b"", b'{"memory": 1', b"[1, 2]", b"5", b'"text"', b"\xff\xfe", b'{"samples": 5}', b'{"samples": [5]}',
        b'{"samples": [{}]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_corrupted_file_gives_a_warning(
    content: bytes, tmp_path: Path, screen: io.StringIO
) -> None:
    (tmp_path / FACTS_FILE).write_bytes(content)
    kept = RunMetadata(tmp_path)
    assert "facts.json is corrupted" in screen.getvalue()
    kept.add(units=[2])
    kept.add_samples("before", [{"question": "?", "answer": "1"}])
    assert facts(tmp_path)["units"] == [2] and len(facts(tmp_path)["samples"]) == 1


def test_facts_of_another_type_are_replaced(tmp_path: Path) -> None:
    (tmp_path / FACTS_FILE).write_text('{"memory": [1], "units": {"a": 1}}')
    kept = RunMetadata(tmp_path)
    kept.add(memory={"unit": "device"}, units=[2])
    assert facts(tmp_path) == {"memory": {"unit": "device"}, "units": [2]}


def test_a_file_that_cannot_be_written_gives_a_warning(tmp_path: Path, screen: io.StringIO) -> None:
    kept = RunMetadata(tmp_path)
    (tmp_path / FACTS_FILE).mkdir()
    kept.add(units=[2])
    assert "could not be written" in screen.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == [FACTS_FILE]


def test_the_commit_is_that_of_the_directory_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-c",
            "user.name=me",
            "-c",
            "user.email=me@host",
            "-C",
            str(tmp_path),
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    recipe = tmp_path / "recipes" / "mine.py"
    recipe.parent.mkdir()
    recipe.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v1")
    monkeypatch.setattr(sys, "argv", [str(recipe), "--lr", "1e-4"])
    head = git("rev-parse", "--short=12", "HEAD")
    assert git_commit() == head
    recipe.write_text("2")
    assert environment({}, "")["commit"] == f"{head}, changed"


def test_the_environment_has_the_command_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["recipes/finetuning.py", "--dataset", "https://me:pass@host/rows of mine.jsonl"],
    )
    found = environment({"torch": "2.13.0"}, "2 processes")
    assert found["command"].startswith("recipes/finetuning.py --dataset 'https://")
    RunMetadata(tmp_path).add(environment=found)
    written = facts(tmp_path)["environment"]
    assert (
        written["command"]
        == "recipes/finetuning.py --dataset 'https://***@host/rows of mine.jsonl'"
    )
    assert (written["torch"], written["ranks"]) == ("2.13.0", "2 processes")
