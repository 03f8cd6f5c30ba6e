"""Plan which samples each rank sees at each step, and build tensors from them.

The order depends on (seed, epoch, step) only, and the samples of a global batch do not depend on
the number of ranks. So a run that resumes on other hardware continues with the same batches. The
items that are distributed are packed sequences, or with padding single samples:

    one permutation per epoch  7 2 9 4 | 0 5 1 8 | 3 6          | = global batches, the last one smaller
    one global batch           9 2 4 7                          longest first
    2 ranks, micro_batch 1     rank 0: [9] [4]   rank 1: [2] [7]
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import pyarrow.compute
import torch
from datasets import Dataset
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from llama_ft.data.batches.packing import pack_samples
from llama_ft.data.media import Media, MediaTensors
from llama_ft.data.tokenize.encoder import IGNORED
from llama_ft.errors import plural

FILLER_TOKENS = 8
# Increase an entry with any change that puts other samples into a step: a resumed run must see the
# batches that it would have seen. Packing 1 was best-fit for all lengths. Padding 1 sorted 50 global
# batches together by length, so that all samples of a step had one length.
BATCHES_VERSION = {"packing": 2, "padding": 2}


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The shape of micro-batches, and which of them are this rank's.

    Attributes:
        data_size: number of data ranks, which share the samples; see `Ranks.data`.
        data_rank: the data rank of these micro-batches.
        micro_batch: maximum packed sequences, or samples without packing, of a micro-batch.
        pack_length: tokens of a packed sequence; None: samples are padded instead.
        pad_token_id: fills padded samples.
        media: makes tensors of what is not text; None: all samples are text.
    """

    data_size: int
    data_rank: int
    micro_batch: int
    pack_length: int | None = None
    pad_token_id: int = 0
    media: Media | None = None

    @property
    def is_packed(self) -> bool:
        return self.pack_length is not None

    def collate(self, dataset: Dataset, indices: Sequence[int]) -> "Batch":
        """Make a micro-batch of the samples at `indices`, see the function `collate`."""
        return collate(dataset, indices, self.pad_token_id, self.is_packed, self.media)


