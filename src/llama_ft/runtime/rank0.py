"""A function that runs on rank 0, while the other ranks wait and all look for signals."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from llama_ft.runtime.process_group import Ranks

T = TypeVar("T")
POLL_SECONDS = 1.0  # between two looks for signals; ranks wait for each other no longer than this


def on_rank0(ranks: Ranks, make: Callable[[Callable[[], None]], T]) -> T:
    """Run a function on rank 0, in its main thread, and return its result on all ranks, which call this
    together.

    Args:
        ranks: the ranks.
        make: the function. It gets one that it calls from time to time: then all ranks look for
            signals, at most once per POLL_SECONDS.

    Raises:
        Stopped: a signal has asked to stop. On rank 0 the function raises it.
    """
    last = time.monotonic()

    def look() -> None:
        nonlocal last
        if time.monotonic() - last < POLL_SECONDS:
            return
        ranks.broadcast_from_rank0(lambda: False)  # it has not ended
        ranks.check_stop()
        last = time.monotonic()

    if not ranks.is_main:
        while not ranks.broadcast_from_rank0(lambda: False):
            ranks.check_stop()
        return ranks.broadcast_from_rank0(_no_result)
    result = make(look)
    ranks.broadcast_from_rank0(lambda: True)
    return ranks.broadcast_from_rank0(lambda: result)


def _no_result() -> Any:
    raise AssertionError("rank 0 has it")
