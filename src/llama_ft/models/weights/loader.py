"""Load rows from the checkpoint to the ranks that hold them, block by block.

There are two ways with bit-identical results. Either every rank reads its own rows. Or
(`low_cpu_fsdp`) only rank 0 opens the checkpoint and sends each rank its rows, and reads on while
blocks are being sent. Weights are converted and quantized block by block, so memory holds only a
few blocks in addition to the shards.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers.core_model_loading import WeightTransform

from llama_ft.models.adapters.names import ModelNames, index_names
from llama_ft.models.base.shards import ShardGroup, row_ranges, wait_for_device
from llama_ft.models.base.source import (
    OverlaidSource,
    SafetensorsSource,
    StoredTensor,
    WeightSource,
    open_weights,
    row_blocks,
)
from llama_ft.models.built import BuiltModel
from llama_ft.models.published.weight_format import StoredScheme
from llama_ft.models.weights.conversion import open_model_weights

# copying 550 M weights takes 0.1 s in blocks of 2**22 to 2**24, up to 1.1 s in 2**19
BLOCK_ELEMENTS = 2**23
BYTES_IN_FLIGHT = 2**25

MakeRows = Callable[[WeightSource, int, int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class ShardLoad:
    """Parameters that are filled from the same rows of the checkpoint: a weight, or a weight and
    its scales."""

    shards: list[torch.Tensor]  # this rank's rows of each parameter
    shape: tuple[int, ...]  # whole shape of the first parameter, in weights
    wire: list[torch.dtype]  # dtype in which each parameter is sent
    make: MakeRows  # (source, start, stop) -> these rows of each parameter
    block_elements: int = BLOCK_ELEMENTS  # maximum number of weights per block


@dataclass(frozen=True)
class Loader:
    """Loads the rows of this rank."""

    source: WeightSource | None  # the files; None on ranks that do not open them
    headers: dict[str, StoredTensor]  # shape and dtype of every stored tensor, on all ranks
    group: ShardGroup  # knows the rows of this rank
    scatter: bool  # rank 0 reads and sends; otherwise every rank reads
    files: Path  # a model's directory, or one safetensors file
    # those of `BuiltModel.conversions` that the files need, on all ranks
    conversions: list[WeightTransform]
    names: ModelNames
    # kept until sent
    in_flight: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)

    def fill(self, load: ShardLoad) -> None:
        """Load this rank's rows into the shards, in their dtypes. Rank 0 may still be sending then:
        see `finish`."""
        if not self.scatter:
            self._keep(load, *self.group.own_rows(load.shape[0]))
        elif self.group.in_first_copy and self.source is None:
            self._receive(load)
        elif self.group.in_first_copy:
            self._send(load)
        if self.scatter and self.group.has_copies:
            self.finish()  # only one communicator at a time
            for shard in load.shards:
                self.group.replicate(shard)

    def read_stored(
        self, scheme: StoredScheme, header: StoredTensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows as they are stored, from the model's files: `source` shows them in 16 bits."""
        return scheme.read(self._opened_files, header, start, stop)

    @cached_property
    def _opened_files(self) -> SafetensorsSource:
        return open_weights(self.files)

    def for_file(self, file: Path) -> "Loader":
        """Return a loader of one safetensors file for the same ranks."""
        source = None if self.source is None else SafetensorsSource([file])
        headers, _ = share_headers(source, [], self.scatter)
        return replace(self, source=source, headers=headers, files=file, in_flight=deque())

    def finish(self, most_bytes: int = 0) -> None:
        """Wait until at most `most_bytes` are being sent. With a limit above 0, reading and sending
        overlap."""
        while self.in_flight and sum(sent.nbytes for _, sent in self.in_flight) > most_bytes:
            self.in_flight.popleft()[0].wait()

    def _keep(self, load: ShardLoad, start: int, stop: int) -> None:
        assert self.source is not None
        for first, last in row_blocks(load.shape, start, stop, load.block_elements):
            # Without a name for what is made: it would keep this block while the next one is made.
            for shard, rows in zip(load.shards, load.make(self.source, first, last), strict=True):
                shard[first - start : last - start].copy_(rows)

    def _send(self, load: ShardLoad) -> None:
        """On rank 0: send the rows of the other ranks, then keep its own rows, for which no rank
        has to wait."""
        assert self.source is not None
        device = load.shards[0].device
        own, *others = row_ranges(load.shape[0], self.group.size)
        for destination, (start, stop) in enumerate(others, start=1):
            for first, last in row_blocks(load.shape, start, stop, load.block_elements):
                for rows, wire in zip(load.make(self.source, first, last), load.wire, strict=True):
                    block = rows.to(device=device, dtype=wire).contiguous()
                    self.finish(BYTES_IN_FLIGHT - block.nbytes)
                    work = cast(dist.Work, dist.isend(block, dst=destination))
                    self.in_flight.append((work, block))
        self._keep(load, *own)
        if len(load.shards) > 1:
            self.finish()  # quantized blocks are small, and keeping them would fragment the heap

    def _receive(self, load: ShardLoad) -> None:
        start, stop = self.group.own_rows(load.shape[0])
        for first, last in row_blocks(load.shape, start, stop, load.block_elements):
            for shard, wire in zip(load.shards, load.wire, strict=True):
                rows = shard[first - start : last - start]
                received = rows if rows.dtype == wire else torch.empty_like(rows, dtype=wire)
                dist.recv(received, src=0)
                wait_for_device(received)
                if received is not rows:
                    rows.copy_(received)


def open_loader(
    folder: Path,
    built: BuiltModel,
    group: ShardGroup,
    scatter: bool,
    seed: int = 0,
    tuned: WeightSource | None = None,
) -> Loader:
    """Read the headers of the weights and return a Loader.

    Args:
        folder: a model's directory.
        built: on the meta device; it defines how stored tensors are converted to its own.
        group: the ranks that share the weights.
        scatter: only rank 0 reads, and sends each rank its rows.
        seed: for the first values of a score head.
        tuned: tensors that replace those with the same names.
    """
    source: WeightSource | None = None
    conversions = list[WeightTransform]()
    if scatter and dist.get_rank() > 0:
        names = index_names(built.model)
    else:
        source, conversions, names = open_model_weights(folder, built, seed)
        source = source if tuned is None else OverlaidSource(source, tuned)
    headers, conversions = share_headers(source, conversions, scatter)
    return Loader(source, headers, group, scatter, folder, conversions, names)


def share_headers(
    source: WeightSource | None, conversions: list[WeightTransform], scatter: bool
) -> tuple[dict[str, StoredTensor], list[WeightTransform]]:
    """Return the headers of a source, and the conversions that it needs, on all ranks. With
    `scatter`, rank 0 sends them to the others: only rank 0 has opened it."""
    box: list[Any] = [source and source.tensors, conversions]
    if scatter:
        dist.broadcast_object_list(box, src=0)
    headers, conversions = box
    return headers, conversions
