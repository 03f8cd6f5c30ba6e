"""NEFTune: noise on the input embeddings while training (https://arxiv.org/abs/2310.05914)."""

import math
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel


def add_embedding_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise to what the input embeddings return in training mode.

    Args:
        model: a skeleton, not sharded yet.
        alpha: the noise lies between -m and m, where m is alpha / sqrt(tokens x hidden size); tokens are those of a row
            of the micro-batch, so of a whole pack, as in Transformers and TRL.
    """

    def noisy(module: nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        size = alpha / math.sqrt(embedded.shape[1] * embedded.shape[2])
        return embedded + torch.empty_like(embedded).uniform_(-size, size)

    model.get_input_embeddings().register_forward_hook(noisy)