class BatchSampler:
    """Chooses the samples of every step of every epoch.

    Args:
        lengths: tokens of each example.
        target_tokens: labels in the loss of each example.
        layout: of the micro-batches.
        global_batch: maximum packed sequences (or samples) of an optimizer step over all ranks.
        seed: seed of the shuffle.
        examples_per_sample: number of neighboring table rows that are the examples of one sample.
            They stay in one micro-batch. All batches above count samples, not examples, and a
            packed sequence has room for `examples_per_sample` times its length.
    """

    def __init__(
        self,
        lengths: Sequence[int] | numpy.ndarray,
        target_tokens: Sequence[int] | numpy.ndarray,
        layout: BatchLayout,
        *,
        global_batch: int,
        seed: int,
        examples_per_sample: int = 1,
    ) -> None:
        self._lengths = _sum_examples(lengths, examples_per_sample)
        self._target_tokens = _sum_examples(target_tokens, examples_per_sample)
        self._packs = None
        self._sizes = self._lengths
        if layout.pack_length is not None:
            capacity = layout.pack_length * examples_per_sample
            self._packs, self._sizes = pack_samples(self._lengths, capacity)
        self.layout = layout
        self.global_batch = global_batch
        self._examples_per_sample = examples_per_sample
        self._seed = seed
        # (epoch, results of `_epoch`)
        self._order: tuple[int, numpy.ndarray, numpy.ndarray] | None = None

    @classmethod
    def of(
        cls, samples: Dataset, layout: BatchLayout, *, global_batch: int, seed: int
    ) -> "BatchSampler":
        """Plan tokenized samples. `samples` has the columns `tokenize_files.FEATURES`."""
        # The Arrow format reads one column from the memory map without making Python objects.
        table = samples.with_format("arrow")[:]
        target_tokens = table["target_tokens"].to_numpy()
        return cls(
            example_lengths(samples),
            target_tokens,
            layout,
            global_batch=global_batch,
            seed=seed,
            examples_per_sample=group_size(samples),
        )

    def __len__(self) -> int:
        """Packed sequences, or samples, per epoch."""
        return len(self._sizes)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch. Each sample is used once; the last step may be smaller."""
        return math.ceil(len(self) / self.global_batch)

    def describe(self) -> str:
        """Return a log line about packing or padding."""
        if self.layout.pack_length is None:
            return "samples of a micro-batch are padded to the longest of them"
        capacity = self.layout.pack_length * self._examples_per_sample
        packed = f"{plural(len(self), 'packed sequence')} of at most {capacity:,} tokens"
        fill = self._sizes.sum() / (len(self) * capacity)
        return f"{plural(len(self._lengths), 'sample')} in {packed}, {fill:.1%} full"

    def step(self, epoch: int, step_in_epoch: int) -> list[list[int]]:
        """Return the table rows of this rank's micro-batches in a step. Every rank has the same
        number of micro-batches; one is empty if no sample is left for this rank.

        The global batch is sorted by length in descending order and distributed round-robin over
        the ranks. So all ranks compute on a similar number of tokens at the same time, and none
        waits long for another.

        Args:
            epoch: counted from 0.
            step_in_epoch: counted from 0, below steps_per_epoch.
        """
        batch = self._global_batch(epoch, step_in_epoch)
        # A stable sort keeps the random order among equal lengths, so it is the same on all ranks.
        longest_first = numpy.argsort(-self._sizes[batch], kind="stable")
        members = self._members(batch[longest_first], epoch)
        shares = _shares_of_rank(members, self.layout)
        return [_table_rows(share, self._examples_per_sample) for share in shares]

    def counts(self, epoch: int, step_in_epoch: int) -> tuple[int, int]:
        """Return the labels in the loss of a step's global batch, over all ranks, and its samples.
        A preference pair is one sample."""
        members = self._members(self._global_batch(epoch, step_in_epoch), epoch)
        samples = _table_rows(members)
        return int(self._target_tokens[samples].sum()), len(samples)

    def _global_batch(self, epoch: int, step_in_epoch: int) -> numpy.ndarray:
        """Return the items of a step, of all ranks."""
        _, order = self._epoch(epoch)
        first = step_in_epoch * self.global_batch
        return order[first : first + self.global_batch]

    def _members(self, items: numpy.ndarray, epoch: int) -> list[list[int]]:
        """Return the samples of each item in an epoch: of a packed sequence several, with padding
        one. `items`: int64 [items]."""
        if self._packs is None:
            return [[int(item)] for item in items]
        # by descending length; a packed sequence holds slots of them
        samples, _ = self._epoch(epoch)
        return [samples[self._packs[item]].tolist() for item in items]

    def _epoch(self, epoch: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the order of an epoch: samples by descending length, and a permutation of the
        items.

        Samples of equal length are in the epoch's own order. So each epoch packs other samples
        together, in the same number of packed sequences.
        """
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(combine_seeds(self._seed, epoch))
            shuffled = torch.randperm(len(self._lengths), generator=generator).numpy()
            samples = shuffled[numpy.argsort(-self._lengths[shuffled], kind="stable")]
            items = shuffled
            if self._packs is not None:
                items = torch.randperm(len(self), generator=generator).numpy()
            self._order = epoch, samples, items
        return self._order[1:]


def evaluation_batches(
    lengths: numpy.ndarray,
    layout: BatchLayout,
    max_batches: int = 0,
    examples_per_sample: int = 1,
) -> list[list[int]]:
    """Return this rank's batches of an evaluation. Every sample is on exactly one rank; all ranks
    have as many batches.

    Args:
        lengths: tokens of each example of the validation set.
        layout: of the batches.
        max_batches: maximum batches per rank; 0 = all samples.
        examples_per_sample: see `BatchSampler`.

    Returns:
        The indices of examples, one list per batch.
    """
    lengths = _sum_examples(lengths, examples_per_sample)
    members = [[sample] for sample in range(len(lengths))]
    if layout.pack_length is not None:
        packs, _ = pack_samples(lengths, layout.pack_length * examples_per_sample)
        samples = numpy.argsort(-lengths, kind="stable")
        members = [samples[slots].tolist() for slots in packs]
        # The first packed sequences hold the longest samples. With max_batches, samples of all
        # lengths should be used. The seed is fixed: every evaluation uses the same samples.
        order = numpy.random.default_rng(0).permutation(len(members))
        members = [members[pack] for pack in order]
    shares = _shares_of_rank(members, layout)
    batches = [_table_rows(share, examples_per_sample) for share in shares]
    return batches[:max_batches] if max_batches else batches


