"""fully_shard's collectives on CPUs, where gloo's own take detours: its all-gather receives into
memory of its own and copies that, and its reduce-scatter all-reduces a copy of everything."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


class _Allocating:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for fully_shard's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)


class GlooAllGather(_Allocating):
    """Each rank sends its part to every other rank, which receives it in its place."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather the parts [n] of all ranks into [ranks x n], of which the input is a view."""
        parts = output_tensor.chunk(group.size())
        transfers: list[Any] = []
        for other, part in enumerate(parts):
            if other != group.rank():
                transfers.append(dist.irecv(part, group=group, group_src=other))
                transfers.append(dist.isend(input_tensor, group=group, group_dst=other))
        for transfer in transfers:
            transfer.wait()


class GlooReduceScatter(_Allocating):
    """Each rank receives its part of every rank's tensor, and adds these parts. That is half of an
    all-reduce's bytes. The sums of two ranks are equal to its sums bit by bit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the tensors [ranks x n] of all ranks into this rank's part [n]."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


def is_over_gloo(mesh: DeviceMesh) -> bool:
    """Return whether units are sharded over gloo. A plan for GPUs, which is made on the CPU,
    replaces this function."""
    return mesh.device_type == "cpu" and mesh["shard"].size() > 1


def use_gloo_collectives(module: FSDPModule) -> None:
    """Make an FSDP unit use the collectives above."""
    # called by fully_shard, which does not ask for its own base classes
    module.set_custom_all_gather(GlooAllGather())  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(GlooReduceScatter())  # type: ignore[arg-type]
