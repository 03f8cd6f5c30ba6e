"""What the tests of the settings share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ft.config import load
from llama_ft.errors import UserError

ErrorsOf = Callable[..., list[str]]


@pytest.fixture
def errors_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ErrorsOf:
    """Return the messages that a command line brings up run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def messages_of(*argv: str, paths: bool = False) -> list[str]:
        try:
            load(list(argv), paths=paths)
        except UserError as error:
            return list(error.messages)
        return []

    return messages_of


@pytest.fixture
def write_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Write a recipe to mine.yaml in the working directory and return the flag that names it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return "--config=mine.yaml"

    return write
