"""Samples that are read and tokenized while training, for data larger than the disk.

    rows of the source   | window 0: shuffle_buffer rows | window 1 ...     each is shuffled, packed and dealt
    chunks of a window   0 1 2 3 4 5 ...                                    like a small data set
    tokenized by rank    0 1 0 1 0 1                                        and exchanged, so that all know all

What a window holds, and in which order its samples are trained on, does not depend on the number of ranks. A checkpoint
notes where its window begins in the source and how many of its steps are done: a resumed run reads up to there without
tokenizing.
"""

import itertools
import traceback
from collections.abc import Generator, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable

from llama_ft.config import Config
from llama_ft.data.batches import BatchSampler, collate, group_size, mixed, row_lengths, target_token_counts
from llama_ft.data.build import BadRows, Chunk, EncodedChunk, chunks_of, encode_chunk, encode_chunks
from llama_ft.data.prefetch import Prefetcher, PreparedBatches, StepBatches
from llama_ft.data.prepare import TokenizedData, check_ids
from llama_ft.errors import UserError
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from llama_ft.runtime import Runtime

START = {"epoch": 0, "chunk": 0, "window": 0, "step_in_window": 0}
CLOSED, ENDED = "closed", "ended"


class Window(NamedTuple):
    """Samples that are shuffled and packed together: which pass over the source, where it begins there, and its number
    in the pass, all counted from 0; whether it is the last of the pass; columns as of `build.FEATURES`, in memory."""

    epoch: int
    first_chunk: int
    number: int
    ends_epoch: bool
    rows: Dataset