def _shares_of_rank(items: list[list[int]], layout: BatchLayout) -> list[list[list[int]]]:
    """Return this rank's share of each round of data_size x micro_batch items.

    In the last round there may be no item for this rank. Its share is then empty, so that all ranks
    have as many.
    """
    round_size = layout.data_size * layout.micro_batch
    shares = []
    for first in range(0, len(items), round_size):
        one_round = items[first : first + round_size]
        shares.append(one_round[layout.data_rank :: layout.data_size])
    return shares


def _sum_examples(
    numbers: Sequence[int] | numpy.ndarray, examples_per_sample: int
) -> numpy.ndarray:
    """Return the sum over the examples of each sample, from one number per example."""
    return numpy.asarray(numbers).reshape(-1, examples_per_sample).sum(1)


def _table_rows(members: list[list[int]], examples_per_sample: int = 1) -> list[int]:
    """Return the table rows of all examples of all samples of all packed sequences."""
    rows = list[int]()
    for samples in members:
        for sample in samples:
            first = sample * examples_per_sample
            rows += range(first, first + examples_per_sample)
    return rows


def combine_seeds(*numbers: int) -> int:
    """Return a seed made of several numbers.

    Seed + epoch would repeat epoch 0 of seed 43 as epoch 1 of seed 42.
    """
    text = " ".join(str(number) for number in numbers)
    digest = hashlib.sha256(text.encode()).digest()
    # 63 bits, so that the seed also fits into a signed int64.
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Batch:
    """A micro-batch: packed samples in one sequence, or samples padded on the right to the longest
    one.

        packed   input_ids  a a a b b c c c c     padded   a a a .     example_lengths 3 2 4
                 labels     - a a - b - c c c              b b . .
                                                           c c c c
    Labels are -100 on padding and on tokens that are not in the loss. They are not shifted. The
    first label of a packed sample is -100, because the token before it belongs to another sample.
    """

    input_ids: torch.Tensor  # int64: packed [1, tokens], padded [samples, length]
    labels: torch.Tensor  # same dtype and shape
    example_lengths: list[int]  # tokens of each sample
    is_packed: bool
    locations: list[str]  # place of each sample, for messages
    # The label of each example that is a completion with one, None for others; empty for a rank
    # without samples.
    desirable: Sequence[bool | None] = ()
    # Only if samples of the run have media. Then a batch without any ends with an example that has
    # some, and no labels; see `Media.tensors`.
    media: MediaTensors | None = None

    @property
    def tokens(self) -> int:
        """Number of input tokens without padding."""
        return sum(self.example_lengths)

    @property
    def target_tokens(self) -> int:
        """Number of labels in the loss."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def examples(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tokens and labels of each example without padding, int64 [length], in this
        batch's own memory."""
        if self.is_packed:
            packed_ids = self.input_ids[0].split(self.example_lengths)
            packed_labels = self.labels[0].split(self.example_lengths)
            return list(zip(packed_ids, packed_labels, strict=True))
        samples = zip(self.input_ids, self.labels, self.example_lengths, strict=True)
        return [(ids[:length], labels[:length]) for ids, labels, length in samples]

    @property
    def attention_mask(self) -> torch.Tensor:
        """The mask of a padded batch, int64 [samples, length]: 1 on tokens, 0 on padding."""
        positions = torch.arange(self.input_ids.shape[1])
        return (positions < torch.tensor(self.example_lengths).unsqueeze(1)).long()


