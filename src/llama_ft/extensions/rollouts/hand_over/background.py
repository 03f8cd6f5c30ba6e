"""Work of rank 0: in a thread of its own while all ranks train, or while all ranks wait and look for
signals."""

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from llama_ft.runtime import Ranks

T = TypeVar("T")
POLL_SECONDS = 1.0  # between two looks for signals; ranks wait for each other no longer than this


class BackgroundTask(Generic[T]):
    """A function that runs on rank 0, without collectives. All ranks create it, and may compute until
    they wait for it together.

    Args:
        ranks: the ranks.
        make: the function.
    """

    def __init__(self, ranks: Ranks, make: Callable[[], T]) -> None:
        self._ranks = ranks
        self._make = make
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        if ranks.is_main:
            # a daemon: a process that ends does not wait for servers
            threading.Thread(target=self._run, daemon=True).start()

    def result(self) -> T:
        """Wait for the function, and return its result on all ranks.

        Raises:
            Exception: that of the function, on rank 0.
            Stopped: a signal has asked to stop. The function is not waited for.
        """
        while not self._ranks.broadcast_from_rank0(lambda: self._ended.wait(POLL_SECONDS)):
            self._ranks.check_stop()
        return self._ranks.broadcast_from_rank0(self._take)

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # raised by `result`
            self._error = error
        finally:
            self._ended.set()

    def _take(self) -> T:
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result


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