class StreamedBatches:
    """The training samples of a run with `streaming`. The same interface as `PreparedBatches`; all ranks make one.

    Arguments as of `plan_training`.
    """

    def __init__(
        self,
        config: Config,
        data: TokenizedData,
        context_length: int,
        global_batch: int,
        pad_token_id: int,
        vocabulary_size: int | None,
        runtime: "Runtime",
    ) -> None:
        assert data.stream is not None
        self._source, self._encoder, self._examples = data.stream
        self.total_steps, self._seed, self._config = config.train.max_train_step, config.train.seed, config.data
        self.pack_length = context_length if config.data.batching_strategy == "packing" else None
        self._global_batch, self._pad_token_id, self._vocabulary_size = global_batch, pad_token_id, vocabulary_size
        self._runtime = runtime
        self._plan = partial(
            BatchSampler, pack_length=self.pack_length, global_batch=global_batch, world_size=runtime.world_size,
            rank=runtime.rank, micro_batch=config.train.batch_size_training,
        )  # fmt: skip
        self._is_wanted, self._is_over = True, False
        # One of its own: its collectives run in a thread, in no fixed order with those of training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))

    @property
    def size(self) -> int | None:
        """Of an epoch: not known."""
        return None

    def first_rows(self) -> Dataset:
        """The first samples of the source, tokenized on every rank."""
        bad = BadRows(self._config.skip_bad_rows)
        for chunk in chunks_of(self._source, self._config.dataset_format):
            encoded = encode_chunk(chunk, self._encoder, self._examples)
            bad.note(encoded)
            if len(encoded.table):
                break
        if not len(encoded.table):
            raise self._nothing_left()
        return _dataset([encoded.table])

    def describe(self) -> str:
        """How samples are laid out and how many steps they are, for people."""
        unit = "rows" if self.pack_length is None else f"packs of {self.pack_length:,} tokens"
        return (
            f"{self._source.name} is read while training, {self._config.shuffle_buffer:,} rows ahead, and from the "
            f"beginning again where it ends\n{self.total_steps} optimizer steps of {self._global_batch} {unit}"
        )

    def steps(self, first: int, last: int, position: dict[str, int]) -> Generator[StepBatches, None, None]:
        """Yield the steps `first` to `last`, counted from 1, both included.

        Args:
            first: one more than the step that `position` is of.
            last: the last one wanted.
            position: that of the StepBatches before, {} at the beginning.
        """
        if first > last:
            return
        position, self._is_wanted = position or START, True
        step, skip = first, position["step_in_window"]
        with Prefetcher(self._windows(position), 1) as ready:
            for window in ready:
                seed, group = mixed(self._seed, window.epoch, window.number), group_size(window.rows)
                lengths, targets = row_lengths(window.rows), target_token_counts(window.rows)
                plan = self._plan(lengths, targets, seed=seed, group=group)
                if step == first and len(plan) < self._global_batch and not window.ends_epoch:
                    log.warning(
                        f"--shuffle_buffer {self._config.shuffle_buffer}: its rows fill {len(plan):,} of the "
                        f"{self._global_batch:,} places of a step, so steps are smaller. A larger one fills them."
                    )
                for step_in_window in range(skip, plan.steps_per_epoch):
                    if step > last:
                        self._is_wanted = False  # not only when the next window is full
                        return
                    share = plan.step(0, step_in_window)
                    is_end = window.ends_epoch and step_in_window == plan.steps_per_epoch - 1
                    batches = [
                        collate(window.rows, rows, self._pad_token_id, plan.is_packed) for rows in share.micro_batches
                    ]
                    now = dict(zip(START, (*window[:3], step_in_window + 1), strict=True))
                    seen = float(window.epoch + is_end)
                    yield StepBatches(step, window.epoch, seen, is_end, share.target_tokens, batches, now)
                    step += 1
                skip = 0

    def _windows(self, position: dict[str, int]) -> Generator[Window, None, None]:
        """Yield windows without end, from the one that `position` is in.

        All ranks exchange one chunk at a time, in step. A rank that wants no more, wherever it stands, takes part in
        one more exchange to say so, unless another has said so, or what is wrong, in the one before.
        """
        self._is_over = False
        try:
            number, first_chunk = position["window"], position["chunk"]
            for epoch in itertools.count(position["epoch"]):
                yield from self._pass(epoch, number, first_chunk)
                if self._is_over:
                    return
                number = first_chunk = 0
        finally:
            if not self._is_over:
                self._gather(CLOSED)

    def _pass(self, epoch: int, number: int, first_chunk: int) -> Generator[Window, None, None]:
        bad, at, tables = BadRows(self._config.skip_bad_rows), first_chunk, list[pyarrow.Table]()
        with closing(self._exchanged(first_chunk)) as exchanged:
            for encoded in exchanged:
                bad.note(encoded)
                check_ids(encoded.largest_id, self._source.name, self._encoder.tokenizer, self._vocabulary_size)
                if sum(map(len, tables)) >= self._config.shuffle_buffer:
                    yield Window(epoch, first_chunk, number, False, _dataset(tables))
                    tables, number, first_chunk = [], number + 1, at
                tables.append(encoded.table)
                at += 1
        if self._is_over:
            return
        if not any(map(len, tables)) and number == 0:
            raise self._nothing_left()
        if bad.count:
            log.warning(f"{self._source.name}: {bad.count:,} bad rows skipped: {'; '.join(bad.first)}")
        if any(map(len, tables)):
            yield Window(epoch, first_chunk, number, True, _dataset(tables))

    def _nothing_left(self) -> UserError:
        why = "all are bad, longer than --context_length (see --truncation), or without an answer in it"
        return UserError(f"{self._source.name}: no row can be trained on: {why}.")

    def _exchanged(self, first_chunk: int) -> Generator[EncodedChunk, None, None]:
        """Yield the chunks of one pass in order, each tokenized by one rank, until the last or until it is over."""
        chunks = chunks_of(self._source, self._config.dataset_format)
        mine = itertools.islice(chunks, first_chunk + self._runtime.rank, None, self._runtime.world_size)
        processes = self._config.tokenize_processes or 1
        with closing(encode_chunks(mine, self._encoder, self._examples, processes)) as own:
            while True:
                items = self._gather(_next(own) if self._is_wanted else CLOSED)
                # Before any is yielded: who is closed there must not call the others once more.
                self._is_over = any(item == CLOSED or isinstance(item, Exception) for item in items)
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if not isinstance(item, EncodedChunk):
                        return
                    yield item

    def _gather(self, item: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._runtime.world_size
        dist.all_gather_object(everyone, item, group=self._group)
        return everyone


def _dataset(tables: list[pyarrow.Table]) -> Dataset:
    return Dataset(InMemoryTable(pyarrow.concat_tables(tables)))


def _next(own: Iterator[tuple[Chunk, EncodedChunk]]) -> Any:
    """The next chunk of this rank, tokenized, or what there is instead."""
    try:
        return next(own)[1]
    except StopIteration:
        return ENDED
    except UserError as error:  # every rank should hear of it, not wait
        return error
    except Exception:
        return RuntimeError(f"while samples were read and tokenized\n{traceback.format_exc()}")


TrainingBatches = PreparedBatches | StreamedBatches


def plan_training(
    config: Config,
    data: TokenizedData,
    context_length: int,
    global_batch: int,
    pad_token_id: int,
    vocabulary_size: int | None,
    runtime: "Runtime",
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
            f"--dataset: rank {', '.join(other)} has other rows than rank 0.\nExpected the same files on every node, "
            "and the same rows in the same order whenever a function is called: a shuffle in it needs a seed."
        )
    settings, rows = config.train, data.train
    pack_length = context_length if config.data.batching_strategy == "packing" else None
    if data.stream is not None:
        return StreamedBatches(config, data, context_length, global_batch, pad_token_id, vocabulary_size, runtime)
    assert rows is not None  # one or the other
    plan = BatchSampler(
        row_lengths(rows), target_token_counts(rows), pack_length=pack_length, global_batch=global_batch,
        world_size=runtime.world_size, rank=runtime.rank, micro_batch=settings.batch_size_training, seed=settings.seed,
        group=group_size(rows),
    )  # fmt: skip
    return PreparedBatches(rows, plan, pad_token_id, settings.num_epochs, settings.max_train_step)
