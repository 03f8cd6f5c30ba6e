"""Which rows each rank sees at each step, and how they become tensors.

The order is a pure function of (seed, epoch, step), and the rows of a global batch do not depend on how many ranks
share it: a run resumed on other hardware goes on with the same batches.

    one permutation an epoch   7 2 9 4 | 0 5 1 8 | 3 6          | = global batches, the last one smaller
    one global batch           9 2 4 7                          longest first
    2 ranks, micro_batch 1     rank 0: [9] [4]   rank 1: [2] [7]
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
import xxhash

from llama_ft.data.tokenize import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from llama_ft.runtime import Runtime

FILLER_TOKENS = 8


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of one rank.

    Attributes:
        micro_batches: row indices; as many micro-batches on every rank, [] where no row is left for this one.
        target_tokens: labels that count in the loss, in the whole global batch over all ranks.
    """

    micro_batches: list[list[int]]
    target_tokens: int


class BatchPlan:
    """The rows of every step of every epoch.

    Args:
        lengths: tokens of each row.
        target_tokens: labels of each row that count in the loss.
        global_batch: rows of one optimizer step over all ranks.
        world_size: ranks that share the rows.
        rank: the one this plan is for.
        micro_batch: most rows of one micro-batch of one rank.
        seed: of the order.
    """

    def __init__(
        self,
        lengths: Sequence[int] | numpy.ndarray,
        target_tokens: Sequence[int] | numpy.ndarray,
        *,
        global_batch: int,
        world_size: int,
        rank: int,
        micro_batch: int,
        seed: int,
    ) -> None:
        self._lengths = numpy.asarray(lengths)
        self._target_tokens = numpy.asarray(target_tokens)
        self.global_batch = global_batch
        self._world_size = world_size
        self._rank = rank
        self._micro_batch = micro_batch
        self._seed = seed
        self._order: tuple[int, numpy.ndarray] | None = None  # the epoch it is of, and its permutation

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every row is seen once; the last may be smaller."""
        return math.ceil(len(self._lengths) / self.global_batch)

    def step(self, epoch: int, step_in_epoch: int) -> StepPlan:
        """Return this rank's share of a step.

        Within the global batch rows go longest first, and each micro-batch is dealt over the ranks like cards: the
        ranks then compute on rows of like length at the same time, and none waits long for another.

        Args:
            epoch: counted from 0.
            step_in_epoch: counted from 0, below steps_per_epoch.
        """
        first = step_in_epoch * self.global_batch
        rows = self._permutation(epoch)[first : first + self.global_batch]
        rows = rows[numpy.argsort(-self._lengths[rows], kind="stable")]
        return StepPlan(
            _deal(rows.tolist(), self._world_size, self._rank, self._micro_batch),
            target_tokens=int(self._target_tokens[rows].sum()),
        )

    def _permutation(self, epoch: int) -> numpy.ndarray:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
            self._order = epoch, torch.randperm(len(self._lengths), generator=generator).numpy()
        return self._order[1]


def plan_batches(dataset: "Dataset", global_batch: int, micro_batch: int, seed: int, runtime: "Runtime") -> BatchPlan:
    """This rank's plan over the tokenized rows of `dataset`. Arguments as of `BatchPlan`."""
    return BatchPlan(
        row_lengths(dataset),
        target_token_counts(dataset),
        global_batch=global_batch,
        world_size=runtime.world_size,
        rank=runtime.rank,
        micro_batch=micro_batch,
        seed=seed,
    )


def evaluation_batches(
    n_rows: int, world_size: int, rank: int, batch_size: int, max_batches: int = 0
) -> list[list[int]]:
    """Return this rank's batches of an evaluation: every row on exactly one rank, as many batches on each.

    Args:
        n_rows: rows of the validation data.
        world_size: ranks that share them.
        rank: the one asked for.
        batch_size: most rows in a batch of one rank.
        max_batches: most batches of a rank; 0 = all rows.
    """
    batches = _deal(list(range(n_rows)), world_size, rank, batch_size)
    return batches[:max_batches] if max_batches else batches


def _deal(rows: list[int], world_size: int, rank: int, batch_size: int) -> list[list[int]]:
    """This rank's part of each round of world_size x batch_size rows."""
    share = world_size * batch_size
    return [rows[first : first + share][rank::world_size] for first in range(0, len(rows), share)]


def _mixed(seed: int, epoch: int) -> int:
    """A seed for the epoch; seed + epoch would repeat the order of seed 43's first epoch in seed 42's second."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Batch:
    """Rows of a micro-batch, padded on the right to the longest.

    Attributes:
        input_ids: int64 [rows, length].
        attention_mask: int64 [rows, length], 1 on tokens, 0 on padding.
        labels: int64 [rows, length], -100 on padding and where not trained.
        sources: the place of each row, for messages.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    sources: list[str]


def collate(dataset: "Dataset", indices: Sequence[int], pad_token_id: int, filler_index: int = 0) -> Batch:
    """Make a batch of the rows at `indices`.

    For no indices it is the beginning of row `filler_index` with no label: a rank without rows still has to run
    forward and backward, because the others wait for it in the collectives. It adds nothing to loss or gradient.
    """
    rows = dataset[list(indices) or [filler_index]]
    input_ids, labels, sources = rows["input_ids"], rows["labels"], rows["source"]
    if not indices:
        input_ids = [input_ids[0][:FILLER_TOKENS]]
        labels, sources = [[IGNORED] * len(input_ids[0])], []
    return Batch(
        input_ids=_padded(input_ids, pad_token_id),
        attention_mask=_padded([[1] * len(row) for row in input_ids], 0),
        labels=_padded(labels, IGNORED),
        sources=sources,
    )


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    batch = torch.full((len(rows), max(map(len, rows))), value, dtype=torch.int64)
    for line, row in zip(batch, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    return batch


def pad_token_id(tokenizer: "PreTrainedTokenizerBase", vocabulary_size: int | None = None) -> int:
    """The id to pad with: the tokenizer's pad, else its eos, else 0; below vocabulary_size, the model's, where given.

    Any would do: padding is masked by position, so a pad token that is the eos too is still learned where it ends a
    turn.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None and (vocabulary_size is None or token_id < vocabulary_size):
            return token_id
    return 0


def row_lengths(dataset: "Dataset") -> numpy.ndarray:
    """Tokens of each row, read from the offsets of the Arrow lists: no token is touched."""
    import pyarrow.compute

    return pyarrow.compute.list_value_length(dataset.with_format("arrow")[:]["input_ids"]).to_numpy()


def fingerprint(dataset: "Dataset") -> str:
    """A checksum of tokens and labels, row by row; where they came from does not matter."""
    digest = xxhash.xxh3_128()
    for name in ("input_ids", "labels"):
        for chunk in dataset.with_format("arrow")[:][name].chunks:
            digest.update(chunk.value_lengths().to_numpy(zero_copy_only=False))
            digest.update(chunk.flatten().to_numpy(zero_copy_only=False))
    return digest.hexdigest()


def target_token_counts(dataset: "Dataset") -> numpy.ndarray:
    """Labels of each row that count in the loss."""
    return dataset.with_format("arrow")[:]["target_tokens"].to_numpy()
