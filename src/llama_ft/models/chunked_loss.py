"""Chunked cross-entropy: LM head and loss over a few hundred targets at a time.

The logits of a micro-batch are its largest tensor by far: 8,192 tokens x 128,256 words are 2 GiB in bf16, and the loss
makes three more of them in fp32. So the head is applied to a chunk of the positions that predict something, the
gradient of that chunk is computed at once, and its logits are freed. What is kept for the backward pass is the gradient
of the hidden states, and of the head's weights if they are trained.

    positions    hidden [targets, width]  --chunk-->  logits [chunk, vocab]  -->  loss, and softmax - one-hot
                                                       gradient [chunk, width]  <--

Source: the idea is Liger's fused linear cross-entropy, https://arxiv.org/abs/2410.10989. Here the model's own head
runs, with its adapter, soft cap or scale, sharded or not.
"""

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.routers import router_loss
from llama_ft.models.text_part import left_out

# Logits that are there at a time: 512 positions of Llama 3's 128,256 logits, 0.6 GiB in bf16 and fp32, on CUDA.
LOGITS_AT_ONCE = {"cuda": 2**26, "cpu": 2**22}
# A chunk is a multiple of these positions, the tile of a GPU's product. With each chunk the gradient of a trained head
# is added up once more, so it has twice as many at least. The last chunk is filled up to a multiple of half of them:
# on the CPU oneDNN compiles each new shape, and keeps what it has compiled.
FEWEST_POSITIONS = 128
ROWS_ADDED_AT_ONCE = 4096  # of two dtypes torch adds a copy in one: a whole head's would be large
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [targets, vocab] with int64 [targets], without a second fp32 copy of the logits: float32
    [targets], differentiable once."""
    return cast(torch.Tensor, CrossEntropy.apply(logits, targets))


def use_chunked_loss(model: PreTrainedModel) -> bool:
    """Have a model return a loss instead of logits when it is called with `targets` [targets] and `positions`, where in
    the flattened micro-batch they are predicted.

    It then returns the loss and the routers' auxiliary loss (`router_loss`). The loss is the sum over all
    targets of `loss_fn(logits, targets)`, whose gradient is made with it; with `per_token` it is [targets], and each
    chunk's logits are computed again in the backward pass, which knows what each target's loss is multiplied by. All
    chunks run inside one `forward` of the LM head, and so within the hooks by which fully_shard all-gathers its weight.

    The model is a skeleton, adapters injected, not sharded yet. Returns False, and leaves the model as it was, unless
    its forward is a decoder followed by a head.
    """
    whole, model = model, cast(PreTrainedModel, model.get_submodule(left_out(model).causal))
    names = {id(module): name for name, module in model.named_children()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    decoder = next((child for child in model.children() if embedding in child.modules()), model)
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
        count = len(targets)
        if more := -count % (FEWEST_POSITIONS // 2):  # by the last one again, whose loss is as finite as it was
            positions, targets = (torch.cat([it, it[-1:].expand(more)]) if count else it for it in (positions, targets))
        decoded = decoder(*args, **kwargs)
        hidden = decoded.last_hidden_state.flatten(0, 1).index_select(0, positions)  # [targets, width]
        loss = head(hidden, loss_of=(targets, count, loss_fn, per_token))
        return loss, router_loss(whole, decoded, kwargs.get("attention_mask"), count)

    def head_forward(hidden: torch.Tensor, *args: Any, loss_of: Any = None, **kwargs: Any) -> Any:
        if loss_of is None:
            return plain_head(hidden, *args, **kwargs)
        targets, count, loss_fn, per_token = loss_of

        def losses_of(chunk: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, loss_fn(logits_of(chunk), wanted))

        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        tiles = LOGITS_AT_ONCE[hidden.device.type] // (vocabulary * FEWEST_POSITIONS)
        arguments = hidden, targets, count, losses_of, FEWEST_POSITIONS * max(2 if trained else 1, tiles)
        if per_token or not (torch.is_grad_enabled() and (hidden.requires_grad or trained)):
            losses = _ChunkedLoss.apply(*arguments, True, *trained)
            return losses if per_token else losses.sum()
        return _ChunkedLoss.apply(*arguments, False, *trained)

    model.forward = forward
    head.forward = head_forward
    whole._has_chunked_loss = True  # type: ignore[assignment]
    return True


def has_chunked_loss(model: nn.Module) -> bool:
    """Whether `use_chunked_loss` has taught this model."""
    return bool(getattr(model, "_has_chunked_loss", False))


def forget_chunked_loss(model: nn.Module) -> None:
    """Have the loss computed from all logits."""
    model._has_chunked_loss = False  # type: ignore[assignment]


class _Known(SimpleNamespace):
    """What a decoder that has computed already returns, but for what nobody asked for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


