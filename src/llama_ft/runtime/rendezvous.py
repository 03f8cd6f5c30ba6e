"""What processes do together before there are Ranks: wait for all at the start and share a store, and
gather objects."""

import os
import sys
import threading
import time
import uuid
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from llama_ft.errors import LostRank

SECONDS_TO_NOTICE = 30.0  # until a rank says that it waits for others at the start
LEAST_SECONDS_TO_START = 600.0  # importing torch from a cold file system can take minutes
T = TypeVar("T")


def store_of_given_group() -> dist.Store:
    """Return the store of a process group that the caller has started. Its keys have a prefix of
    this run: the caller may start several in one group."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    return dist.PrefixStore(f"llama_ft/{name[0]}", _get_default_store())


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set how long collectives of a group may take. torch has a public function for it since 2.15."""
    getattr(dist, "set_timeout", _set_pg_timeout)(timeout, group)


def meet(
    rank: int,
    world_size: int,
    seconds: float,
) -> dist.Store:
    """Wait for all ranks at torchrun's address. Return the store of this attempt.

    Usually torchrun's agent runs the store, so it outlives the ranks, and all keys need the name of
    the attempt as a prefix. torchrun's restart count cannot be that name, because each node has its
    own count. So rank 0 invents a name and sends it to each rank through the store.
    """
    timeout = max(seconds, LEAST_SECONDS_TO_START)
    name = uuid.uuid4().hex
    notice = threading.Timer(SECONDS_TO_NOTICE, _print_waiting, (rank, world_size))
    notice.daemon = True
    notice.start()
    try:
        return _meet_within(rank, world_size, timeout, name)
    finally:
        notice.cancel()


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank, by rank. All ranks must call it. `Ranks.gather` is the same.

    Args:
        value: this rank's; anything that pickle can copy.
        group: the process group whose ranks call it; None: all ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _print_waiting(rank: int, world_size: int) -> None:
    """Say where a rank waits: the variables may be leftovers of a launcher, and nobody comes."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"warning: rank {rank} of {world_size} waits for the others at {place}, as MASTER_ADDR, MASTER_PORT, RANK "
            "and WORLD_SIZE say. If this is the only process, unset them.",
            file=sys.stderr,
            flush=True,
        )


def _meet_within(rank: int, world_size: int, timeout: float, name: str) -> dist.Store:
    """See `meet`. `name` is the one that rank 0 sends, or with which another rank asks."""
    meetings = dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout))
    shared, _, _ = next(iter(meetings))
    store = dist.PrefixStore("llama_ft/meeting", shared)
    deadline = time.monotonic() + timeout
    if rank != 0:
        # Each rank asks with a random name of its own, so an answer of an earlier attempt has
        # another key.
        question = name
        store.set(f"question/{rank}", question)
        try:
            name = store.get(f"answer/{question}").decode()
        except dist.DistStoreError as error:
            raise LostRank(f"rank 0 has not started within {timeout:g} s.") from error
        store.set(f"{name}/{rank}", "")
    else:
        missing = list(range(1, world_size))
        while missing:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise LostRank(f"rank {names} has not started within {timeout:g} s.")
            for other in missing:
                if store.check([f"question/{other}"]):
                    question = store.get(f"question/{other}").decode()
                    store.set(f"answer/{question}", name)
            time.sleep(0.05)
            missing = [other for other in missing if not store.check([f"{name}/{other}"])]
    return dist.PrefixStore(f"llama_ft/{name}", shared)
