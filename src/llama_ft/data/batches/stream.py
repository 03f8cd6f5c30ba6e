"""Read and tokenize samples while training, for data larger than the disk.

    samples of the source | window 0: shuffle_buffer samples | window 1 ...  each window is shuffled, packed and
    chunks of a window    0 1 2 3 4 5 ...                                    batched like a small dataset
    tokenized by rank     0 1 0 1 0 1                                        then exchanged between all ranks

The content of a window and the order of its samples do not depend on the number of ranks. A
checkpoint stores where its window begins in the source and how many steps of the window are done. A
resumed run reads the source up to that position without tokenizing.
"""

import itertools
from collections.abc import Generator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pyarrow
import torch.distributed as dist
from datasets import Dataset
from datasets.table import InMemoryTable

from llama_ft.config import Config
from llama_ft.data.batches.prefetch import Prefetcher, PreparedBatches, StepBatches
from llama_ft.data.batches.sampler import BatchLayout, BatchSampler, collate_step, combine_seeds
from llama_ft.data.media import Media
from llama_ft.data.prepare import TokenizedData
from llama_ft.data.read.sources import Source
from llama_ft.data.tokenize.encoder import Encoder, ExamplesOf, check_ids
from llama_ft.data.tokenize.tokenize_files import (
    BadSamples,
    EncodedChunk,
    attempt,
    chunks_of,
    encode_chunk,
    encode_chunks,
)
from llama_ft.errors import UserError, plural
from llama_ft.runtime import Ranks, log

START = {"epoch": 0, "chunk": 0, "window": 0, "step_in_window": 0}
CLOSED = "closed"
ENDED = "ended"


# Samples that are shuffled and packed together: where they begin in the source (epoch, chunk,
# window); whether they end the epoch; the tokenized samples with the columns `tokenize_files.FEATURES`, in
# memory.
Window = tuple[dict[str, int], bool, Dataset]


