"""What an attempt finds of the one before, without torchrun's store."""

from pathlib import Path

import pytest

from llama_ft.runtime.attempts import Attempt, AttemptFile


def test_an_attempt_finds_the_run_of_the_one_before_on_the_same_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = iter((0, 0, 1))  # a node that joins does not count as a restart

    def files() -> list[AttemptFile]:
        """Two runs of one script."""
        monkeypatch.setattr("llama_ft.runtime.attempts._STARTS", iter(range(2)))
        error_file = tmp_path / f"attempt_{next(attempts)}" / "0" / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        return [AttemptFile(), AttemptFile()]

    first, second = files()
    assert first.read() is None
    first.write(Attempt("output/run", 8))
    for again, other in (files(), files()):
        assert again.read() == Attempt("output/run", 8)
        assert other.read() is None


@pytest.mark.parametrize("error_file", ["", "/dev/null", "/somewhere/else/error.json"])
def test_without_torchruns_logs_there_is_no_file(
    monkeypatch: pytest.MonkeyPatch, error_file: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
    file = AttemptFile()
    file.write(Attempt("output/run", 8))
    assert file.read() is None
