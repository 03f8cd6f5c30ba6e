"""NEFTune: noise on the input embeddings during training (https://arxiv.org/abs/2310.05914)."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.packing.packed_samples import current_samples
from llama_ft.runtime.devices import sent


def add_embedding_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise to the output of the input embeddings in training mode.

    Args:
        model: on the meta device, not sharded yet.
        alpha: the noise is between -m and m, with m = alpha / sqrt(tokens x hidden size). Tokens
            are those of the token's own sample: neither padding nor the other samples of a packed
            sequence count, as in the authors' code. (TRL counts them.)
    """
    padded_lengths: torch.Tensor | None = None  # of the current micro-batch, [samples, 1]

    def record_padding(
        _model: nn.Module,
        _args: tuple[Any, ...],
        arguments: dict[str, Any],
    ) -> None:
        nonlocal padded_lengths
        mask = arguments.get("attention_mask")
        padded_lengths = None
        if mask is not None and mask.dim() == 2:  # [samples, length]
            padded_lengths = mask.sum(1, keepdim=True).clamp(min=1)

    def noisy(module: nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        packed = current_samples()
        if packed is not None:
            # not repeat_interleave: the planner's fake tensors cannot know the size of its result
            per_sample = [torch.full((length,), length) for length in packed.lengths]
            per_token = torch.cat(per_sample).unsqueeze(0)  # [1, tokens]
            if embedded.shape[1] < per_token.shape[1]:  # this rank's part
                per_token = packed.own(per_token)
            lengths = sent(per_token, embedded.device)
        elif padded_lengths is not None:
            lengths = padded_lengths
        else:
            lengths = torch.tensor([[embedded.shape[1]]], device=embedded.device)
        # [samples, 1 or tokens, 1]
        size = alpha / (lengths * embedded.shape[2]).sqrt().unsqueeze(2)
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * size.to(embedded.dtype)

    model.register_forward_pre_hook(record_padding, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noisy)
