"""Losses of group-relative policy optimization (GRPO), from log-probabilities of sampled tokens.

    advantage of answer i    A = (r_i - mean of its group) / (std of the group + 1e-4)
    ratio                    R = exp(new - old), of a token, or of the mean over the answer (GSPO)
    loss of a token          -min(R A, clip(R, 1 - epsilon, 1 + epsilon_high) A) w + beta R k3(reference)

`w` corrects that the sampler has computed in another way than the trainer. The losses of all tokens
are summed, and divided once by the number of tokens or of answers of the whole global batch.

Sources: GRPO arxiv.org/abs/2402.03300 equation 3, DAPO arxiv.org/abs/2503.14476 equation 8, Dr. GRPO
arxiv.org/abs/2503.20783, GSPO arxiv.org/abs/2507.18071 equation 7, k3 joschu.net/blog/kl-approx.html
with the factor R of arxiv.org/abs/2512.02556 (TRL's use_bias_correction_kl).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

LossType = Literal["dapo", "grpo", "dr_grpo"]
Level = Literal["token", "sequence"]
Scale = Literal["group", "batch", "none"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SMALLEST_DEVIATION = 1e-4  # added to the standard deviation, as in TRL
FEWEST_REWARDS = 2
COUNTS_TOKENS: dict[LossType, bool] = {"dapo": True, "grpo": False, "dr_grpo": False}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a token; TRL's names.

    Attributes:
        loss_type: what is divided by what, see `token_weights`.
        importance_sampling_level: ratios of tokens, or of whole answers.
        epsilon, epsilon_high: ratios are clipped to 1 - epsilon and 1 + epsilon_high.
        beta: weight of the KL divergence from the reference.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0


class Tokens(NamedTuple):
    """The sampled tokens of a micro-batch.

    Attributes:
        answers: index of the answer of each token, int64 [tokens].
        lengths: tokens of each answer, int64 [answers].
    """

    answers: torch.Tensor
    lengths: torch.Tensor

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over each answer. [tokens] -> [answers]"""
        return values.new_zeros(len(self.lengths)).index_add(0, self.answers, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means over each answer. [tokens] -> [answers]"""
        return self.sums(values) / self.lengths.clamp(min=1)


def advantages(totals: Sequence[Sequence[float | None]], scale: Scale) -> list[list[float | None]]:
    """Return the advantage of each answer; None if it has no reward, or if its group has fewer than two.

    Args:
        totals: rewards of the answers to each prompt of a round.
        scale: deviation of its group, of the whole round, or none.
    """
    groups = [[total for total in group if total is not None] for group in totals]
    used = [group for group in groups if len(group) >= FEWEST_REWARDS]
    of_round = _deviation([total for group in used for total in group])
    result = list[list[float | None]]()
    for group, rewards in zip(totals, groups, strict=True):
        if len(rewards) < FEWEST_REWARDS:
            result.append([None] * len(group))
            continue
        mean = math.fsum(rewards) / len(rewards)
        divisor = 1.0
        if scale != "none":
            deviation = of_round if scale == "batch" else _deviation(rewards)
            divisor = deviation + SMALLEST_DEVIATION
        result.append([None if total is None else (total - mean) / divisor for total in group])
    return result


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, with n - 1."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def token_weights(lengths: torch.Tensor, loss_type: LossType, longest: int) -> torch.Tensor:
    """Return the factor on the losses of the tokens of each answer, float32 [answers]. The sum is
    divided by the tokens (dapo) or the answers (grpo, dr_grpo) of the global batch.

    Args:
        lengths: tokens in the loss of each answer.
        longest: --max_completion_length, the constant divisor of dr_grpo.
    """
    if loss_type == "grpo":
        return 1 / lengths.clamp(min=1).float()
    if loss_type == "dr_grpo":
        return torch.full_like(lengths, 1 / longest, dtype=torch.float32)
    return torch.ones_like(lengths, dtype=torch.float32)


class SamplerWeights(NamedTuple):
    """Weights that correct a sampler's log-probabilities.

    Attributes:
        weights: float32 [tokens].
        masked: which are 0 because they were beyond a limit, bool [tokens].
    """

    weights: torch.Tensor
    masked: torch.Tensor


def sampler_weights(
    old: torch.Tensor, sampler: torch.Tensor, tokens: Tokens, kind: Correction, most: float
) -> SamplerWeights:
    """Return the probability of the tokens for the trainer over that for the sampler, limited.

    Args:
        old, sampler: log-probabilities of the tokens, float32 [tokens].
        kind: of each token or of the product over an answer; larger ones become `most` or 0.
        most: largest weight.
    """
    ratios = old - sampler
    if kind.startswith("sequence"):
        ratios = tokens.sums(ratios)[tokens.answers]
    weights = ratios.exp()
    above = weights > most
    if kind.endswith("truncate"):
        return SamplerWeights(weights.clamp(max=most), torch.zeros_like(above))
    return SamplerWeights(weights.masked_fill(above, 0.0), above)


def ratios(
    new: torch.Tensor, old: torch.Tensor, tokens: Tokens, settings: PolicyLoss
) -> torch.Tensor:
    """Return the ratio R of each token, float32 [tokens].

    Args:
        new: log-probabilities of the model, with gradient.
        old: those of the model that has sampled.
    """
    log_ratio = new - old
    if settings.importance_sampling_level == "sequence":
        log_ratio = tokens.means(log_ratio)[tokens.answers]
    return log_ratio.exp()


def policy_losses(
    ratio: torch.Tensor, advantage: torch.Tensor, tokens: Tokens, settings: PolicyLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether its ratio was clipped, float32 and bool [tokens].

    Args:
        ratio: of each token.
        advantage: of each answer, [answers].
    """
    factor = advantage[tokens.answers]
    lowest = 1 - settings.epsilon
    highest = 1 + settings.epsilon_high
    losses = -torch.min(ratio * factor, ratio.clamp(lowest, highest) * factor)
    clipped = ((ratio < lowest) & (factor < 0)) | ((ratio > highest) & (factor > 0))
    return losses, clipped


def reference_divergence(
    new: torch.Tensor, reference: torch.Tensor, ratio: torch.Tensor
) -> torch.Tensor:
    """Return the estimate R k3 of KL(model || reference) by each token, float32 [tokens]."""
    difference = reference - new
    return ratio * (difference.exp() - difference - 1)
