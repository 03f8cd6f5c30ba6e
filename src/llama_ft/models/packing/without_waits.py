"""Methods of Transformers' models that wait for the GPU in each step, replaced by ones that do not."""

from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.base.replaced import replace_method

WARN = "warn_if_padding_and_no_attention_mask"


def avoid_waits(model: PreTrainedModel) -> None:
    """Replace methods of GPT-2 and of Falcon; other models stay as they are."""
    # GPT-2 looks for padding if it gets no mask.
    if hasattr(model.base_model, WARN):
        replace_method(model.base_model, WARN, lambda *_: None)
    for module in model.modules():
        if type(module).__name__ == "FalconAttention":
            replace_method(module, "_split_heads", partial(_split_heads, module))


def _split_heads(attention: Any, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query, key and value of Falcon's attention, [samples, tokens, heads, width]. Falcon indexes
    with lists of Python, which are copied to the GPU.

    Args:
        attention: the module.
        fused: [samples, tokens, all heads x width]
    """
    width = attention.head_dim
    heads = attention.num_heads
    if attention.new_decoder_architecture:
        shared_by = heads // attention.num_kv_heads
        groups = fused.unflatten(-1, (-1, shared_by + 2, width))
        query, key, value = groups.split([shared_by, 1, 1], dim=3)
        parts = (query, key.expand_as(query), value.expand_as(query))
        return tuple(part.flatten(2, 3) for part in parts)
    if attention.multi_query:
        return fused.unflatten(-1, (heads + 2, width)).split([heads, 1, 1], dim=2)
    return fused.unflatten(-1, (heads, 3, width)).unbind(3)
