"""The first process of each node before the others: it fills a cache that they find filled.

That may take hours, when much is downloaded or tokenized, longer than ranks wait for each other in a collective. So the
others look into the rendezvous store, where the first ones leave signs of life, and wait as long as these come.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from llama_ft.errors import LostRank

SECONDS_BETWEEN_SIGNS, SECONDS_BETWEEN_LOOKS = 5.0, 0.2


@contextmanager
def leader_at_work(store: dist.Store, turn: str, seconds: float) -> Iterator[None]:
    """Leave signs of life under `turn` while the block runs, and then that it is done; arguments as of `await_leaders`.

    Where the block fails, nothing is said here: the run ends.
    """
    # A connection of its own, as the watchdog's.
    own, ended = store.clone(), threading.Event()  # type: ignore[attr-defined]

    def live() -> None:
        with suppress(RuntimeError, ConnectionError):  # the store goes with its host
            while not ended.wait(min(SECONDS_BETWEEN_SIGNS, seconds / 10)):
                own.add(f"{turn}/signs of life", 1)

    thread = threading.Thread(target=live, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    store.add(f"{turn}/done", 1)


def await_leaders(store: dist.Store, turn: str, leaders: int, seconds: float) -> None:
    """Wait until all leaders are done.

    Args:
        store: of this attempt.
        turn: a name that all ranks have for it, and that no other turn has.
        leaders: how many there are.
        seconds: without a sign of life, until they are given up.

    Raises:
        LostRank: there was none for so long.
    """
    signs, waited = -1, 0.0
    while store.add(f"{turn}/done", 0) < leaders:
        if (now := store.add(f"{turn}/signs of life", 0)) != signs:
            signs, waited = now, 0.0
        if waited > seconds:
            raise LostRank(
                f"the first process of a node prepares the data for the others; for {seconds:g} s\n"
                "(--collective_timeout) it has given no sign of life: it is stopped or gone."
            )
        # Not time.sleep: a rank that waits for a thread is none that the watchdog takes for waiting in a collective.
        threading.Event().wait(SECONDS_BETWEEN_LOOKS)
        waited += SECONDS_BETWEEN_LOOKS
