"""What each context length keeps of a dataset. Long samples, such as the trajectories of agents, need
a choice: a longer context, or fewer tokens in the loss."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy

from llama_ft.data.tokenize.encoder import IGNORED, Example

LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
LOST_END = (
    "an assistant message is truncated and loses its end. The model learns to never stop. "
    "--truncation drop skips samples that are longer than --context_length, and a longer "
    "--context_length keeps them"
)
# Per sample, added up over those that it becomes (a chat may be split).
# By the number of LENGTHS that are too short for a sample: samples, and their tokens in the loss. By
# length: tokens in the loss that truncated samples keep, without those of samples that fit.
LENGTH_FIELDS = [
    ("fit_samples", "i4", (len(LENGTHS) + 1,)),
    ("fit_loss_tokens", "i8", (len(LENGTHS) + 1,)),
    ("cut_loss_tokens", "i8", (len(LENGTHS),)),
]


def count_lengths(examples: Sequence[Example], counts: numpy.void) -> None:
    """Add a sample to the fields LENGTH_FIELDS of `counts`, unless nothing of it is in the loss.

    Args:
        examples: of the sample, before truncation.
        counts: the entry of the sample in the array of counts.
    """
    loss_tokens = sum(_loss_tokens(labels, 1, len(labels)) for _, labels in examples)
    if not loss_tokens:
        return
    longest = max(len(labels) for _, labels in examples)
    too_short = bisect_left(LENGTHS, longest)
    counts["fit_samples"][too_short] += 1
    counts["fit_loss_tokens"][too_short] += loss_tokens
    if not too_short:
        return
    for _, labels in examples:
        loss_tokens = 0
        start = 1
        for number, length in enumerate(LENGTHS[:too_short]):
            loss_tokens += _loss_tokens(labels, start, length)
            counts["cut_loss_tokens"][number] += loss_tokens
            start = length


def _loss_tokens(labels: list[int], start: int, end: int) -> int:
    """Return how many tokens of labels[start:end] are in the loss. Position 0 is never, see
    `Encoded.target_tokens`."""
    part = labels[start:end]
    return len(part) - part.count(IGNORED)


def loses_an_end(labels: list[int], length: int) -> bool:
    """Return whether the first `length` tokens end inside of a response. In a text that is in the loss
    as a whole there is no response."""
    if len(labels) <= length or labels[length - 1] == IGNORED or labels[length] == IGNORED:
        return False
    return IGNORED in labels[1:length]


@dataclass
class LengthCounts:
    """What each value of `--context_length` keeps of a split. Samples without a token in the loss do not
    count.

    Attributes:
        context_lengths: the values.
        samples: number of samples that fit, for each value.
        loss_tokens: tokens in the loss of these samples, which `--truncation drop` keeps.
        loss_tokens_right: tokens in the loss that `--truncation right` keeps.
        all_samples, all_loss_tokens: of the split.
    """

    context_lengths: list[int] = field(default_factory=lambda: list(LENGTHS))
    samples: list[int] = field(default_factory=lambda: [0] * len(LENGTHS))
    loss_tokens: list[int] = field(default_factory=lambda: [0] * len(LENGTHS))
    loss_tokens_right: list[int] = field(default_factory=lambda: [0] * len(LENGTHS))
    all_samples: int = 0
    all_loss_tokens: int = 0

    def count(self, counted: numpy.ndarray) -> None:
        """Add samples. `counted` is an array with the fields LENGTH_FIELDS."""
        samples = counted["fit_samples"].sum(axis=0).cumsum().tolist()
        loss_tokens = counted["fit_loss_tokens"].sum(axis=0).cumsum().tolist()
        cut = counted["cut_loss_tokens"].sum(axis=0).tolist()
        self.all_samples += samples[-1]
        self.all_loss_tokens += loss_tokens[-1]
        for number in range(len(LENGTHS)):
            self.samples[number] += samples[number]
            self.loss_tokens[number] += loss_tokens[number]
            self.loss_tokens_right[number] += loss_tokens[number] + cut[number]

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of a table for the split `name`, up to the length that keeps everything; none
        if no sample is longer than the first length."""
        if self.samples[0] == self.all_samples:
            return
        titles = ("whole samples", "loss tokens, drop", "loss tokens, right")
        yield f"{name}: what each --context_length keeps, with --truncation drop and right"
        yield " " * 10 + "".join(f"{title:>23}" for title in titles)
        for number, length in enumerate(self.context_lengths):
            samples = _share(self.samples[number], self.all_samples)
            dropped = _share(self.loss_tokens[number], self.all_loss_tokens)
            truncated = _share(self.loss_tokens_right[number], self.all_loss_tokens)
            yield f"{length:10,}{samples}{dropped}{truncated}"
            if self.samples[number] == self.all_samples:
                return


def _share(count: int, total: int) -> str:
    """Return a count with its share, rounded down: 100.0% are all of them."""
    thousandths = 1000 * count // total
    return f"{count:16,} {thousandths / 10:5.1f}%"