def _head_function(model: PreTrainedModel, decoder: str, head: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Hidden states [n, width] -> logits [n, vocab] as the model's own forward makes them, with its soft caps and
    scales: it is run with a decoder that has computed already."""
    view = copy.copy(model)  # shares all parameters
    view._modules = dict(model._modules)
    modules: dict[str, Any] = view._modules
    modules[decoder] = lambda *_, inputs_embeds, **__: _Known(last_hidden_state=inputs_embeds)
    modules[head] = getattr(model, head).forward  # without its hooks, which would gather its weights for every piece
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


class _ChunkedLoss(torch.autograd.Function):
    """Loss of the first `count` of hidden states [targets, width], `size` at a time. Gradients of the sum are made in
    the forward pass and scaled in the backward pass. Of losses per token only the backward pass knows what each is
    multiplied by: it makes the logits again, with the random numbers of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, targets: Any, count: int, losses_of: Any, size: int, per_token: bool, *trained: Any
    ) -> Any:
        ctx.arguments, ctx.gradients = (losses_of, size, trained, ctx.needs_input_grad[0]), None
        if per_token:
            ctx.inputs, ctx.random = (hidden.detach(), targets), (torch.get_rng_state(), get_device_states(hidden))
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            return torch.cat([losses_of(*chunk) for chunk in chunks])[:count].clone()  # FSDP warns of views
        ones = torch.ones(count, device=targets.device)
        total, ctx.gradients = _sum_and_gradients(hidden, targets, ones, *ctx.arguments)
        return total

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None:
            for gradient in gradients:
                gradient.mul_(factors)
        else:
            (hidden, targets), (cpu_state, states) = ctx.inputs, ctx.random
            with torch.random.fork_rng(devices=states[0], device_type=factors.device.type):
                torch.set_rng_state(cpu_state)
                set_device_states(*states)
                _, gradients = _sum_and_gradients(hidden, targets, factors, *ctx.arguments)
        # Only now does autograd round them to the parameters' dtype: the sum over all targets, before it is divided by
        # their number, can be more than fp16 holds.
        by_hidden = [gradients.pop(0)] if ctx.needs_input_grad[0] else [None]
        return *by_hidden, *[None] * 5, *gradients


def _sum_and_gradients(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    factors: torch.Tensor,
    losses_of: LossFunction,
    size: int,
    trained: Sequence[torch.Tensor],
    for_hidden: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum of the losses that have `factors`, and gradients of the losses times those: of hidden states if
    `for_hidden`, and of `trained`."""
    count, factors = len(factors), functional.pad(factors, (0, len(targets) - len(factors)))
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    by_hidden, by_trained = [torch.empty_like(hidden)] if for_hidden else [], list[torch.Tensor]()
    for start in range(0, max(1, len(targets)), size):  # once without targets: gradients are zero then
        part = slice(start, start + size)
        chunk = hidden[part].detach().requires_grad_(for_hidden)
        with torch.enable_grad():
            losses = losses_of(chunk, targets[part])
        total += losses.detach()[: max(0, count - start)].sum()
        inputs = [chunk, *trained] if for_hidden else trained
        found = list(torch.autograd.grad(losses, inputs, factors[part].to(losses.dtype), materialize_grads=True))
        if for_hidden:
            by_hidden[0][part] = found.pop(0)
        # In fp32: many roundings to 16 bits would add up.
        # Nothing here may keep the gradients of a chunk longer: of a large head they are a gigabyte.
        by_trained = found if start == 0 else [_add_up(*each) for each in zip(by_trained, found, strict=True)]
    return total, by_hidden + by_trained


def _add_up(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    total = total.float()
    for part, added in zip(total.split(ROWS_ADDED_AT_ONCE), more.split(ROWS_ADDED_AT_ONCE), strict=True):
        part.add_(added)
    return total
