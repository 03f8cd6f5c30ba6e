"""Tell from log-probabilities which weights a server computes with.

base  o----------------------------o  fine-tuned        effect: the distance between them
                                 x                      a server that applies the adapter
      x                                                 a server that ignores it
                 x                                      half of it: another alpha, rank or names
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import NamedTuple

WEAKER = 0.9  # the weaker adapter's alpha, as a share
# Mean difference of log-probabilities between two correct programs: 0.01 to 0.03 in bf16, whose
# logits of 16 to 32 are multiples of 1/8. A quantized base model is another one for a server that
# has the original.
NOISE = {None: 0.05, "8bit": 0.1}
NOISE_QUANTIZED = 0.2
SMALLEST_EFFECT = 0.01  # mean; below it nothing can be told
ROUNDED = 0.02  # of the effect: far from the base model, values and their rounding are larger
# The same with another base model: in 4 bits it was 0.04 to 0.40 for small random models of 8 families.
ROUNDED_QUANTIZED = 0.5
# How far a server goes from the base model to the fine-tuned one, and with how much of the adapter, must
# be 1 within this. Rounding has any direction, so that it changes both by their standard errors only;
# an alpha of 14 for 16 is 0.88, and a smaller rank or a missing layer is below 1, too.
TOLERANCE = 0.05
TOLERANCE_QUANTIZED = 0.1  # another base model was measured to change both by up to 0.07
MOST_DESPITE_NOISE = 0.15  # with few tokens, or with another base model
LARGEST_EXTRAPOLATION = (
    0.3  # of alpha: log-probabilities change by a line only near the trained one
)
STANDARD_ERRORS = 4  # the tokens of a prompt are not independent: 2 would do for some that are


class Weights(Enum):
    """What a server computes with."""

    FINE_TUNED = "fine-tuned"
    BASE = "base"
    OTHER = "other"


class Compared(NamedTuple):
    """A log-probability of a server, of the fine-tuned model, and of the base model and the weaker
    adapter if they are known."""

    server: float
    fine_tuned: float
    base: float | None
    weaker: float | None = None


@dataclass(frozen=True)
class ProbeVerdict:
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
        strength: with which share of the trained alpha the adapter gives the server's numbers, if it
            is near 1; None if unknown.
        tolerance: what the share and the strength may differ by.
    """

    weights: Weights | None
    count: int
    largest: float
    largest_of_base: float | None
    mean: float
    effect: float | None
    share: float | None
    strength: float | None = None
    tolerance: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the adapter has its whole effect, so that something else is different."""
        parts = [part for part in (self.share, self.strength) if part is not None]
        return bool(parts) and all(abs(part - 1) <= self.tolerance for part in parts)

    @property
    def alpha(self) -> float | None:
        """The strength, if it is so near to 1 that another alpha may be the reason."""
        near = self.strength is not None and abs(self.strength - 1) <= LARGEST_EXTRAPOLATION
        return self.strength if near else None


def judge(numbers: Iterable[Compared], quantization: str | None) -> ProbeVerdict:
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
        return ProbeVerdict(weights, len(numbers), largest, None, mean, None, None)
    effect = fmean(abs(tuned) for tuned, _ in pairs)
    largest_of_base = max(abs(tuned) for tuned, _ in pairs)
    from_base = fmean(abs(server) for _, server in pairs)
    share, share_error = project(pairs)
    strength, strength_error = _strength(numbers)
    share_tolerance = _tolerance(share_error, quantization)
    tolerance = share_tolerance if strength is None else _tolerance(strength_error, quantization)
    measured: Weights | None = None
    if effect >= SMALLEST_EFFECT:
        measured = Weights.OTHER
        rounded = ROUNDED if quantization is None else ROUNDED_QUANTIZED
        largest_mean = max(noise, rounded * effect)
        near = max(abs(share - 1) - share_tolerance, abs((strength or 1.0) - 1) - tolerance)
        if mean <= largest_mean and near <= 0:
            measured = Weights.FINE_TUNED
        elif from_base <= largest_mean and abs(share) <= share_tolerance:
            measured = Weights.BASE
    return ProbeVerdict(
        measured, len(numbers), largest, largest_of_base, mean, effect, share, strength, tolerance
    )


def _tolerance(error: float, quantization: str | None) -> float:
    least = TOLERANCE if quantization is None else TOLERANCE_QUANTIZED
    return min(max(least, STANDARD_ERRORS * error), MOST_DESPITE_NOISE)


def _strength(numbers: Sequence[Compared]) -> tuple[float | None, float]:
    """Return the share of alpha that gives a server's numbers, and its standard error. From the weaker
    adapter to the trained one, log-probabilities change by about a line, also if they would hardly
    change with a stronger one."""
    pairs = [
        ((one.fine_tuned - one.weaker) / (1 - WEAKER), one.server - one.fine_tuned)
        for one in numbers
        if one.weaker is not None
    ]
    if not pairs:
        return None, 0.0
    slope, error = project(pairs)
    return 1 + slope, error


def project(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return by which factor the second numbers are the first ones, and its standard error: the slope
    of a line through the origin."""
    squares = sum(x * x for x, _ in pairs)
    if not squares:
        return 0.0, 0.0
    slope = sum(x * y for x, y in pairs) / squares
    rest = sum((y - slope * x) ** 2 for x, y in pairs)
    return slope, math.sqrt(rest / max(len(pairs) - 1, 1) / squares)
