"""A function that runs on rank 0 in a thread of its own, while all ranks train."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from llama_ft.runtime import Ranks
from llama_ft.runtime.rank0 import POLL_SECONDS

T = TypeVar("T")


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
