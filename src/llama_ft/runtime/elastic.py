"""Several attempts at one job: where its ranks meet, and what an attempt leaves to the next one.

torchrun's agent keeps the store that the ranks meet in, so what is written there outlives them. That is how an attempt
finds the run directory of the one before, and why each attempt needs keys of its own for everything else.
"""

import itertools
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from llama_ft.errors import LostRank

SECONDS_BETWEEN_LOOKS = 0.05
LEAST_SECONDS_TO_START = 600.0  # importing torch from a cold file system can take minutes
_STARTS = itertools.count()  # a script that starts several times in one process does several runs


def meet(rank: int, world_size: int, seconds: float) -> tuple[dist.Store, dist.Store]:
    """Wait for all ranks at the address that torchrun has set.

    Returns:
        A store which this attempt has for itself, and one with what earlier attempts at the same run wrote.

    Raises:
        LostRank: naming the ranks that have not started within `seconds`, or 10 minutes if that is less.
    """
    timeout = timedelta(seconds=max(seconds, LEAST_SECONDS_TO_START))
    shared, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
    name = _name_attempt(dist.PrefixStore("llama_ft/meeting", shared), rank, world_size, timeout)
    return dist.PrefixStore(f"llama_ft/{name}", shared), dist.PrefixStore(f"llama_ft/run{next(_STARTS)}", shared)


def _name_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks of this attempt know and no earlier one had.

    torchrun's count of restarts will not do: it counts each node's own. So rank 0 makes a name up, and gives it to
    whoever asks with a number made up for that, until all have it; questions that earlier attempts left do no harm.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"question/{rank}", own)
        try:
            name = store.get(f"answer/{own}").decode()
        except dist.DistStoreError as error:
            raise LostRank(f"rank 0 has not started within {timeout.total_seconds():g} s.") from error
        store.set(f"{name}/{rank}", "")
        return name
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", own)
        time.sleep(SECONDS_BETWEEN_LOOKS)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise LostRank(f"rank {ranks} of {world_size} has not started within {timeout.total_seconds():g} s.")
    return own
