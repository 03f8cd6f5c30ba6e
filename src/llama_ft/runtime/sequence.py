"""Sequence parallelism: consecutive ranks share each packed sequence (--sequence_parallel_size)."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llama_ft.errors import UserError, plural
from llama_ft.runtime.rendezvous import set_timeout


@dataclass(frozen=True, eq=False)
class SequenceRank:
    """Which tokens of a packed sequence this process computes: `size` processes have equal
    neighboring parts of it, in the order of their ranks.

    Attributes:
        rank: of this process's part, 0 to size - 1.
        size: number of parts.
        group: the processes that share a sequence.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a dimension, which has all tokens: a view."""
        tokens = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * tokens, tokens)


def share_sequences(
    device_type: str, world_size: int, size: int, timeout: timedelta | None = None
) -> SequenceRank | None:
    """Divide all ranks into groups of `size` consecutive ones, and return this rank's place in its
    group; None if each rank has sequences of its own. All ranks call it together.

    Raises:
        UserError: the ranks cannot be divided into such groups.
    """
    if size == 1:
        return None
    if world_size % size:
        raise UserError(
            f"--sequence_parallel_size {size}: {plural(world_size, 'rank')} cannot be divided into groups of {size}. "
            f"Start a multiple of {size} ranks, or choose another size."
        )
    names = ("data", "sequence")
    mesh = init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=names)
    group = mesh.get_group("sequence")
    if timeout is not None:
        for dimension in mesh.get_all_groups():  # init_device_mesh uses torch's default
            set_timeout(timeout, dimension)
    return SequenceRank(mesh.get_local_rank("sequence"), size, group)
