"""Reward models: a score for each response, higher for the chosen one of a pair.

c and r are the scores of the chosen and the rejected response to a prompt:

    -log sigmoid(c - r) + center_rewards_coefficient (c + r)^2

Sources: https://arxiv.org/abs/2204.05862 (the loss), 2312.09244 (the second term, which keeps
scores around 0); names as in TRL's RewardTrainer, and those of the logged numbers as for the other
objectives over pairs.
"""

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llama_ft.data import Batch, Encoder, pad_token_id, two_examples
from llama_ft.data.read.formats import Sample, SampleFormat
from llama_ft.data.tokenize.encoder import Example
from llama_ft.models import BuiltModel
from llama_ft.models.architecture.routers import router_loss
from llama_ft.runtime import Ranks
from llama_ft.training.objectives.base import (
    LossSum,
    Objective,
    counted_once,
    model_call,
    with_router_loss,
)


class RewardModeling(Objective):
    """Scores the chosen response of a pair above the rejected one, with the head of
    models/architecture/score_head.py. See `Objective`."""

    examples_per_sample = 2
    counts_tokens = False

    def prepare_model(
        self,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int | None,
    ) -> None:
        """See `Objective`."""
        set_pad_token(model_config, tokenizer, vocabulary)

    @staticmethod
    def examples(sample: Sample, sample_format: SampleFormat, encoder: Encoder) -> list[Example]:
        """See `Objective`; the chosen response comes first."""
        return two_examples(sample, sample_format, encoder)

    def loss(self, built: BuiltModel, batch: Batch, ranks: Ranks) -> LossSum:
        """See `Objective`; counts pairs. Examples of even number are chosen responses, each
        followed by the rejected."""
        pairs = len(batch.locations) // 2
        pad = built.model.config.get_text_config().pad_token_id
        last = last_positions(batch, -1 if pad is None else pad)  # a plan knows of no padding
        call = model_call(built, batch, ranks.device)
        at = call.own.find(last, ranks.device)
        own_scores, router_logits = built.model(**call.inputs, positions=at.positions)
        scores = at.all(own_scores)  # [examples]
        chosen, rejected = scores[: 2 * pairs].view(-1, 2).unbind(1)  # [pairs]
        centering = self.config.preference.center_rewards_coefficient * (chosen + rejected).square()
        loss = (centering - F.logsigmoid(chosen - rejected)).sum()
        logged = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
        }
        sums = {name: values.detach().sum() for name, values in logged.items()}
        result = counted_once(LossSum(loss, pairs, sums), built)
        balance = router_loss(built, router_logits, call.mask, result.count)
        return with_router_loss(result, balance, built)


def set_pad_token(
    model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None
) -> None:
    """Set the padding token of a model with a score head and of its tokenizer: a score is read at
    the last token that is not this one, in Transformers too. `vocabulary`: see `pad_token_id`."""
    pad = pad_token_id(tokenizer, vocabulary)
    tokenizer.pad_token_id = pad
    model_config.get_text_config().pad_token_id = pad


def last_positions(batch: Batch, pad_token_id: int) -> torch.Tensor:
    """Return the position, in the flattened micro-batch, of the last token of each example that is
    not the pad token, int64 [examples]. Transformers does the same: an example's own text may end
    with pad tokens."""
    ids = batch.input_ids.flatten()
    lengths = torch.tensor(batch.example_lengths)
    if batch.is_packed:
        ends = lengths.cumsum(0)
    else:
        ends = lengths + torch.arange(len(lengths)) * batch.input_ids.shape[1]
    positions = torch.where(ids != pad_token_id, torch.arange(len(ids)), 0)
    last = positions.cummax(0).values[ends - 1]  # the newest non-pad token up to each end
    return last.maximum(ends - lengths)  # an example of pad tokens: its first one
