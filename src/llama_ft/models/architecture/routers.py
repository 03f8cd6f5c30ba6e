"""The auxiliary loss of a mixture of experts, with which its routers learn to use all experts
equally.

It is computed over the tokens of a micro-batch on all ranks, without padding, and over all layers
with experts:

    f_e    tokens routed to expert e / tokens                   without gradient
    P_e    mean over tokens of softmax(router logits)[e]        its gradient stays on the token's rank
    loss   experts * sum over e of f_e * P_e                    minimum: experts per token, if all are used equally

Source: equations 4 to 6 of Switch Transformers, https://arxiv.org/abs/2101.03961, as Transformers'
load_balancing_loss_func computes them in one process.
"""

import inspect
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.libraries.evidence import BALANCING_ARGUMENTS, BALANCING_LOSS
from llama_ft.models.base.layers import function_of_file
from llama_ft.models.built import BuiltModel
from llama_ft.runtime.console import log

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # JetMoE uses the second name


def use_router_loss(model: PreTrainedModel, coefficient: float | None) -> float:
    """Return the coefficient of the auxiliary loss, and log it unless it is 0. With 0 the loss is
    not computed.

    Args:
        model: the model on the meta device.
        coefficient: 0 disables the auxiliary loss. None: the value in config.json if
            output_router_logits is true there, as in Transformers.

    Raises:
        UserError: a coefficient is given, but Transformers defines no auxiliary loss for this
            architecture.
    """
    if coefficient and _own_coefficient(model) is None:
        lacking = f"Transformers has no such loss for model_type {model.config.model_type}"
        raise UserError(f"--router_aux_loss_coef {coefficient:g}: {lacking}. Remove it.")
    if coefficient is None:
        configs = (model.config, model.config.get_text_config())
        is_asked = any(getattr(config, "output_router_logits", False) for config in configs)
        coefficient = _own_coefficient(model) if is_asked else None
    if coefficient:
        log.info(
            f"Auxiliary loss of the routers: coefficient {coefficient:g}, logged as train/router_aux_loss"
        )
    return coefficient or 0.0


def router_arguments(built: BuiltModel) -> dict[str, bool]:
    """Return the arguments of a forward pass that also returns router logits; none in evaluation
    mode."""
    is_computed = built.model.training and built.router_coefficient != 0
    return {"output_router_logits": True} if is_computed else {}


def router_loss(
    built: BuiltModel,
    router_logits: Sequence[torch.Tensor] | None,
    attention_mask: torch.Tensor | None,
    target_tokens: int,
) -> torch.Tensor | float:
    """Compute this rank's part of a micro-batch's auxiliary loss, without its coefficient, as a sum
    over loss tokens.

    All ranks must call it. The sum of all parts is the auxiliary loss of all tokens, times the
    number of loss tokens. So a micro-batch has the same weight here as in the loss of its tokens.

    Args:
        built: the model. In evaluation mode the result is 0.
        router_logits: of the forward pass, one [tokens, experts] per layer with experts.
        attention_mask: [samples, positions], 0 or False on padding; None: no padding.
        target_tokens: loss tokens of this rank's micro-batch.

    Returns:
        A float32 scalar, whose gradient goes through the probabilities P_e; or 0.0.
    """
    if not router_arguments(built):
        return 0.0
    model = built.model
    if not router_logits:
        raise UserError(
            f"--router_aux_loss_coef: {type(model).__name__} returns no router logits. Set it to 0."
        )
    layers: list[torch.Tensor] = [layer.flatten(0, -2) for layer in router_logits]
    tokens, experts = layers[0].shape
    per_token = (
        getattr(model, "num_experts_per_tok", None)
        or model.config.get_text_config().num_experts_per_tok
    )
    counts = (
        torch.ones(tokens, device=layers[0].device)
        if attention_mask is None
        else attention_mask.flatten().float()
    )
    sent = probabilities = torch.zeros(experts, device=counts.device)
    for layer in layers:
        token_probabilities = layer.softmax(dim=-1)  # [tokens, experts]
        chosen = token_probabilities.topk(per_token, dim=-1).indices.flatten()
        sent = sent.scatter_add(0, chosen, counts.repeat_interleave(per_token))
        counted = token_probabilities.float() * counts.unsqueeze(1)
        probabilities = probabilities + counted.sum(dim=0)
        del counted  # autograd keeps what it needs; this is freed before the next layer's
    targets = torch.full((1,), float(target_tokens), device=counts.device)
    total_count = counts.sum().view(1) * len(layers)
    totals = torch.cat([sent, total_count, targets])
    # over all ranks: each has counted its own tokens
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    fractions = totals[:-2] / totals[-2]
    mean_probabilities = probabilities / totals[-2]
    return (fractions * mean_probabilities).sum() * experts * totals[-1]


def _own_coefficient(model: PreTrainedModel) -> float | None:
    """Return the coefficient in the model's config; None if the file of its class does not define
    the formula above."""
    try:
        formula = function_of_file(model, BALANCING_LOSS)
    except StopIteration:
        return None
    if tuple(inspect.signature(formula).parameters) != BALANCING_ARGUMENTS:
        return None
    for place in (model, model.config.get_text_config()):
        for name in COEFFICIENTS:
            value = getattr(place, name, None)
            if isinstance(value, float | int):
                return float(value)
    return None
