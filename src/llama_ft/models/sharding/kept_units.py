"""Keep FSDP units unsharded while a model generates an answer: otherwise each token all-gathers the
whole model."""

import math
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llama_ft.runtime import Ranks
from llama_ft.runtime.ends.out_of_memory import host_memory

# All units together take at most this share of the memory that is free on each rank. The cache of keys
# and values and the logits need some, too.
SHARE_FOR_UNITS = 0.5
# Units that are freed after their forward pass: fully_shard does not tell.
_resharded = WeakSet[nn.Module]()
# Sharded models -> bytes of all their units, unsharded
_unsharded_bytes: MutableMapping[nn.Module, int] = WeakKeyDictionary()


def remember_units(model: nn.Module, resharded: Iterable[nn.Module], unsharded_bytes: int) -> None:
    """Record for `units_kept_if_they_fit` which units of a sharded model are freed after their forward
    pass, and how large all units are."""
    _resharded.update(resharded)
    _unsharded_bytes[model] = unsharded_bytes


@contextmanager
def units_kept_if_they_fit(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """In the block, units of a sharded model stay unsharded after their first forward pass, if all of
    them fit into free memory. All ranks call it together. `free_unsharded` must follow."""
    units = [module for module in model.modules() if module in _resharded]
    if not units or not _fit(_unsharded_bytes.get(model, math.inf), ranks):
        yield
        return
    try:
        for unit in units:
            cast(FSDPModule, unit).set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for unit in units:
            cast(FSDPModule, unit).set_reshard_after_forward(True, recurse=False)


def _fit(nbytes: float, ranks: Ranks) -> bool:
    """Return whether tensors of so many bytes take at most SHARE_FOR_UNITS of the free memory of each
    rank."""
    least_free = ranks.all_gather_floats(_free_bytes(ranks)).min().item()
    return nbytes <= SHARE_FOR_UNITS * least_free


def _free_bytes(ranks: Ranks) -> float:
    """Return the bytes that this rank can still allocate on its device, with what torch has cached."""
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        cached = torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(
            ranks.device
        )
        return free + cached
    host = host_memory()
    return math.inf if host is None else host.available_bytes / ranks.local_world_size
