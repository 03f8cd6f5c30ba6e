"""The verdict about a server from log-probabilities that are made up: those of an adapter whose
effect grows with alpha, but slower and slower, plus the noise of another base model."""

import random

import pytest

from llama_ft.inference.verdict import Compared, ProbeVerdict, Weights, judge

GROWTH = 0.5  # of the effect near the trained alpha: twice the alpha has 1.5 times the effect


def effect_of(alpha: float) -> float:
    """The share of the trained adapter's effect, near its alpha."""
    return 1 + GROWTH * (alpha - 1)


def judged(share: float, noise: float, quantization: str | None) -> ProbeVerdict:
    """A server that goes this share of the way from the base model to the fine-tuned one."""
    generator = random.Random(0)
    numbers = []
    for _ in range(1000):
        base = -generator.uniform(1, 8)
        effect = generator.gauss(0, 1.2)
        server = base + share * effect + generator.gauss(0, noise)
        numbers.append(Compared(server, base + effect, base, base + effect_of(0.9) * effect))
    return judge(numbers, quantization)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (effect_of(1.0), Weights.FINE_TUNED),
        (effect_of(0.95), Weights.FINE_TUNED),  # cannot be told from another base model
        (effect_of(0.8), Weights.OTHER),
        (effect_of(1.2), Weights.OTHER),
        (0.7, Weights.OTHER),  # a layer is missing
        (0.0, Weights.BASE),
    ],
)
def test_another_base_model_is_tolerated_where_the_run_had_a_quantized_one(
    share: float, expected: Weights
) -> None:
    verdict = judged(share, noise=0.3, quantization="4bit")
    assert verdict.weights is expected
    assert verdict.mean > 0.2  # far more than rounding


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_without_quantization_another_base_model_is_other_weights(share: float) -> None:
    assert judged(share, noise=0.3, quantization=None).weights is Weights.OTHER


@pytest.mark.parametrize(
    ("share", "is_whole", "alpha"),
    [(1.0, True, 1.0), (effect_of(0.8), False, 0.8), (0.5, False, None)],
)
def test_what_is_different_is_the_base_model_or_the_alpha(
    share: float, is_whole: bool, alpha: float | None
) -> None:
    verdict = judged(share, noise=0.1, quantization=None)
    assert verdict.weights is Weights.OTHER
    assert verdict.is_whole is is_whole
    assert verdict.alpha == (None if alpha is None else pytest.approx(alpha, abs=0.03))