def collate(
    dataset: Dataset,
    indices: Sequence[int],
    pad_token_id: int,
    is_packed: bool = False,
    media: Media | None = None,
) -> Batch:
    """Make a batch of the samples at `indices`.

    Without indices it is the beginning of sample 0 with no label: a rank without samples must still
    run forward and backward, because the other ranks wait for it in the collectives. This batch
    adds nothing to loss and gradients. With `media` it is the example that a batch without media ends
    with.
    """
    table = dataset.with_format("arrow")[list(indices) or [0]]
    input_ids = _concatenated(table["input_ids"])
    labels = _concatenated(table["labels"])
    lengths = table["input_ids"].combine_chunks().value_lengths().to_pylist()
    locations = table["source"].to_pylist()
    desirable = table["desirable"].to_pylist()
    if not indices:
        input_ids = input_ids[:FILLER_TOKENS]
        locations = []
        desirable = []
        lengths = [len(input_ids)]
        labels = torch.full((len(input_ids),), IGNORED)
    tensors = None
    if media is not None:
        samples = list(input_ids.split(lengths)) if indices else []
        texts = table["text"].to_pylist() if indices else []
        files = table["media"].to_pylist() if indices else []
        samples, tensors = media.tensors(samples, texts, files, locations, is_packed)
        input_ids = torch.cat(samples)
        count = sum(lengths) if indices else 0
        lengths = [len(sample) for sample in samples]
        labels = functional.pad(labels[:count], (0, sum(lengths) - count), value=IGNORED)
    if is_packed:
        first_tokens = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        labels[first_tokens] = IGNORED
        input_ids = input_ids.unsqueeze(0)  # [1, tokens]
        labels = labels.unsqueeze(0)
        return Batch(input_ids, labels, lengths, is_packed, locations, desirable, tensors)
    input_ids = pad_sequence(input_ids.split(lengths), batch_first=True, padding_value=pad_token_id)
    labels = pad_sequence(labels.split(lengths), batch_first=True, padding_value=IGNORED)
    return Batch(input_ids, labels, lengths, is_packed, locations, desirable, tensors)


def _concatenated(column: pyarrow.ChunkedArray) -> torch.Tensor:
    """Return the numbers of all lists of a column, int64 [numbers]."""
    numbers = column.combine_chunks().flatten().to_numpy()
    # A copy, because the table is memory-mapped and read-only. The embedding and cross_entropy of
    # PyTorch expect int64; the file has int32.
    return torch.from_numpy(numbers.astype(numpy.int64))


def collate_step(
    dataset: Dataset, micro_batches: list[list[int]], layout: BatchLayout
) -> list[Batch]:
    """Make the micro-batches of a step, packed or padded, from their rows."""
    return [layout.collate(dataset, indices) for indices in micro_batches]


def pad_token_id(tokenizer: PreTrainedTokenizerBase, vocabulary_size: int | None = None) -> int:
    """Return the id to pad with: the tokenizer's pad token, else its EOS, else 0; always below
    `vocabulary_size`.

    The choice does not change the training: padding is masked by position. So a pad token that is
    also the EOS is still learned as the end of a message.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is None:
            continue
        if vocabulary_size is None or token_id < vocabulary_size:
            return token_id
    return 0


def example_lengths(dataset: Dataset) -> numpy.ndarray:
    """Return the tokens of each example, from the offsets of the Arrow lists, without reading any
    token.

    An example with another completion counts at least as much as the sample's own: of a full packed
    sequence at most half is then trained on, as planned.
    """
    table = dataset.with_format("arrow")[:]
    lengths = pyarrow.compute.list_value_length(table["input_ids"]).to_numpy()
    has_label = table["desirable"].is_valid().to_numpy()
    if not has_label.any():
        return lengths
    # Only the sample's own example has the label. The one with another completion follows it.
    lengths_before = numpy.roll(lengths, 1)
    return numpy.where(has_label, lengths, numpy.maximum(lengths, lengths_before))


def group_size(dataset: Dataset) -> int:
    """Return how many neighboring rows belong to one sample: the number of examples that the
    objective makes of it."""
    table = dataset.with_format("arrow")[:]
    sizes: list[int] = table["group"].unique().to_pylist()
    if len(sizes) > 1:
        raise ValueError(
            f"the objective made {sizes} examples of a sample; expected one number for all"
        )
    return sizes[0]
