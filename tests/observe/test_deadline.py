"""A call that takes too long is left behind, one that fails is told."""

import threading
import time

import pytest

from llama_ft.observe.run_log import within


def test_a_call_that_ends_in_time_has_ended_on_return() -> None:
    done: list[int] = []
    within(10, lambda: done.append(1))
    assert done == [1]


def test_a_call_that_hangs_is_left_behind() -> None:
    hangs, start = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        within(0.1, hangs.wait)
    assert time.monotonic() - start < 5
    hangs.set()


def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="upload"):
        within(10, lambda: {}["upload"])  # type: ignore[var-annotated]