class StreamedBatches:
    """The training samples of a run with `streaming`, on every rank. It has the interface of
    `PreparedBatches`.

    Args:
        stream: source, encoder and examples function, from `TokenizedData.stream`.
        config, layout, global_batch, vocabulary_size, ranks: see `plan_training`.
    """

    size = None  # the number of samples per epoch is unknown

    def __init__(
        self,
        stream: tuple[Source, Encoder, ExamplesOf],
        config: Config,
        layout: BatchLayout,
        global_batch: int,
        vocabulary_size: int | None,
        ranks: Ranks,
    ) -> None:
        self._source, self._encoder, self._examples = stream
        self.total_steps = config.train.max_train_step
        self._seed = config.train.seed
        self._config = config.data
        self.layout = layout
        self._global_batch = global_batch
        self._vocabulary_size = vocabulary_size
        self._ranks = ranks
        self._is_wanted = True
        self._has_reported_split = False
        self._reported_notes = set[str]()
        # A separate process group: a thread runs these collectives, in no fixed order relative to
        # those of training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        why = "all are bad, longer than --context_length (see --truncation), or without tokens in the loss"
        self._nothing_left = UserError(f"{self._source.name}: no sample can be used: {why}.")

    def first_samples(self) -> Dataset:
        """Return the first samples of the source, tokenized on every rank."""
        bad = BadSamples(self._config.skip_bad_rows)
        for chunk in chunks_of(self._source, self._config.dataset_format):
            encoded = encode_chunk(chunk, self._encoder, self._examples)
            bad.note(encoded)
            bad.refuse()
            if len(encoded.table):
                return _in_memory(encoded.table)
        raise self._nothing_left

    def describe(self) -> str:
        """Return a log line about the batches and the number of steps."""
        batch = plural(self._global_batch, "sample")
        pack_length = self.layout.pack_length
        if pack_length is not None:
            batch = f"{plural(self._global_batch, 'packed sequence')} of {pack_length:,} tokens"
        samples = plural(self._config.shuffle_buffer, "sample")
        steps = plural(self.total_steps, "optimizer step")
        return f"{self._source.name} is streamed, {samples} ahead\n{steps} of {batch}"

    def steps(
        self, first: int, last: int, position: dict[str, int]
    ) -> Generator[StepBatches, None, None]:
        """Yield the steps `first` to `last`, counted from 1, both included.

        Args:
            first, last: numbers of steps.
            position: `StepBatches.position` of the step before `first`; {} for a new run.
        """
        position = position or START
        step = first
        skip = position["step_in_window"]
        with Prefetcher(self._windows(position), 1) as ready:
            for start, ends_epoch, samples in ready:
                seed = combine_seeds(self._seed, start["epoch"], start["window"])
                plan = BatchSampler.of(
                    samples, self.layout, global_batch=self._global_batch, seed=seed
                )
                # The last window of an epoch may be small.
                is_small = len(plan) < plan.global_batch and not ends_epoch
                if is_small and step == first:
                    log.warning(
                        f"--shuffle_buffer {self._config.shuffle_buffer}: gives only {len(plan):,} of the "
                        f"{plan.global_batch:,} packed sequences or samples of a global batch, so steps are smaller. "
                        "Use a larger one."
                    )
                for step_in_window in range(skip, plan.steps_per_epoch):
                    if step > last:
                        # stop reading now, not only when the next window is full
                        self._is_wanted = False
                        return
                    target_tokens, count = plan.counts(0, step_in_window)
                    micro_batches = plan.step(0, step_in_window)
                    is_end = ends_epoch and step_in_window == plan.steps_per_epoch - 1
                    yield StepBatches(
                        step=step,
                        epoch=start["epoch"],
                        epochs_seen=float(start["epoch"] + is_end),
                        ends_epoch=is_end,
                        target_tokens=target_tokens,
                        samples=count,
                        batches=collate_step(samples, micro_batches, self.layout),
                        position={**start, "step_in_window": step_in_window + 1},
                    )
                    step += 1
                skip = 0

    def _windows(self, position: dict[str, int]) -> Generator[Window, None, None]:
        """Yield windows without end, beginning with the window of `position`."""
        epoch = position["epoch"]
        number = position["window"]
        first_chunk = position["chunk"]
        bad = BadSamples(self._config.skip_bad_rows)
        at = first_chunk
        tables = list[pyarrow.Table]()
        with closing(self._exchanged(first_chunk)) as chunks:
            for encoded in chunks:
                if encoded is not None:
                    bad.note(encoded)
                    bad.refuse()
                    self._report_split(encoded)
                    self._report_notes(encoded)
                    check_ids(
                        encoded.largest_id,
                        self._source.name,
                        self._encoder.tokenizer,
                        self._vocabulary_size,
                    )
                samples = sum(len(table) for table in tables)
                is_full = samples >= self._config.shuffle_buffer
                is_last = samples > 0 and encoded is None  # the epoch has ended
                if is_full or is_last:
                    start = {"epoch": epoch, "chunk": first_chunk, "window": number}
                    ends_epoch = encoded is None
                    # Not kept in a variable: it would live until the next window is full.
                    yield start, ends_epoch, _in_memory(pyarrow.concat_tables(tables))
                    tables = []
                    number += 1
                    first_chunk = at
                if encoded is not None:
                    tables.append(encoded.table)
                    at += 1
                    continue
                if number == 0:
                    raise self._nothing_left
                if bad.count and epoch == position["epoch"]:  # the same samples in every epoch
                    skipped = f"skipped {plural(bad.count, 'bad sample')}"
                    log.warning(f"{self._source.name}: {skipped}: {'; '.join(bad.first)}")
                bad = BadSamples(bad.skip)
                epoch += 1
                at = 0
                tables = []
                number = 0
                first_chunk = 0

    def _report_split(self, encoded: EncodedChunk) -> None:
        """Log the first chat that had to be split. How many there are is not known in advance."""
        if self._has_reported_split or not encoded.splits:
            return
        self._has_reported_split = True
        log.info(
            "chats become several samples: inside a chat, the chat template writes "
            f"responses differently from how it does at inference\n  {next(iter(encoded.splits.values()))}"
        )

    def _report_notes(self, encoded: EncodedChunk) -> None:
        """Log each note about a sample once, with the place of the first one."""
        for note, (_, first) in encoded.notes.items():
            if note not in self._reported_notes:
                self._reported_notes.add(note)
                log.warning(f"{first}: {note}.")

    def _exchanged(self, first_chunk: int) -> Generator[EncodedChunk | None, None, None]:
        """Yield the tokenized chunks of the source in order, epoch after epoch. None marks the end
        of an epoch.

        Each chunk is tokenized by one rank. All ranks exchange one chunk per round. A rank that
        stops must take part in one more round to tell the others, unless a rank already reported in
        the last round that it stops or failed.
        """
        processes = self._config.tokenize_processes or 1
        is_over = False
        try:
            while True:
                chunks = chunks_of(self._source, self._config.dataset_format)
                first = first_chunk + self._ranks.rank
                own_chunks = itertools.islice(chunks, first, None, self._ranks.world_size)
                pairs = encode_chunks(own_chunks, self._encoder, self._examples, processes)
                with closing(pairs):
                    own = (encoded for _, encoded in pairs)
                    items = list[Any]()
                    while ENDED not in items:
                        # `attempt` returns an error, so that all ranks learn of it
                        item = attempt(next, own, ENDED) if self._is_wanted else CLOSED
                        items = self._ranks.gather(item, self._group)
                        stops = [
                            item for item in items if isinstance(item, Exception) or item == CLOSED
                        ]
                        # Set before the first yield: closing the generator there must not start
                        # another exchange.
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
                self._ranks.gather(CLOSED, self._group)


