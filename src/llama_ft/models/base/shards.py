"""Rows of a parameter that each rank holds, and transfers of rows between rank 0 and the other
ranks.

fully_shard splits dimension 0 like torch.chunk: shards of ceil(rows / shards) rows, the last ones
smaller or empty (65 rows on 8 ranks: seven times 9 and once 2).
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llama_ft.runtime import Ranks


def row_ranges(rows: int, shards: int) -> list[tuple[int, int]]:
    """Return the rows [start, stop) of each shard."""
    size = -(-rows // shards)  # rounded up
    starts = [min(shard * size, rows) for shard in range(shards + 1)]
    return list(pairwise(starts))


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank stores, as a view of the parameter."""
    if isinstance(parameter, DTensor):
        # 4 times faster than detaching the DTensor; a save with LoRA does it 672 times
        with torch.no_grad():
            parameter = parameter.to_local()
    return parameter.detach()


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait until NCCL has finished with `tensor`. NCCL's timeout starts when a transfer is queued,
    so a rank that does not wait could queue a whole model and time out."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()


class ShardGroup:
    """The ranks that together hold a copy of the model, and this rank's shard."""

    def __init__(self, ranks: Ranks) -> None:
        shard = ranks.shard
        self.size = shard.size
        self.index = shard.rank
        # shares a copy with rank 0: shard i is on rank i
        self.in_first_copy = shard.copy == 0
        self.has_copies = shard.copies > 1
        self._replicas = ranks.mesh["replicate"].get_group() if self.has_copies else None

    def own_rows(self, rows: int) -> tuple[int, int]:
        """Return this rank's rows [start, stop) of a parameter with `rows` rows."""
        return row_ranges(rows, self.size)[self.index]

    def replicate(self, shard: torch.Tensor) -> None:
        """Copy the shards of the first copy of the model to the other copies."""
        if self._replicas is not None and shard.numel():
            dist.broadcast(shard, src=self.index, group=self._replicas)

    def gather_rows(
        self,
        parameter: nn.Parameter,
        dtype: torch.dtype,
    ) -> Iterator[torch.Tensor]:
        """On rank 0, yield the parameter's rows shard by shard, on the host in `dtype`. On other
        ranks, send them. No rank holds more than two shards at once."""
        shard = local_shard(parameter)
        if self.in_first_copy and self.index != 0 and shard.numel():
            sent = shard.to(dtype).contiguous()
            dist.send(sent, dst=0)
            wait_for_device(sent)
        if not self.in_first_copy or self.index != 0:
            return
        if shard.numel():
            yield shard.to(dtype).cpu()
        _, *others = row_ranges(parameter.shape[0], self.size)
        for source, (start, stop) in enumerate(others, start=1):
            if stop > start:
                shape = (stop - start, *parameter.shape[1:])
                rows = torch.empty(shape, dtype=dtype, device=shard.device)
                dist.recv(rows, src=source)
                yield rows.cpu()
