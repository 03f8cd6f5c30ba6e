"""Keep FSDP units unsharded while a model generates an answer: otherwise each token all-gathers the
whole model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule

from llama_ft.models.built import BuiltModel
from llama_ft.runtime import Ranks
from llama_ft.runtime.ends.out_of_memory import host_memory

# The cache of keys and values and the logits need some memory, too.
SHARE_FOR_UNITS = 0.5


@contextmanager
def units_kept(built: BuiltModel) -> Iterator[None]:
    """In the block, units of a sharded model stay unsharded after their first forward pass.
    `free_unsharded` must follow."""
    units = [cast(FSDPModule, module) for module in built.sharding.resharded]
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)


@contextmanager
def units_kept_if_they_fit(
    built: BuiltModel, ranks: Ranks, share: float = SHARE_FOR_UNITS
) -> Iterator[None]:
    """In the block, units stay unsharded if the plan of the run has counted that; without a plan, if all
    of them fit into a share of the memory that is free on each rank. All ranks call it together.
    `free_unsharded` must follow."""
    if built.sharding.resharded and _may_keep(built, ranks, share):
        with units_kept(built):
            yield
    else:
        yield


@contextmanager
def all_unsharded_if_they_fit(built: BuiltModel, ranks: Ranks) -> Iterator[bool]:
    """In the block, all units are unsharded under the same conditions. Yield whether they are: then a
    rank can call the model while others wait. All ranks call it together. `free_unsharded` must
    follow."""
    units = built.sharding.units
    # fully_shard's backward pass prefetches what was used before the first unit. On a rank that has
    # called the model alone this is the root, which is unsharded then, if it has weights.
    is_root_empty = bool(units) and units[-1].bytes == 0 and ranks.shard.size > 1
    if is_root_empty or (built.sharding.resharded and not _may_keep(built, ranks)):
        yield False
        return
    with units_kept(built):
        for module in built.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        yield True


def _may_keep(built: BuiltModel, ranks: Ranks, share: float = SHARE_FOR_UNITS) -> bool:
    if built.keeps_units is not None:
        return built.keeps_units
    least_free = ranks.all_gather_floats(_free_bytes(ranks)).min().item()
    return built.sharding.unsharded_bytes <= share * least_free


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
