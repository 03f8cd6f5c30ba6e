"""Learning from pairs of a chosen and a rejected response: DPO, IPO, SimPO and ORPO.

c and r are the log-probabilities, in nats, of both responses to a prompt. DPO and IPO subtract
those of the reference:

    dpo      -(1 - s) log sigmoid(beta (c - r)) - s log sigmoid(-beta (c - r))      s: dpo_label_smoothing
    ipo      (c - r - 1 / (2 beta))^2                                               c, r: means per token
    simpo    as dpo, of c - r - simpo_gamma / beta                                  c, r: means per token
    orpo     nll - beta log sigmoid(log odds(c) - log odds(r))                      c, r: means per token

reference.py explains the reference. nll is the mean loss of the tokens of the prompt and the chosen
response. It is computed per pair, so that it does not depend on how pairs are batched. To dpo, ipo
and simpo, rpo_alpha adds a weight times the mean loss of the chosen response alone, also per pair.

Sources: https://arxiv.org/abs/2305.18290 (DPO), 2310.12036 (IPO), 2405.14734 (SimPO), 2403.07691
(ORPO), 2404.19733 (rpo_alpha); names, means per token, nll and logged numbers as in TRL's
DPOTrainer (rpo_alpha: loss_type sigmoid, sft), CPOTrainer (simpo; rpo_alpha: cpo_alpha) and
ORPOTrainer.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from llama_ft.config import Config, PreferenceConfig
from llama_ft.data import Batch, Encoder, two_examples
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.models import BuiltModel
from llama_ft.runtime import Ranks, sent
from llama_ft.training.objectives.base import (
    LossSum,
    Objective,
    example_log_probabilities,
    target_losses,
    targets_per_example,
    with_token_sums,
)
from llama_ft.training.objectives.first_pass import FirstPass
from llama_ft.training.objectives.reference import Reference, build_reference, reference_pass

LARGEST_LOG_PROBABILITY = -1e-6  # a mean per token; at 0 the odds would be infinite


class Pairs(NamedTuple):
    """The inputs of a loss of pairs: log-probabilities, float32 [pairs], sums or means over a
    response."""

    chosen: torch.Tensor  # the reference's is subtracted, if there is one
    rejected: torch.Tensor
    nll: torch.Tensor | None = None  # orpo: mean loss of the prompt and the chosen response


# float32 [pairs]: the loss of each pair, and further numbers to log.
PairLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """A loss of pairs, and what it needs.

    Attributes:
        losses: computes it.
        of_means: c and r are means per token, in the loss and in what is logged.
        loss_of_means: they are means per token in the loss only, as in TRL.
        has_nll: the loss uses `Pairs.nll`.
    """

    losses: Callable[[Pairs, PreferenceConfig], PairLosses]
    of_means: bool = False
    loss_of_means: bool = False
    has_nll: bool = False


def dpo(pairs: Pairs, settings: PreferenceConfig) -> PairLosses:
    """Return minus the log-sigmoid of the margin; see the top of this file."""
    margin = settings.beta * (pairs.chosen - pairs.rejected)
    return _sigmoid_loss(margin, settings.dpo_label_smoothing), {}


def ipo(pairs: Pairs, settings: PreferenceConfig) -> PairLosses:
    """Return the squared distance of the margin from its target."""
    target = 1 / (2 * settings.beta)
    margin = pairs.chosen - pairs.rejected
    return (margin - target).square(), {}


def simpo(pairs: Pairs, settings: PreferenceConfig) -> PairLosses:
    """Return DPO's loss without a reference, for means per token and with a target margin."""
    target = settings.simpo_gamma / settings.beta
    margin = settings.beta * (pairs.chosen - pairs.rejected - target)
    return _sigmoid_loss(margin, settings.dpo_label_smoothing), {}


