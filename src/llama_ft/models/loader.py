"""Getting rows from the checkpoint to the ranks that hold them, a block of rows at a time.

Two ways, bit-identical: every rank reads its own rows, or (`low_cpu_fsdp`) rank 0 alone opens the checkpoint and sends
each rank its rows, reading on while blocks are on their way. Conversions and quantization happen block by block, so
that beside the shards themselves a few blocks are all that is ever held.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.conversion import open_source
from llama_ft.models.shards import ShardGroup, row_ranges, wait_for_device
from llama_ft.models.source import OverlaidSource, SafetensorsSource, StoredTensor, WeightSource

BLOCK_ELEMENTS = 2**23  # copying 550 M weights took 0.1 s in blocks of 2**22 to 2**24, 0.1 to 1.1 s in 2**19
BYTES_IN_FLIGHT = 2**25

MakeRows = Callable[[WeightSource, int, int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class ShardLoad:
    """Parameters made of the same rows of the checkpoint: a weight, or a weight and its scales."""

    shards: list[torch.Tensor]  # this rank's rows of each
    shape: tuple[int, ...]  # of the first parameter as a whole, in weights
    wire: list[torch.dtype]  # the dtype each travels in
    make: MakeRows  # (source, start, stop) -> those rows of each
    block_elements: int = BLOCK_ELEMENTS  # most weights to make at once

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) in blocks of at most block_elements, or of one row."""
        rows = max(1, self.block_elements // max(1, torch.Size(self.shape[1:]).numel()))
        for first in range(start, stop, rows):
            yield first, min(first + rows, stop)


@dataclass(frozen=True)
class Loader:
    """Gets rows to ranks."""

    source: WeightSource | None  # the files; None on the ranks that do not open them
    headers: dict[str, StoredTensor]  # shape and dtype of every stored tensor, known on all ranks
    group: ShardGroup  # which rows this rank holds
    scatter: bool  # rank 0 reads and sends, instead of every rank reading for itself
    in_flight: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)  # kept until it has arrived

    def fill(self, load: ShardLoad) -> None:
        """Put this rank's rows into the shards, in their dtypes. Rank 0 may still be sending: see `finish`."""
        if not self.scatter:
            self._keep(load, *self.group.own_rows(load.shape[0]))
        elif self.group.in_first_copy:
            (self._receive if self.source is None else self._send)(load)
        if self.scatter and self.group.has_copies:
            self.finish()  # one communicator at a time
            for shard in load.shards:
                self.group.replicate(shard)

    def finish(self, most_bytes: int = 0) -> None:
        """Wait until at most `most_bytes` is on its way. Not after each parameter: the next is read meanwhile."""
        while self.in_flight and sum(sent.nbytes for _, sent in self.in_flight) > most_bytes:
            self.in_flight.popleft()[0].wait()

    def _keep(self, load: ShardLoad, start: int, stop: int) -> None:
        assert self.source is not None
        for first, last in load.blocks(start, stop):
            for shard, rows in zip(load.shards, load.make(self.source, first, last), strict=True):
                shard[first - start : last - start].copy_(rows)

    def _send(self, load: ShardLoad) -> None:
        """Rank 0: send the others their rows, then keep its own, which needs no one to wait."""
        assert self.source is not None
        device = load.shards[0].device
        own, *others = row_ranges(load.shape[0], self.group.size)
        for destination, (start, stop) in enumerate(others, start=1):
            for first, last in load.blocks(start, stop):
                for rows, wire in zip(load.make(self.source, first, last), load.wire, strict=True):
                    block = rows.to(device=device, dtype=wire).contiguous()
                    self.finish(BYTES_IN_FLIGHT - block.nbytes)
                    self.in_flight.append((cast(dist.Work, dist.isend(block, dst=destination)), block))
        self._keep(load, *own)
        if len(load.shards) > 1:
            self.finish()  # quantized rows come in small blocks, and holding on to those scatters the heap

    def _receive(self, load: ShardLoad) -> None:
        start, stop = self.group.own_rows(load.shape[0])
        for first, last in load.blocks(start, stop):
            for shard, wire in zip(load.shards, load.wire, strict=True):
                rows = shard[first - start : last - start]
                received = rows if rows.dtype == wire else torch.empty_like(rows, dtype=wire)
                dist.recv(received, src=0)
                wait_for_device(received)
                if received is not rows:
                    rows.copy_(received)


def open_loader(
    files: Path, model: PreTrainedModel, group: ShardGroup, scatter: bool, tuned: WeightSource | None = None
) -> Loader:
    """Read the headers of the weights.

    Args:
        files: a model's folder, or one safetensors file.
        model: on the meta device; says how stored tensors become its own.
        group: the ranks that share the weights.
        scatter: rank 0 alone reads, and sends each rank its rows.
        tuned: tensors that replace those of the same names.
    """
    source: WeightSource | None = None
    if not scatter or dist.get_rank() == 0:
        source = open_source(files, model) if files.is_dir() else SafetensorsSource([files])
        source = source if tuned is None else OverlaidSource(source, tuned)
    box: list[Any] = [source and source.tensors, model._weight_conversions]
    if scatter:
        dist.broadcast_object_list(box, src=0)
    headers, model._weight_conversions = box  # which conversions were needed: rank 0 knows
    return Loader(source, headers, group, scatter)
