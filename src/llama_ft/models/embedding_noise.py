"""NEFTune: noise on the input embeddings during training (https://arxiv.org/abs/2310.05914)."""

import math
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel


def add_embedding_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise to the output of the input embeddings in training mode.

    Args:
        model: on the meta device, not sharded yet.
        alpha: the noise is between -m and m, with m = alpha / sqrt(tokens x hidden size). As in
            Transformers and TRL, tokens are those of a row of the micro-batch: of a whole packed
            sequence.
    """

    def noisy(module: nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        size = alpha / math.sqrt(embedded.shape[1] * embedded.shape[2])
        return embedded + torch.empty_like(embedded).uniform_(-size, size)

    model.get_input_embeddings().register_forward_hook(noisy)
