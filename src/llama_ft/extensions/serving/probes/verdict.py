"""Tell from log-probabilities which weights a server computes with.

base  o----------------------------o  fine-tuned        effect: the distance between them
                                 x                      a server that applies the adapter
      x                                                 a server that ignores it
                 x                                      half of it: another alpha, rank or names
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import NamedTuple

# Mean difference of log-probabilities between two correct programs: 0.01 to 0.03 in bf16, whose
# logits of 16 to 32 are multiples of 1/8. A quantized base model is another one for a server that
# has the original.
NOISE = {None: 0.05, "8bit": 0.1}
NOISE_QUANTIZED = 0.2
SMALLEST_EFFECT = 0.01  # mean; below it nothing can be told
# Shares of the effect. Rounding has any direction, and adds up to little over some hundred tokens;
# another alpha, a smaller rank or a missing layer do not.
ROUNDED = 0.02  # of a distance: far from the base model, values and their rounding are larger
CLOSE = 0.1
SHARE = 0.05
SHARE_DESPITE_NOISE = 0.15


class Weights(Enum):
    """What a server computes with."""

    FINE_TUNED = "fine-tuned"
    BASE = "base"
    OTHER = "other"


class Compared(NamedTuple):
    """A log-probability of a server, of the fine-tuned model, and of the base model if it is
    known."""

    server: float
    fine_tuned: float
    base: float | None


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        weights: what the server computes with; None if fine-tuned and base model do not differ
            enough to tell.
        count: compared log-probabilities.
        largest: largest difference from the fine-tuned model.
        largest_of_base: the same of the base model from the fine-tuned one; None if unknown.
        mean: mean difference from the fine-tuned model.
        effect: the same of the base model; None if unknown.
        share: where the server is between base (0) and fine-tuned model (1); None if unknown.
    """

    weights: Weights | None
    count: int
    largest: float
    largest_of_base: float | None
    mean: float
    effect: float | None
    share: float | None


def judge(numbers: Iterable[Compared], quantization: str | None) -> Verdict:
    """Compare a server's log-probabilities with those of a run.

    Args:
        numbers: at least one. All have the log-probability of the base model, or none has.
        quantization: of the base model in the run; None without.
    """
    numbers = list(numbers)
    noise = NOISE.get(quantization, NOISE_QUANTIZED)
    from_tuned = [abs(one.server - one.fine_tuned) for one in numbers]
    mean = fmean(from_tuned)
    largest = max(from_tuned)
    pairs = [
        (one.fine_tuned - one.base, one.server - one.base)
        for one in numbers
        if one.base is not None
    ]
    if not pairs:
        weights = Weights.FINE_TUNED if mean <= noise else Weights.OTHER
        return Verdict(weights, len(numbers), largest, None, mean, None, None)
    effect = fmean(abs(tuned) for tuned, _ in pairs)
    largest_of_base = max(abs(tuned) for tuned, _ in pairs)
    from_base = fmean(abs(server) for _, server in pairs)
    squares = sum(tuned * tuned for tuned, _ in pairs)
    share = sum(tuned * server for tuned, server in pairs) / squares if squares else 0.0
    measured: Weights | None = None
    if effect >= SMALLEST_EFFECT:
        measured = Weights.OTHER
        if _is_close(mean, share - 1, effect, noise):
            measured = Weights.FINE_TUNED
        elif _is_close(from_base, share, effect, noise):
            measured = Weights.BASE
    return Verdict(measured, len(numbers), largest, largest_of_base, mean, effect, share)


def _is_close(distance: float, share: float, effect: float, noise: float) -> bool:
    """Return whether a server differs by rounding only.

    Args:
        distance: mean difference from the model.
        share: the part of it that lies between base and fine-tuned model, as a share of the effect.
        effect, noise: mean differences.
    """
    if distance > max(noise, ROUNDED * effect):
        return False
    return abs(share) <= (SHARE if distance <= CLOSE * effect else SHARE_DESPITE_NOISE)
