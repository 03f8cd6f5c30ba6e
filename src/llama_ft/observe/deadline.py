"""Calls that may take longer than a run should wait for them."""

import threading
from collections.abc import Callable


def within(seconds: float, do: Callable[[], object]) -> None:
    """Run `do` in a thread that holds no process, and return when it is done.

    Raises:
        TimeoutError: it has not ended after so many seconds; it goes on, as long as the process does.
        Exception: what `do` raised.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            do()
        except Exception as error:  # raised again below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"not done after {seconds:.0f} s")
    if failures:
        raise failures[0]
