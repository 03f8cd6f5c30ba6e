"""Samples that are read and tokenized while training, for data larger than the disk.

    rows of the source   | window 0: shuffle_buffer rows | window 1 ...     each is shuffled, packed and dealt
    chunks of a window   0 1 2 3 4 5 ...                                    like a small data set
    tokenized by rank    0 1 0 1 0 1                                        and exchanged, so that all know all

What a window holds, and in which order its samples are trained on, does not depend on the number of ranks. A checkpoint
notes where its window begins in the source and how many of its steps are done: a resumed run reads up to there without
tokenizing.
"""

import itertools
from collections.abc import Generator
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable

from llama_ft.config import Config
from llama_ft.data.batches import BatchSampler, collate_step, mixed
from llama_ft.data.build import BadRows, EncodedChunk, attempt, chunks_of, encode_chunk, encode_chunks
from llama_ft.data.prefetch import Prefetcher, PreparedBatches, StepBatches
from llama_ft.data.prepare import TokenizedData, check_ids
from llama_ft.data.sources import Source
from llama_ft.data.tokenize import Encoder, ExamplesOf
from llama_ft.errors import UserError, counted
from llama_ft.runtime import Runtime, log

START = {"epoch": 0, "chunk": 0, "window": 0, "step_in_window": 0}
CLOSED, ENDED = "closed", "ended"


# Samples that are shuffled and packed together: where they begin in the source (epoch, chunk, window); whether they are
# the last of the epoch; columns as of `build.FEATURES`, in memory.
Window = tuple[dict[str, int], bool, Dataset]


