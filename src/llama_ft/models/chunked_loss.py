"""The loss without the logits: head and cross-entropy over a few hundred targets at a time.

The logits of a micro-batch are its largest tensor by far: 8,192 tokens x 128,256 words are 2 GiB in bf16, and the loss
makes three more of them in fp32. Only positions that predict something need logits, and a position's loss and gradient
need nobody else's. So the head is applied to a piece of the positions, the gradient of that piece is computed at once,
and its logits are freed; what is kept for the backward pass is the gradient of the hidden states, and of the head's
weights where they are trained.

    positions    hidden [targets, width]  --piece-->  logits [piece, vocab]  -->  loss, and softmax - one-hot
                                                       gradient [piece, width]  <--

Source: the idea is Liger's fused linear cross-entropy, https://arxiv.org/abs/2410.10989. Here the model's own head
runs, with its adapter, soft cap or scale, sharded or not.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.routers import router_loss

# Logits that are there at a time. A product wants some hundred rows to be fast, and with each piece the gradient of a
# trained head is added up once more: 512 of Llama 3's 128,256 logits, 0.6 GiB in bf16 and fp32, or 32 on the CPU.
LOGITS_AT_ONCE = {"cuda": 2**26, "cpu": 2**22}
FEWEST_POSITIONS = 64
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each target in fp32, without a second fp32 copy of the logits.

    Args:
        logits: [targets, vocab].
        targets: int64 [targets].

    Returns:
        float32 [targets], differentiable by the logits once.
    """
    losses: torch.Tensor = CrossEntropy.apply(logits, targets)
    return losses


