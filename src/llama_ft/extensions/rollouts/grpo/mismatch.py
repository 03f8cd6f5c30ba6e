"""How far the sampler is from the trainer: numbers of the importance weights of a step. Their sums
travel with the loss, for which the host does not wait."""

from typing import Any

import torch

from llama_ft.extensions.rollouts.grpo.losses import SamplerWeights
from llama_ft.runtime import log

MOST_MASKED = 0.05  # share of the tokens; more are warned of
METRICS = "train/sampler/"
SQUARES = "squared_weight"


def mismatch_sums(
    old: torch.Tensor, sampler: torch.Tensor, weights: SamplerWeights
) -> dict[str, torch.Tensor]:
    """Return sums over the tokens of a micro-batch, for `LossSum.logged`: float64, because small
    differences of many tokens are added.

    Args:
        old, sampler: their log-probabilities in training and in sampling, float32 [tokens].
        weights: of their losses.
    """
    difference = (old - sampler).double()
    values = weights.weights.double()
    return {
        "sampler/weight": values.sum(),
        f"sampler/{SQUARES}": values.square().sum(),
        "sampler/masked": weights.masked.double().sum(),
        "sampler/kl": (difference.exp() - difference - 1).sum(),
    }


def largest_weight(weights: SamplerWeights) -> dict[str, torch.Tensor]:
    """Return the largest weight of a micro-batch, for `LossSum.largest`."""
    values = weights.weights
    largest = values.max() if len(values) else values.new_zeros(())
    return {"sampler/largest_weight": largest}


class MismatchMetrics:
    """Completes what is logged of the weights."""

    def __init__(self) -> None:
        self._has_warned = False

    def complete(self, metrics: dict[str, Any], step: int) -> None:
        """Change the metrics of a step: the mean square of the weights becomes their effective sample
        size. A step without answers has none of them. Warn once if many tokens are masked."""
        square = metrics.pop(f"{METRICS}{SQUARES}", None)
        if square is None:
            metrics.pop(f"{METRICS}largest_weight", None)
            return
        # as a share of the tokens: 1 if all weights are equal
        size = metrics[f"{METRICS}weight"] ** 2 / max(square, 1e-30)
        metrics[f"{METRICS}effective_sample_size"] = size
        share = metrics[f"{METRICS}masked"]
        if share > MOST_MASKED and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"step {step}: {share:.1%} of the tokens are not trained on, because training and sampling give their "
                "answers other probabilities (--importance_weights). --precision fp32 makes both more alike."
            )
