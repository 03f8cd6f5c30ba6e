"""Sections of settings that extensions add, see docs/development/add-an-extension.md."""

from typing import Any

import pytest
from pydantic.dataclasses import dataclass

from llama_ft.config.settings.settings import SECTIONS, with_sections


@dataclass(kw_only=True)
class Waiting:
    waiting_file: str | None = None


@dataclass(kw_only=True)
class WithLr:
    lr: float = 1.0


def test_an_added_section_has_its_defaults() -> None:
    assert with_sections({"waiting": Waiting})().waiting.waiting_file is None


@pytest.mark.parametrize(
    ("name", "section", "wrong"),
    [("train", Waiting, "train"), ("waiting", WithLr, "lr"), ("lr", Waiting, "lr")],
)
def test_an_added_name_that_there_is_already_is_an_error(
    name: str, section: Any, wrong: str
) -> None:
    """Otherwise one of two settings would silently be gone."""
    with pytest.raises(ValueError, match=f"{section.__module__}: .* has the name {wrong}"):
        with_sections({name: section})


def test_two_extensions_have_different_names() -> None:
    with pytest.raises(ValueError, match="the name waiting_file"):
        with_sections({"waiting": Waiting, "again": Waiting})
    assert "waiting" not in SECTIONS
