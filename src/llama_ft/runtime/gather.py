"""Objects of all ranks. `Ranks.gather` is the same for code that has Ranks."""

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank, by rank. All ranks must call it.

    Args:
        value: this rank's; anything that pickle can copy.
        group: the process group whose ranks call it; None: all ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
