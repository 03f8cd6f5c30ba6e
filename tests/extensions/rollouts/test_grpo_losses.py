"""Losses of GRPO, compared with loops over answers and tokens."""

import math
import statistics
from collections import Counter

import pytest
import torch

from llama_ft.extensions.rollouts.grpo.losses import (
    COUNTS_TOKENS,
    PolicyLoss,
    SamplerWeights,
    Tokens,
    advantages,
    policy_losses,
    ratios,
    reference_divergence,
    sampler_weights,
    token_weights,
)
from llama_ft.extensions.rollouts.grpo.mismatch import (
    MismatchMetrics,
    largest_weight,
    mismatch_sums,
)
from llama_ft.training.objectives.base import logged_means

LENGTHS = [5, 1, 7, 3]
ADVANTAGES = [0.9, -1.3, 0.0, 0.4]
LONGEST = 8


class Numbers:
    """Log-probabilities of the tokens of four answers in a row: float64, far enough apart to be clipped."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        count = sum(LENGTHS)

        def draw(scale: float) -> torch.Tensor:
            return torch.randn(count, generator=generator, dtype=torch.float64) * scale

        self.old = -draw(1.0).abs() - 0.1
        self.new = (self.old + draw(0.3)).requires_grad_()
        self.sampler = self.old + draw(0.3)
        self.reference = self.old + draw(0.5)
        self.lengths = torch.tensor(LENGTHS)
        answers = torch.arange(len(LENGTHS)).repeat_interleave(self.lengths)
        self.tokens = Tokens(answers, self.lengths)
        self.advantage = torch.tensor(ADVANTAGES, dtype=torch.float64)


def by_hand(numbers: Numbers, settings: PolicyLoss, kind: str, most: float) -> torch.Tensor:
    """The loss of the batch, one token after another."""
    total = torch.zeros((), dtype=torch.float64)
    place = 0
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        part = range(place, place + length)
        place += length
        of_answer = torch.zeros((), dtype=torch.float64)
        mean_ratio = sum(numbers.new[t] - numbers.old[t] for t in part) / length
        difference = sum(float(numbers.old[t].detach() - numbers.sampler[t]) for t in part)
        for t in part:
            ratio = torch.exp(numbers.new[t] - numbers.old[t])
            if settings.importance_sampling_level == "sequence":
                ratio = torch.exp(mean_ratio)
            clipped = min(max(ratio, 1 - settings.epsilon), 1 + settings.epsilon_high)
            loss = -min(ratio * advantage, clipped * advantage)
            weight = math.exp(float(numbers.old[t] - numbers.sampler[t]))
            if kind.startswith("sequence"):
                weight = math.exp(difference)
            if weight > most:
                weight = most if kind.endswith("truncate") else 0.0
            distance = numbers.reference[t] - numbers.new[t]
            of_answer = of_answer + loss * weight
            of_answer = of_answer + settings.beta * ratio * (torch.exp(distance) - distance - 1)
        if settings.loss_type == "grpo":
            of_answer = of_answer / length
        if settings.loss_type == "dr_grpo":
            of_answer = of_answer / LONGEST
        total = total + of_answer
    return total / (sum(LENGTHS) if settings.loss_type == "dapo" else len(LENGTHS))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_loss_and_gradients_are_those_of_a_loop(
    loss_type: str, level: str, beta: float, kind: str
) -> None:
    numbers = Numbers()
    settings = PolicyLoss(
        loss_type=loss_type,  # type: ignore[arg-type]
        importance_sampling_level=level,  # type: ignore[arg-type]
        epsilon=0.1,
        epsilon_high=0.2,
        beta=beta,
    )
    expected = by_hand(numbers, settings, kind, most=1.2)
    [expected_gradient] = torch.autograd.grad(expected, numbers.new)

    ratio = ratios(numbers.new, numbers.old, numbers.tokens, settings)
    losses, clipped = policy_losses(ratio, numbers.advantage, numbers.tokens, settings)
    weights = sampler_weights(numbers.old, numbers.sampler, numbers.tokens, kind, 1.2)  # type: ignore[arg-type]
    losses = losses * weights.weights
    losses = losses + beta * reference_divergence(numbers.new, numbers.reference, ratio)
    factors = token_weights(numbers.lengths, loss_type, LONGEST)[numbers.tokens.answers]  # type: ignore[arg-type]
    divisor = sum(LENGTHS) if COUNTS_TOKENS[loss_type] else len(LENGTHS)  # type: ignore[index]
    loss = (losses * factors.double()).sum() / divisor
    [gradient] = torch.autograd.grad(loss, numbers.new)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    if level == "token":
        assert 0 < int(clipped.sum()) < len(clipped)
    if kind == "token_mask":
        assert 0 < int(weights.masked.sum()) < len(clipped)


def test_advantages_of_groups_rounds_and_without_a_deviation() -> None:
    totals = [[1.0, 0.0, None, 0.5], [2.0, 2.0, 2.0, 2.0], [None, None, 1.0, None]]
    for scale in ("group", "batch", "none"):
        found = advantages(totals, scale)
        everything = [1.0, 0.0, 0.5, 2.0, 2.0, 2.0, 2.0]
        divisor = {
            "group": statistics.stdev([1.0, 0.0, 0.5]) + 1e-4,
            "batch": statistics.stdev(everything) + 1e-4,
            "none": 1.0,
        }[scale]
        assert found[0] == [pytest.approx(0.5 / divisor), pytest.approx(-0.5 / divisor), None, 0.0]
        assert found[1] == [0.0] * 4
        assert found[2] == [None] * 4


def test_equal_log_probabilities_have_weights_of_1() -> None:
    numbers = Numbers()
    for kind in ("token_mask", "sequence_truncate"):
        weights = sampler_weights(numbers.old, numbers.old, numbers.tokens, kind, 2.0)  # type: ignore[arg-type]
        assert weights.weights.tolist() == [1.0] * sum(LENGTHS)


def test_mismatch_has_means_the_largest_weight_and_the_effective_sample_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two micro-batches, and another one without answers."""
    numbers = Numbers()
    weights = sampler_weights(numbers.old, numbers.sampler, numbers.tokens, "token_mask", 1.2)
    sums = Counter[str]()
    largest = []
    cut = 6
    for part in (slice(cut), slice(cut, None), slice(0)):
        some = SamplerWeights(*(values[part] for values in weights))
        for name, value in mismatch_sums(numbers.old[part], numbers.sampler[part], some).items():
            sums[name] += value.item()
        [(largest_name, value)] = largest_weight(some).items()
        largest.append(value.item())
    means = logged_means({**sums, "count/sampler": len(numbers.old)}, 1)
    metrics = {f"train/{name}": value for name, value in means.items()}
    metrics[f"train/{largest_name}"] = max(largest)
    mismatch = MismatchMetrics()
    mismatch.complete(metrics, 3)
    values = weights.weights.tolist()
    differences = (numbers.old - numbers.sampler).tolist()
    masked = sum(value == 0 for value in values)
    assert masked > 1
    expected = {
        "weight": statistics.mean(values),
        "largest_weight": max(values),
        "effective_sample_size": sum(values) ** 2
        / (len(values) * sum(value * value for value in values)),
        "masked": masked / len(values),
        "kl": statistics.mean(math.exp(d) - d - 1 for d in differences),
    }
    assert metrics == {f"train/sampler/{name}": pytest.approx(v) for name, v in expected.items()}
    without_answers = {"train/loss": 0.0, f"train/{largest_name}": 0.0}
    mismatch.complete(without_answers, 4)
    assert without_answers == {"train/loss": 0.0}
    mismatch.complete({**metrics, "train/sampler/squared_weight": 1.0}, 5)
    assert caplog.text.count("of the tokens are not trained on") == 1  # of step 3
