"""What the tests of observe share: the screen as text."""

import io

import pytest

from llama_ft.runtime.console import configure_console, console


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What rank 0 prints, where the output is no terminal."""
    printed = io.StringIO()
    monkeypatch.setattr(console, "file", printed)
    configure_console(rank=0)
    return printed
