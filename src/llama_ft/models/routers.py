"""The routers' auxiliary loss of a mixture of experts, which config.json asks for by output_router_logits."""

from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.build import function_beside


def router_loss(model: PreTrainedModel, output: Any, attention_mask: torch.Tensor | None) -> torch.Tensor | float:
    """The model's own load balancing loss of a micro-batch's tokens, times its own coefficient; 0 in evaluation, and if
    config.json does not ask for it.

    Args:
        model: called for `output`.
        output: with `router_logits`, or without.
        attention_mask: [rows, length], 0 on padding; None: there is none.
    """
    if not model.training or not getattr(output, "router_logits", None):
        return 0.0
    balance = function_beside(model, "load_balancing_loss_func")
    experts: dict[str, Any] = {"num_experts": model.num_experts, "top_k": model.num_experts_per_tok}
    loss: torch.Tensor = balance(output.router_logits, **experts, attention_mask=attention_mask)
    factor: Any = model.aux_loss_coef if model.config.model_type == "jetmoe" else model.router_aux_loss_coef
    return loss * factor