def use_chunked_loss(model: PreTrainedModel) -> bool:
    """Teach a model's forward to return a loss instead of logits when it is called with `targets` [targets] and
    `positions`, where in the flattened micro-batch they are predicted.

    It then returns the loss and the routers' auxiliary loss (see models/routers.py). The loss is the sum over all
    targets of `loss_fn(logits, targets)`, whose gradient is made with it; with `per_token` it is [targets], and each
    chunk's logits are computed again in the backward pass, which knows what each target's loss is multiplied by.

    Both run inside `forward`, of the model and of the LM head, and so within the hooks by which fully_shard all-gathers
    the weights: once for all chunks.

    Args:
        model: skeleton on the meta device, adapters injected, not sharded yet.

    Returns:
        Whether it could be taught: its forward must be a decoder followed by a head. Otherwise it is left as it is.
    """
    names = {id(module): name for name, module in model.named_children()}
    decoder, head = model.base_model, model.get_output_embeddings()
    if id(decoder) not in names or id(head) not in names or decoder is model:
        return False
    known = {id(parameter) for module in (decoder, head) for parameter in module.parameters()}
    if any(parameter.requires_grad and id(parameter) not in known for parameter in model.parameters()):
        return False  # ModernBERT has a layer between decoder and head, which would get no gradient
    logits_of = _head_function(model, names[id(decoder)], names[id(head)])
    width = getattr(head, "in_features", None) or model.config.get_text_config().hidden_size
    try:
        on_meta = logits_of(torch.empty(2, width, device="meta", dtype=model.dtype))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False  # forward does more between decoder and head than can be seen from outside
    if on_meta.shape[:-1] != (2,):
        return False
    vocabulary = on_meta.shape[-1]
    plain_forward, plain_head = model.forward, head.forward

    @wraps(plain_forward)  # generate() asks for its parameters, by name
    def forward(
        *args: Any,
        positions: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        loss_fn: LossFunction = cross_entropy,
        per_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        if positions is None or targets is None:
            return plain_forward(*args, **kwargs)
        decoded = decoder(*args, **kwargs)
        hidden = decoded.last_hidden_state.flatten(0, 1).index_select(0, positions)  # [targets, width]
        loss = head(hidden, targets=targets, loss_fn=loss_fn, per_token=per_token)
        return loss, router_loss(model, decoded, kwargs.get("attention_mask"))

    def head_forward(
        hidden: torch.Tensor,
        *args: Any,
        targets: torch.Tensor | None = None,
        loss_fn: LossFunction = cross_entropy,
        per_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            return plain_head(hidden, *args, **kwargs)
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        size = max(FEWEST_POSITIONS, LOGITS_AT_ONCE[hidden.device.type] // vocabulary)
        chunks = _Chunks(targets, logits_of, loss_fn, size)
        if not torch.is_grad_enabled():
            losses = torch.cat(chunks.run(hidden, [], for_hidden=False)[0])
            return losses if per_token else losses.sum()
        return (_TokenLosses if per_token else _ChunkedLoss).apply(hidden, chunks, *trained)

    model.forward = forward
    head.forward = head_forward
    model._has_chunked_loss = True  # type: ignore[assignment]
    return True


def has_chunked_loss(model: nn.Module) -> bool:
    """Whether `use_chunked_loss` has taught this model."""
    return bool(getattr(model, "_has_chunked_loss", False))


def forget_chunked_loss(model: nn.Module) -> None:
    """Have the loss computed from all logits."""
    model._has_chunked_loss = False  # type: ignore[assignment]


class _Known:
    """What a decoder returns, but for what nobody asked for."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class _Decoded(nn.Module):
    """Stands where the decoder stood and gives back what it had computed."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Known:
        return _Known(inputs_embeds)

    @property
    def decoder(self) -> "_Decoded":
        """OPT's head asks the decoder inside the model."""
        return self


class _Plain(nn.Module):
    """The head without its hooks, which would gather its weights for every piece."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.forward = forward


def _head_function(model: PreTrainedModel, decoder: str, head: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Hidden states [n, width] -> logits [n, vocab] as the model's own forward makes them: it is run with a decoder
    that has computed already, so that soft caps and scales before and after the head are where they belong."""
    view = copy.copy(model)  # shares all parameters
    view._modules = dict(model._modules)
    view._modules[decoder] = _Decoded()
    view._modules[head] = _Plain(getattr(model, head).forward)
    forward = type(model).forward

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, forward(view, inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0))

    return logits_of


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. Its gradient, softmax - one-hot, is made in place of the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # The largest probability is 1 / sum(exp(logits - largest)): the loss comes out of softmax's own numbers.
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        log_sum = logits.amax(dim=-1).float() - probabilities.amax(dim=-1).log()
        ctx.dtype, ctx.targets = logits.dtype, targets.unsqueeze(1)
        ctx.probabilities = probabilities if ctx.needs_input_grad[0] else None
        return log_sum - logits.gather(1, ctx.targets).squeeze(1).float()

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradient, ctx.probabilities = ctx.probabilities, None
        gradient.scatter_add_(1, ctx.targets, torch.full_like(ctx.targets, -1, dtype=torch.float32))
        return gradient.mul_(factors.unsqueeze(1)).to(ctx.dtype), None


@dataclass(frozen=True)
class _Chunks:
    """How the losses of hidden states are computed, `size` targets at a time."""

    targets: torch.Tensor
    logits_of: Callable[[torch.Tensor], torch.Tensor]
    loss_fn: LossFunction
    size: int

    def run(
        self, hidden: torch.Tensor, wanted: list[torch.Tensor], for_hidden: bool, factors: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, list[torch.Tensor]]:
        """The losses of each chunk, and the gradients of their sum, each loss times its factor: by `hidden`, and, of
        several chunks in fp32, by the parameters `wanted`."""
        losses: list[torch.Tensor] = []
        gradient = torch.empty_like(hidden) if for_hidden else None
        sums: list[torch.Tensor] = []
        for start in range(0, max(1, len(self.targets)), self.size):  # once without targets: gradients are zero then
            stop = start + self.size
            chunk = hidden[start:stop].detach().requires_grad_(for_hidden)
            with torch.set_grad_enabled(for_hidden or bool(wanted)):
                chunk_losses = self.loss_fn(self.logits_of(chunk), self.targets[start:stop])
            losses.append(chunk_losses.detach())
            if not (for_hidden or wanted):
                continue
            by_losses = torch.ones_like(chunk_losses) if factors is None else factors[start:stop]
            inputs = [chunk, *wanted] if for_hidden else wanted
            found = list(torch.autograd.grad(chunk_losses, inputs, by_losses, materialize_grads=True))
            if gradient is not None:
                gradient[start:stop] = found.pop(0)
            # In fp32: many roundings to 16 bits would add up.
            sums = found if start == 0 else [total.float().add_(part) for total, part in zip(sums, found, strict=True)]
        return losses, gradient, sums


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of hidden states [targets, width]; the gradients are made in the forward pass, and scaled in the
    backward pass by what the loss is divided by."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, chunks: _Chunks, *trained: torch.Tensor) -> torch.Tensor:
        losses, ctx.by_hidden, ctx.by_trained = chunks.run(hidden, list(trained), ctx.needs_input_grad[0])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in losses:
            total += chunk.sum()
        return total

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        by_hidden, by_trained = ctx.by_hidden, ctx.by_trained
        ctx.by_hidden = ctx.by_trained = None
        for gradient in (by_hidden, *by_trained):
            if gradient is not None:
                gradient.mul_(factor)
        # Only now does autograd round them to the parameters' dtype: the sum over all targets, before it is divided by
        # their number, can be more than fp16 holds.
        return by_hidden, None, *by_trained


class _TokenLosses(torch.autograd.Function):
    """Loss of each of the hidden states [targets, width]; logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, chunks: _Chunks, *trained: torch.Tensor) -> torch.Tensor:
        ctx.chunks, ctx.trained = chunks, trained
        ctx.save_for_backward(hidden)
        return torch.cat(chunks.run(hidden, [], for_hidden=False)[0])

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        _, by_hidden, by_trained = ctx.chunks.run(hidden, list(ctx.trained), ctx.needs_input_grad[0], factors)
        return by_hidden, None, *by_trained