def _in_memory(table: pyarrow.Table) -> Dataset:
    return Dataset(InMemoryTable(table))


TrainingBatches = PreparedBatches | StreamedBatches


def training_layout(
    config: Config,
    context_length: int,
    pad_token_id: int,
    ranks: Ranks,
    media: Media | None = None,
) -> BatchLayout:
    """Return the layout of this rank's micro-batches. `context_length` is the length of packed
    sequences, `pad_token_id` fills padded samples, and `media` makes tensors of
    what is not text."""
    is_packed = config.data.batching_strategy == "packing"
    return BatchLayout(
        data_size=ranks.data.size,
        data_rank=ranks.data.rank,
        micro_batch=config.train.batch_size_training,
        pack_length=context_length if is_packed else None,
        pad_token_id=pad_token_id,
        media=media,
    )


def plan_training(
    config: Config,
    data: TokenizedData,
    layout: BatchLayout,
    global_batch: int,
    vocabulary_size: int | None,
    ranks: Ranks,
) -> TrainingBatches:
    """Plan which samples this rank sees at each step. The plan depends on (seed, epoch, step) only.

    Args:
        config: the resolved configuration.
        data: the result of `prepare`.
        layout: of this rank's micro-batches, see `training_layout`.
        global_batch: packed sequences (or samples) of an optimizer step, over all ranks.
        vocabulary_size: of the model; None: token ids of streamed samples are not checked.
        ranks: the ranks. All ranks must call this function.

    Raises:
        UserError: a rank has other samples than rank 0. Some samples would be trained on twice and
            others never.
    """
    fingerprints = ranks.gather(data.fingerprints())
    expected = fingerprints[0]
    other = [str(rank) for rank, fingerprint in enumerate(fingerprints) if fingerprint != expected]
    if other:
        raise UserError(
            f"--dataset: rank {', '.join(other)} has other samples than rank 0.\nExpected the same files on every "
            "node. A dataset function must return the same samples in the same order: set a seed for its shuffle."
        )
    if data.stream is not None:
        return StreamedBatches(data.stream, config, layout, global_batch, vocabulary_size, ranks)
    assert data.train is not None  # either train or stream is set
    train = config.train
    plan = BatchSampler.of(data.train, layout, global_batch=global_batch, seed=train.seed)
    repeats = 1
    if steps := config.preference.entry.generated_steps(config):
        repeats = steps.repeats
    return PreparedBatches(data.train, plan, train.num_epochs, train.max_train_step, repeats)