class StreamedBatches:
    """The training samples of a run with `streaming`. The same interface as `PreparedBatches`; all ranks make one.

    Args:
        stream: that of `TokenizedData`.
        sampler: makes a `BatchSampler` of rows and a seed.
        config, pad_token_id, vocabulary_size, runtime: as of `plan_training`.
    """

    size = None  # of an epoch: not known

    def __init__(
        self,
        stream: tuple[Source, Encoder, ExamplesOf],
        config: Config,
        sampler: "partial[BatchSampler]",
        pad_token_id: int,
        vocabulary_size: int | None,
        runtime: Runtime,
    ) -> None:
        self._source, self._encoder, self._examples = stream
        self.total_steps, self._seed, self._config = config.train.max_train_step, config.train.seed, config.data
        self.pack_length: int | None = sampler.keywords["pack_length"]
        self._global_batch: int = sampler.keywords["global_batch"]
        self._sampler, self._pad_token_id, self._vocabulary_size = sampler, pad_token_id, vocabulary_size
        self._runtime, self._is_wanted = runtime, True
        # One of its own: its collectives run in a thread, in no fixed order with those of training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        why = "all are bad, longer than --context_length (see --truncation), or without tokens in the loss"
        self._nothing_left = UserError(f"{self._source.name}: no sample can be used: {why}.")

    def first_rows(self) -> Dataset:
        """The first samples of the source, tokenized on every rank."""
        bad = BadRows(self._config.skip_bad_rows)
        for chunk in chunks_of(self._source, self._config.dataset_format):
            encoded = encode_chunk(chunk, self._encoder, self._examples)
            bad.note(encoded)
            bad.refuse()
            if len(encoded.table):
                return Dataset(InMemoryTable(encoded.table))
        raise self._nothing_left

    def describe(self) -> str:
        """How samples are laid out and how many steps they are, for people."""
        batch = counted(self._global_batch, "sample" if self.pack_length is None else "packed sequence")
        tokens = f" of {self.pack_length:,} tokens" if self.pack_length is not None else ""
        ahead = f"{self._source.name} is streamed, {counted(self._config.shuffle_buffer, 'sample')} ahead"
        return f"{ahead}\n{counted(self.total_steps, 'optimizer step')} of {batch}{tokens}"

    def steps(self, first: int, last: int, position: dict[str, int]) -> Generator[StepBatches, None, None]:
        """Yield the steps `first` to `last`, counted from 1, both included. `position` is that of the StepBatches
        before, {} at the beginning."""
        position = position or START
        step, skip = first, position["step_in_window"]
        with Prefetcher(self._windows(position), 1) as ready:
            for start, ends_epoch, rows in ready:
                plan = self._sampler(rows, seed=mixed(self._seed, start["epoch"], start["window"]))
                if step == first and len(plan) < plan.global_batch and not ends_epoch:
                    log.warning(
                        f"--shuffle_buffer {self._config.shuffle_buffer}: fills only {len(plan):,} of the "
                        f"{plan.global_batch:,} places of a global batch, so steps are smaller. Use a larger one."
                    )
                for step_in_window in range(skip, plan.steps_per_epoch):
                    if step > last:
                        self._is_wanted = False  # not only when the next window is full
                        return
                    share = plan.step(0, step_in_window)
                    is_end = ends_epoch and step_in_window == plan.steps_per_epoch - 1
                    batches = collate_step(rows, share, self._pad_token_id, self.pack_length)
                    seen, now = float(start["epoch"] + is_end), {**start, "step_in_window": step_in_window + 1}
                    counts = share.target_tokens, share.samples
                    yield StepBatches(step, start["epoch"], seen, is_end, *counts, batches, now)
                    step += 1
                skip = 0

    def _windows(self, position: dict[str, int]) -> Generator[Window, None, None]:
        """Yield windows without end, from the one that `position` is in."""
        epoch, number, first_chunk = position["epoch"], position["window"], position["chunk"]
        bad, at, tables = BadRows(self._config.skip_bad_rows), first_chunk, list[pyarrow.Table]()
        with closing(self._exchanged(first_chunk)) as chunks:
            for encoded in chunks:
                if encoded is not None:
                    bad.note(encoded)
                    bad.refuse()
                    check_ids(encoded.largest_id, self._source.name, self._encoder.tokenizer, self._vocabulary_size)
                rows = sum(map(len, tables))
                if rows >= self._config.shuffle_buffer or (rows and encoded is None):
                    start = {"epoch": epoch, "chunk": first_chunk, "window": number}
                    yield start, encoded is None, Dataset(InMemoryTable(pyarrow.concat_tables(tables)))
                    tables, number, first_chunk = [], number + 1, at
                if encoded is not None:
                    tables.append(encoded.table)
                    at += 1
                    continue
                if number == 0:
                    raise self._nothing_left
                if bad.count:
                    skipped = f"skipped {counted(bad.count, 'bad sample')}"
                    log.warning(f"{self._source.name}: {skipped}: {'; '.join(bad.first)}")
                bad, epoch, at, tables, number, first_chunk = BadRows(bad.skip), epoch + 1, 0, [], 0, 0

    def _exchanged(self, first_chunk: int) -> Generator[EncodedChunk | None, None, None]:
        """Yield the chunks of one pass after another in order, each tokenized by one rank; None ends a pass.

        All ranks exchange one chunk at a time, in step. A rank that wants no more, wherever it stands, takes part in
        one more exchange to say so, unless another has said so, or what is wrong, in the one before.
        """
        processes, is_over = self._config.tokenize_processes or 1, False
        try:
            while True:
                chunks = chunks_of(self._source, self._config.dataset_format)
                mine = itertools.islice(chunks, first_chunk + self._runtime.rank, None, self._runtime.world_size)
                with closing(encode_chunks(mine, self._encoder, self._examples, processes)) as pairs:
                    own, items = (encoded for _, encoded in pairs), list[Any]()
                    while ENDED not in items:
                        items = self._gather(attempt(next, own, ENDED) if self._is_wanted else CLOSED)
                        stops = [item for item in items if isinstance(item, Exception) or item == CLOSED]
                        # Before any is yielded: who is closed there must not call the others once more.
                        is_over = bool(stops)
                        if is_over and isinstance(stops[0], Exception):
                            raise stops[0]
                        if is_over:
                            return
                        yield from (item for item in items if item != ENDED)
                yield None
                first_chunk = 0
        finally:
            if not is_over:
                self._gather(CLOSED)

    def _gather(self, item: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._runtime.world_size
        dist.all_gather_object(everyone, item, group=self._group)
        return everyone


TrainingBatches = PreparedBatches | StreamedBatches


def plan_training(
    config: Config,
    data: TokenizedData,
    context_length: int,
    global_batch: int,
    pad_token_id: int,
    vocabulary_size: int | None,
    runtime: Runtime,
) -> TrainingBatches:
    """Settle which samples this rank sees at which step: a function of (seed, epoch, step), and of nothing else.

    Args:
        config: the resolved configuration.
        data: of `prepare`.
        context_length: tokens of a packed sequence.
        global_batch: packed sequences (or samples) of an optimizer step over all ranks.
        pad_token_id: fills padded samples.
        vocabulary_size: of the model, or None: ids of streamed samples are not checked.
        runtime: the ranks; all of them call this.

    Raises:
        UserError: they have other samples than rank 0, and would train on some twice and on others never.
    """
    prints: list[dict[str, str]] = [{}] * runtime.world_size
    dist.all_gather_object(prints, data.fingerprints())
    if other := [str(rank) for rank, own in enumerate(prints) if own != prints[0]]:
        raise UserError(
            f"--dataset: rank {', '.join(other)} has other samples than rank 0.\nExpected the same files on every "
            "node. A dataset function must return the same samples in the same order: set a seed for its shuffle."
        )
    sampler = partial(
        BatchSampler.of,
        pack_length=context_length if config.data.batching_strategy == "packing" else None,
        global_batch=global_batch,
        world_size=runtime.world_size,
        rank=runtime.rank,
        micro_batch=config.train.batch_size_training,
    )
    if data.stream is not None:
        return StreamedBatches(data.stream, config, sampler, pad_token_id, vocabulary_size, runtime)
    assert data.train is not None  # one or the other
    plan = sampler(data.train, seed=config.train.seed)
    return PreparedBatches(data.train, plan, pad_token_id, config.train.num_epochs, config.train.max_train_step)
