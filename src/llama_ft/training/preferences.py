"""Learning from pairs of a chosen and a rejected response: DPO, IPO, SimPO and ORPO.

With c and r the log-probabilities of both responses to a prompt, less those of the reference for DPO and IPO, in nats:

    dpo      -(1 - s) log sigmoid(beta (c - r)) - s log sigmoid(-beta (c - r))      s: label_smoothing
    ipo      (c - r - 1 / (2 beta))^2                                               c, r: means per token
    simpo    as dpo, of c - r - simpo_gamma / beta                                  c, r: means per token
    orpo     nll - beta log sigmoid(log odds(c) - log odds(r))                      c, r: means per token

The reference is the model with its adapter off. nll is the mean loss of the tokens of the prompt and the chosen
response, of each pair for itself, so that it does not depend on how pairs are batched.

Sources: https://arxiv.org/abs/2305.18290 (DPO), 2310.12036 (IPO), 2405.14734 (SimPO), 2403.07691 (ORPO); names, means
per token, nll and logged numbers as in TRL's DPOTrainer, CPOTrainer (simpo, with cpo_alpha 0) and ORPOTrainer.
"""

import dataclasses

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config, PreferenceConfig
from llama_ft.data import IGNORED, Batch, Encoder, two_examples
from llama_ft.data.formats import Row, RowFormat
from llama_ft.data.tokenize import Example
from llama_ft.models import adapter_off, router_coefficient
from llama_ft.runtime import Runtime, sent
from llama_ft.training.objective import (
    LossSum,
    Objective,
    SupervisedFineTuning,
    shifted_labels,
    target_losses,
    target_rows,
)
from llama_ft.training.reward import RewardModeling

LARGEST_LOG_PROBABILITY = -1e-6  # a mean per token; at 0 the odds would be infinite


def build_objective(config: Config) -> Objective:
    """Make what `--objective` names."""
    if config.preference.objective == "sft":
        return SupervisedFineTuning(config.train.label_smoothing_factor)
    if config.preference.objective == "reward":
        return RewardModeling(config.preference.center_rewards_coefficient)
    return Preferences(config.preference)


def settle_format(config: Config) -> Config:
    """Return the settings with dataset_format preference where it is to be found and the objective is over pairs."""
    if config.preference.objective == "sft" or config.data.dataset_format != "auto":
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dataset_format="preference"))


class Preferences:
    """Make the chosen response of a pair likelier than the rejected one. A loss over pairs; `settings` choose which."""

    examples_per_sample, counts_tokens = 2, False

    def __init__(self, settings: PreferenceConfig) -> None:
        self._settings = settings
        self._has_reference = settings.objective in ("dpo", "ipo")
        self._is_mean = settings.objective != "dpo"

    @staticmethod
    def examples(row: Row, row_format: RowFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`; the chosen response comes first."""
        return two_examples(row, row_format, encoder)

    def loss(self, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> LossSum:
        """See `Objective`; counts pairs. Rows of even number are chosen responses, each followed by the rejected."""
        settings, pairs = self._settings, len(batch.sources) // 2
        reference: torch.Tensor | float = 0.0
        if self._has_reference:
            reference = self._of_reference(model, batch, runtime)
        with_prompts = _with_prompts(batch) if settings.objective == "orpo" else batch
        losses, balance = target_losses(model, with_prompts, runtime.device, per_token=True)
        scores = _of_rows(losses, batch, with_prompts, self._is_mean)  # [rows], log-probabilities
        chosen, rejected = (scores - reference)[: 2 * pairs].view(-1, 2).unbind(1)  # [pairs]
        more = dict[str, torch.Tensor]()
        if settings.objective == "ipo":
            of_pairs = (chosen - rejected - 1 / (2 * settings.beta)).square()
        elif settings.objective == "orpo":
            log_odds = _log_odds(chosen) - _log_odds(rejected)
            nll = -_of_rows(losses, with_prompts, with_prompts, True)[: 2 * pairs : 2]
            ratio = F.logsigmoid(log_odds)
            of_pairs = nll - settings.beta * ratio
            more = {"nll_loss": nll, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
        else:
            gamma = settings.simpo_gamma / settings.beta if settings.objective == "simpo" else 0.0
            margin, smoothing = settings.beta * (chosen - rejected - gamma), settings.label_smoothing
            of_pairs = -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing
        rewards = settings.beta * chosen, settings.beta * rejected
        log_probabilities = scores[: 2 * pairs].view(-1, 2)
        logged = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "logps/chosen": log_probabilities[:, 0],
            "logps/rejected": log_probabilities[:, 1],
            **more,
        }
        sums = {name: values.detach().sum() for name, values in logged.items()}
        loss = of_pairs.sum()
        if isinstance(balance, torch.Tensor):  # a sum over tokens; the mean over tokens counts for each pair
            share = balance * (pairs / max(1, len(losses)))
            loss, sums["router_aux_loss"] = loss + router_coefficient(model) * share, share.detach()
        return LossSum(loss, pairs, sums)

    @torch.no_grad()
    def _of_reference(self, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> torch.Tensor:
        """The reference's log-probability of each row's response, float32 [rows], without dropout."""
        is_training = model.training
        model.eval()
        with adapter_off(model):
            losses, _ = target_losses(model, batch, runtime.device, per_token=True)
        model.train(is_training)
        return _of_rows(losses, batch, batch, self._is_mean)


def _of_rows(losses: torch.Tensor, counted: Batch, computed: Batch, is_mean: bool) -> torch.Tensor:
    """The log-probability of each row, float32 [rows]: summed in one order, so that it is the same in every run.

    Args:
        losses: float32 [targets], those of `computed`.
        counted: the same rows; of them the labels tell which tokens are summed.
        computed: the rows with labels on more tokens.
        is_mean: divide by the number of tokens.
    """
    device, rows = losses.device, target_rows(computed)
    is_counted = (shifted_labels(counted) != IGNORED)[shifted_labels(computed) != IGNORED]
    sizes = torch.bincount(rows, minlength=len(computed.row_lengths)).tolist()
    of_tokens = -losses if bool(is_counted.all()) else -losses * sent(is_counted.float(), device)
    sums = pad_sequence(list(of_tokens.split(sizes)), batch_first=True).sum(1)
    if not is_mean:
        return sums
    counts = torch.bincount(rows[is_counted], minlength=len(sizes)).clamp(min=1)
    return sums / sent(counts, device)


def _with_prompts(batch: Batch) -> Batch:
    """The batch with all tokens of the rows with a chosen response as labels, but the first of a row."""
    labels, lengths = batch.labels.clone(), batch.row_lengths
    if batch.is_packed:
        rows = list(zip(labels[0].split(lengths), batch.input_ids[0].split(lengths), strict=True))
    else:
        whole = zip(labels, batch.input_ids, lengths, strict=True)
        rows = [(own[:length], ids[:length]) for own, ids, length in whole]
    for own, ids in rows[: len(batch.sources) : 2]:  # none of a batch that only fills a rank up
        own[1:] = ids[1:]
    return dataclasses.replace(batch, labels=labels)


def _log_odds(scores: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p, which is below 0."""
    scores = scores.clamp(max=LARGEST_LOG_PROBABILITY)
    return scores - (-torch.expm1(scores)).log()
