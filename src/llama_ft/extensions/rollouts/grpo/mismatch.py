"""How far the sampler is from the trainer: numbers of the importance weights of a step."""

import torch

from llama_ft.extensions.rollouts.grpo.losses import SamplerWeights
from llama_ft.runtime import log

MOST_MASKED = 0.05  # share of the tokens; more are warned of
SUMS = ("tokens", "weights", "squares", "masked", "kl")
LARGEST = "largest"
PREFIX = "sampler "  # of names among the numbers of a run


class Mismatch:
    """Adds up numbers over the micro-batches of a step."""

    def __init__(self) -> None:
        self._has_warned = False
        self._sums = list[torch.Tensor]()
        self._largest = list[torch.Tensor]()

    def add(self, old: torch.Tensor, sampler: torch.Tensor, weights: SamplerWeights) -> None:
        """Add the tokens of a micro-batch.

        Args:
            old, sampler: their log-probabilities in training and in sampling, float32 [tokens].
            weights: of their losses.
        """
        difference = (old - sampler).double()
        values = weights.weights.double()
        divergence = difference.exp() - difference - 1
        sums = [torch.ones_like(values), values, values.square(), weights.masked, divergence]
        self._sums.append(torch.stack([each.double().sum() for each in sums]))
        if len(values):
            self._largest.append(values.max())

    def take(self) -> dict[str, float]:
        """Return the numbers of this rank, and begin again. It waits for the device."""
        values = [0.0] * (len(SUMS) + 1)
        if self._largest:
            sums = torch.stack(self._sums).sum(0)
            largest = torch.stack(self._largest).max()
            values = torch.cat([sums, largest.view(1)]).tolist()
        self._sums = []
        self._largest = []
        numbers = zip((*SUMS, LARGEST), values, strict=True)
        return {f"{PREFIX}{name}": value for name, value in numbers}

    def metrics(self, gathered: dict[str, torch.Tensor], step: int) -> dict[str, float]:
        """Return what metrics.jsonl says; none for a step without answers. `gathered`: the numbers
        of all ranks by name. Warn once if many tokens are masked."""
        tokens, weights, squares, masked, kl = (
            gathered[f"{PREFIX}{name}"].sum().item() for name in SUMS
        )
        if not tokens:
            return {}
        share = masked / tokens
        if share > MOST_MASKED and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"step {step}: {share:.1%} of the tokens are not trained on, because training and sampling give their "
                "answers other probabilities (--importance_weights). --precision fp32 makes both more alike."
            )
        return {
            "train/sampler/weight": weights / tokens,
            "train/sampler/largest_weight": gathered[f"{PREFIX}{LARGEST}"].max().item(),
            # as a share of the tokens: 1 if all weights are equal
            "train/sampler/effective_sample_size": weights**2 / max(tokens * squares, 1e-30),
            "train/sampler/masked": share,
            "train/sampler/kl": kl / tokens,
        }