def orpo(pairs: Pairs, settings: PreferenceConfig) -> PairLosses:
    """Return the loss of prompt and chosen response, plus the loss of the ratio of both responses'
    odds."""
    assert pairs.nll is not None
    log_odds = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    ratio = F.logsigmoid(log_odds)
    logged = {"nll_loss": pairs.nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
    return pairs.nll - settings.beta * ratio, logged


LOSSES: dict[str, PairLoss] = {
    "dpo": PairLoss(dpo),
    "ipo": PairLoss(ipo, loss_of_means=True),
    "simpo": PairLoss(simpo, of_means=True),
    "orpo": PairLoss(orpo, of_means=True, has_nll=True),
}


class Preferences(Objective):
    """Makes the chosen response of a pair likelier than the rejected one. The settings name one of
    `LOSSES`. See `Objective`.

    Attributes:
        reference: None for losses without one.
    """

    examples_per_sample = 2
    counts_tokens = False

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        settings = self.config.preference
        self._loss = LOSSES[settings.objective]
        has_reference = settings.entry.first_pass is not None
        self.reference: Reference | None = build_reference(self.config) if has_reference else None

    @staticmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`; the chosen response comes first."""
        return two_examples(sample, sample_format, encoder)

    def first_pass(self, config: Config) -> FirstPass | None:
        """See `Objective`."""
        return reference_pass(config, self.reference)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`; counts pairs. Examples of even number are chosen responses, each
        followed by the rejected."""
        settings = self.config.preference
        count = len(batch.locations) // 2  # 0 on a rank without samples, whose batch is a filler
        reference: torch.Tensor | float = 0.0
        if self.reference is not None:
            of_reference = self.reference.log_probabilities(built, batch, ranks)
            reference = self._per_example(of_reference, batch)
        with_prompts = _with_prompts(batch) if self._loss.has_nll else batch
        computed = target_losses(built, with_prompts, ranks.device, per_token=True)
        losses = computed.losses
        log_probabilities = example_log_probabilities(losses, batch, with_prompts)
        scores = self._per_example(log_probabilities, batch)  # [examples]
        chosen, rejected = _of_pairs(scores - reference, count)
        pairs = Pairs(chosen, rejected)
        if self._loss.loss_of_means:
            tokens = sent(targets_per_example(batch), ranks.device)
            chosen_tokens, rejected_tokens = _of_pairs(tokens, count)
            pairs = Pairs(chosen / chosen_tokens, rejected / rejected_tokens)
        if self._loss.has_nll:
            nll_sums = -example_log_probabilities(losses, with_prompts)
            nll, _ = _of_pairs(self._per_example(nll_sums, with_prompts), count)
            pairs = pairs._replace(nll=nll)
        pair_losses, logged_by_loss = self._loss.losses(pairs, settings)
        if settings.rpo_alpha:
            chosen_nll = self._chosen_nll(log_probabilities, batch, count)
            pair_losses = pair_losses + settings.rpo_alpha * chosen_nll
            logged_by_loss["nll_loss"] = chosen_nll
        chosen_rewards = settings.beta * chosen
        rejected_rewards = settings.beta * rejected
        chosen_scores, rejected_scores = _of_pairs(scores, count)
        logged = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "logps/chosen": chosen_scores,
            "logps/rejected": rejected_scores,
            **logged_by_loss,
        }
        sums = {name: values.detach().sum() for name, values in logged.items()}
        return with_token_sums(LossSum(pair_losses.sum(), count, sums), computed, built)

    @staticmethod
    def _chosen_nll(log_probabilities: torch.Tensor, batch: Batch, count: int) -> torch.Tensor:
        """Return the mean loss of the tokens of each chosen response, float32 [pairs].
        `log_probabilities`: sums over the responses, [examples]."""
        tokens = sent(targets_per_example(batch), log_probabilities.device)
        chosen, _ = _of_pairs(-log_probabilities / tokens, count)
        return chosen

    def _per_example(self, sums: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return sums over the targets of each example, float32 [examples], or means."""
        if not self._loss.of_means:
            return sums
        return sums / sent(targets_per_example(batch), sums.device)


def _of_pairs(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of chosen and of rejected responses, [pairs] each, from one value per
    example. Values of a filler are left out, so the losses of a rank without samples are empty, and
    their sum is 0 with gradients of 0."""
    chosen, rejected = values[: 2 * count].view(-1, 2).unbind(1)
    return chosen, rejected


def _with_prompts(batch: Batch) -> Batch:
    """Return the batch with labels on all tokens, except the first one, of examples with a chosen
    response."""
    wider = dataclasses.replace(batch, labels=batch.labels.clone())
    examples = wider.examples()[: len(batch.locations)]  # a rank without samples has none
    for ids, labels in examples[::2]:
        labels[1:] = ids[1:]
    return wider


def _sigmoid_loss(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the loss, float32 [pairs], if chosen and rejected are swapped in a share `smoothing`
    of the pairs."""
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def _log_odds(scores: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) from log p."""
    scores = scores.clamp(max=LARGEST_LOG_PROBABILITY)
    return scores - (-torch.expm1(scores)).log()
