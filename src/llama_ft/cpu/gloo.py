"""fully_shard's collectives on CPUs, where gloo's own take detours: its all-gather receives into
memory of its own and copies that, and its reduce-scatter all-reduces a copy of everything.
Ranks on one host can use memory that they share instead, see `share_memory`.

On two ranks with one core each, gloo's own took 2 to 2.6 and 1.5 to 2.2 times as much CPU time (units
of 3.5 and 12 million weights, bf16 and fp32).
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from llama_ft.runtime.shared_memory import SharedMemory
from llama_ft.runtime.target import current_target


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
    ) -> dist.Work | None:
        """Gather the parts [n] of all ranks into [ranks x n], of which the input is a view. Return what
        to wait for; None if they are there."""
        received = output_tensor.chunk(group.size())
        _exchange([input_tensor] * group.size(), received, group)
        return None


class GlooReduceScatter(_Allocating):
    """Each rank receives its part of every other rank's tensor, and adds these parts to its own. On
    two ranks the sums are those of an all-reduce bit by bit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the tensors [ranks x n] of all ranks into this rank's part [n]."""
        first, second, *others = self._pieces(input_tensor, group)
        torch.add(first, second, out=output_tensor)
        for piece in others:
            output_tensor += piece

    def _pieces(
        self, input_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> Sequence[torch.Tensor]:
        """Return this rank's part [n] of each rank's tensor."""
        sent = input_tensor.chunk(group.size())
        own = sent[group.rank()]
        received = [own if piece is own else torch.empty_like(piece) for piece in sent]
        _exchange(sent, received, group)
        return received


class _Arrival(dist.Work):
    """What fully_shard waits for before it copies a unit's weights from shared memory."""

    def __init__(self, memory: SharedMemory, nbytes: int) -> None:
        super().__init__()
        self.is_over = False
        self._memory = memory
        self._nbytes = nbytes

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_over:
            self._memory.wait(self._nbytes)
            self.is_over = True
        return True


class SharedAllGather(GlooAllGather):
    """Each rank writes its part into shared memory, and reads all parts there. All units of a model
    use the same object.

    There are two blocks, in turn. A rank sends its signal only after it has read the all-gather
    before. So a rank that has all signals of one all-gather may write over the one before it.
    """

    BLOCKS = 2

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._block = 0
        self._last: _Arrival | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the parts of all ranks."""
        if self._is_unread():
            return super().allocate(size, dtype=dtype, device=device)
        self._block = (self._block + 1) % self.BLOCKS
        return self._memory.tensor(self._block, math.prod(size), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Tell the others that this rank's part is written. The result waits for theirs."""
        if self._is_unread():
            return super().__call__(output_tensor, input_tensor, group)
        self._memory.signal(output_tensor.nbytes)
        self._last = _Arrival(self._memory, output_tensor.nbytes)
        return self._last

    def _is_unread(self) -> bool:
        """Return whether weights that were prefetched were not used yet. Then another unit's must not
        be written over them. All ranks decide alike, since they use units in the same order."""
        return self._last is not None and not self._last.is_over


class SharedReduceScatter(GlooReduceScatter):
    """Each rank writes its tensor into shared memory, and adds up its part of all tensors there. All
    units of a model use the same object. The sums are those of GlooReduceScatter bit by bit."""

    BLOCKS = 1

    def __init__(self, memory: SharedMemory, group: dist.ProcessGroup) -> None:
        self._memory = memory
        self._group = group
        self._tensors: list[torch.Tensor] = []  # one of each rank, to be summed
        self._is_first = True

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for this rank's tensor; called again, for its part of the sums."""
        if self._tensors:
            return super().allocate(size, dtype=dtype, device=device)
        if not self._is_first:
            self._memory.wait(0)  # until the others have read the block
        self._is_first = False
        ranks = self._group.size()
        whole = self._memory.tensor(0, ranks * math.prod(size), dtype)
        self._tensors = list(whole.view(ranks, *size))
        return self._tensors[self._group.rank()]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As that of GlooReduceScatter."""
        super().__call__(*args, **kwargs)
        self._memory.signal(0)  # this rank has read the block
        self._tensors = []

    def _pieces(
        self, input_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> Sequence[torch.Tensor]:
        self._memory.signal(input_tensor.nbytes)
        self._memory.wait(input_tensor.nbytes)
        return [tensor.chunk(group.size())[group.rank()] for tensor in self._tensors]


def _exchange(
    sent: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Send one tensor to each other rank of the group, and receive one from each."""
    transfers: list[Any] = []
    for other in range(group.size()):
        if other != group.rank():
            transfers.append(dist.irecv(received[other], group=group, group_src=other))
            transfers.append(dist.isend(sent[other], group=group, group_dst=other))
    for transfer in transfers:
        transfer.wait()


def is_over_gloo(mesh: DeviceMesh) -> bool:
    """Return whether units are sharded over gloo."""
    return current_target().backend == "gloo" and mesh["shard"].size() > 1


def use_gloo_collectives(module: FSDPModule) -> None:
    """Make an FSDP unit use the collectives above, over gloo."""
    _set_collectives(module, GlooAllGather(), GlooReduceScatter())


def _set_collectives(module: FSDPModule, gather: Any, reduce_scatter: Any) -> None:
    # Any: fully_shard calls them, and does not ask for its own base classes
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(reduce_scatter)


def share_memory(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Make the FSDP units of a model exchange weights and gradients in memory that the ranks share,
    if they run on one host. Return whether they do. All ranks call it together.

    The memory is kept. A rank's part of it is at most that of two of the largest unit, divided by the
    number of ranks, and of the gradients of the largest one.
    """
    if not is_over_gloo(mesh):
        return False
    group = mesh["shard"].get_group()
    for_weights = SharedMemory.open(group, SharedAllGather.BLOCKS)
    for_gradients = SharedMemory.open(group, SharedReduceScatter.BLOCKS)
    if for_weights is None or for_gradients is None:
        return False
    gather = SharedAllGather(for_weights)
    reduce_scatter = SharedReduceScatter(for_gradients, group)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _set_collectives(module, gather, reduce_scatter)
    return True
