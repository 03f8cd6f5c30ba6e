"""Freed memory that is kept, and memory that ranks share, if there is room for both."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llama_ft.plan import spare_memory
from llama_ft.plan.spare_memory import use_spare_memory


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was used. glibc stays as it is, for the other tests."""
    calls = list[str]()
    for name in ("keep_freed_memory", "return_freed_memory", "share_memory"):
        monkeypatch.setattr(spare_memory, name, lambda *_, name=name: calls.append(name) or True)
    return calls


def ranks(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device), mesh=None)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.6, ["keep_freed_memory", "share_memory"]),
        (0.7, ["return_freed_memory"]),
        (None, []),
    ],
)
def test_spare_memory_is_used_if_the_plan_leaves_room(
    share: float | None, expected: list[str], uses: list[str]
) -> None:
    built: Any = SimpleNamespace(model=nn.Linear(2, 2))
    use_spare_memory(share, built, ranks())
    assert uses == expected
    use_spare_memory(share, built, ranks("cuda"))
    assert uses == expected, "a GPU needs neither"


@pytest.mark.parametrize(("share", "said"), [(0.6, "is kept for"), (0.7, "is returned at once")])
def test_the_log_says_what_happens_to_freed_memory(
    share: float,
    said: str,
    uses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)
    caplog.set_level(logging.INFO, logger="llama_ft")
    built: Any = SimpleNamespace(model=nn.Linear(2, 2))
    use_spare_memory(share, built, ranks())
    assert caplog.text.count("Freed memory is") == caplog.text.count(f"Freed memory {said}") == 1
