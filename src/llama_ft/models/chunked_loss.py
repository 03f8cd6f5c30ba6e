"""Chunked cross-entropy: LM head and loss for a few hundred targets at a time.

The logits of a micro-batch are by far its largest tensor: 8,192 tokens x 128,256 words are 2 GiB in
bf16, and the loss makes three more such tensors in fp32. So the LM head is applied to one chunk of
the positions with a label, the gradient of that chunk is computed at once, and its logits are
freed. Kept for the backward pass are the gradient of the hidden states, and that of the LM head's
weights if they are trained.

    positions    hidden [targets, width]  --chunk-->  logits [chunk, vocab]  -->  loss, and softmax - one-hot
                                                       gradient [chunk, width]  <--

Source: the idea is Liger's fused linear cross-entropy, https://arxiv.org/abs/2410.10989. Here the
model's own LM head runs, with its adapter, soft cap or scale, sharded or not.
"""

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.built import BuiltModel
from llama_ft.models.text_part import TextOutput

# Number of logits in memory: on CUDA 512 positions of Llama 3's 128,256 logits, 0.6 GiB in bf16 and
# fp32.
LOGITS_AT_ONCE = {"cuda": 2**26, "cpu": 2**22}
# A chunk is a multiple of this, the tile size of a GPU's matmul. Each chunk adds to the gradient of
# a trained LM head, so there a chunk has at least twice as many positions. The last chunk is padded
# to a multiple of half of it, because oneDNN on the CPU compiles a kernel for each new shape, and
# keeps it.
FEWEST_POSITIONS = 128
# torch adds two dtypes by a cast copy, which would be large for a whole LM head
ROWS_ADDED_AT_ONCE = 4096
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, float32 [targets], of logits [targets, vocab] with int64 targets
    [targets]. It makes no second fp32 copy of the logits, and is differentiable once."""
    return cast(torch.Tensor, CrossEntropy.apply(logits, targets))


def use_chunked_loss(built: BuiltModel) -> bool:
    """Make a model return a loss instead of logits if it is called with `targets` [targets] and
    `positions` [targets], the positions in the flattened micro-batch that predict them.

    It then returns the loss and its routers' logits (for `router_loss`). The loss is the sum of
    `loss_fn(logits, targets)`; its gradient is computed in the forward pass. With `per_token` the
    loss is [targets], and the backward pass, which knows the factor of each target's loss,
    recomputes each chunk's logits. All chunks run inside one `forward` of the LM head, and so
    inside the hooks with which fully_shard all-gathers its weight.

    The model is on the meta device, with adapters and not sharded. Returns False, and does not
    change the model, unless its forward is a decoder followed by an LM head.
    """
    model = cast(PreTrainedModel, built.model.get_submodule(built.left_out.causal))
    names = {id(module): name for name, module in model.named_children()}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    decoder = next((child for child in model.children() if embedding in child.modules()), model)
    if id(decoder) not in names or id(head) not in names or decoder is model:
        return False
    reached = {id(parameter) for parameter in [*decoder.parameters(), *head.parameters()]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in reached]
    if any(parameter.requires_grad for parameter in others):
        # ModernBERT has a layer between decoder and LM head, which would get no gradient
        return False
    logits_of = _head_function(model, names[id(decoder)], names[id(head)])
    width = getattr(head, "in_features", None) or model.config.get_text_config().hidden_size
    try:
        on_meta = logits_of(torch.empty(2, width, device="meta", dtype=model.dtype))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False  # forward changes the hidden states between decoder and LM head
    if on_meta.shape[:-1] != (2,):
        return False
    vocabulary = on_meta.shape[-1]
    plain_forward = model.forward
    plain_head = head.forward

    @wraps(plain_forward)  # generate() inspects the names of its parameters
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
        # repeat the last position: its loss is as finite as before
        if more := -count % (FEWEST_POSITIONS // 2):
            if count:
                positions = torch.cat([positions, positions[-1:].expand(more)])
                targets = torch.cat([targets, targets[-1:].expand(more)])
        decoded = decoder(*args, **kwargs)
        # [targets, width]
        hidden = decoded.last_hidden_state.flatten(0, 1).index_select(0, positions)
        loss = head(hidden, loss_of=(targets, count, loss_fn, per_token))
        return loss, getattr(decoded, "router_logits", None)

    def head_forward(hidden: torch.Tensor, *args: Any, loss_of: Any = None, **kwargs: Any) -> Any:
        if loss_of is None:
            return plain_head(hidden, *args, **kwargs)
        targets, count, loss_fn, per_token = loss_of

        def losses_of(chunk: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, loss_fn(logits_of(chunk), wanted))

        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        tiles = LOGITS_AT_ONCE[hidden.device.type] // (vocabulary * FEWEST_POSITIONS)
        arguments = (
            hidden,
            targets,
            count,
            losses_of,
            FEWEST_POSITIONS * max(2 if trained else 1, tiles),
        )
        if per_token or not (torch.is_grad_enabled() and (hidden.requires_grad or trained)):
            losses = _ChunkedLoss.apply(*arguments, True, *trained)
            return losses if per_token else losses.sum()
        return _ChunkedLoss.apply(*arguments, False, *trained)

    model.forward = forward
    head.forward = head_forward
    return True


def _head_function(
    model: PreTrainedModel, decoder: str, head: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function hidden states [n, width] -> logits [n, vocab]. It runs the model's own
    forward, with its soft caps and scales, on a stub that returns the hidden states as the
    decoder's output."""
    view = copy.copy(model)  # shares all parameters
    view._modules = dict(model._modules)
    modules: dict[str, Any] = view._modules
    modules[decoder] = lambda *_, inputs_embeds, **__: TextOutput(last_hidden_state=inputs_embeds)
    # without hooks, which would all-gather its weight for every chunk
    modules[head] = getattr(model, head).forward
    forward = type(model).forward

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        return cast(
            torch.Tensor,
            forward(view, inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0),
        )

    return logits_of


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. The gradient, softmax - one-hot, overwrites the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # The largest probability is 1 / sum(exp(logits - largest)), so the loss follows from the
        # softmax.
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        log_sum = logits.amax(dim=-1).float() - probabilities.amax(dim=-1).log()
        ctx.dtype = logits.dtype
        ctx.targets = targets.unsqueeze(1)
        ctx.probabilities = probabilities if ctx.needs_input_grad[0] else None
        return log_sum - logits.gather(1, ctx.targets).squeeze(1).float()

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradient = ctx.probabilities
        ctx.probabilities = None
        gradient.scatter_add_(1, ctx.targets, torch.full_like(ctx.targets, -1, dtype=torch.float32))
        return gradient.mul_(factors.unsqueeze(1)).to(ctx.dtype), None


class _ChunkedLoss(torch.autograd.Function):
    """The loss of the first `count` of hidden states [targets, width], in chunks of `size`. For a
    sum, the forward pass computes gradients and the backward pass scales them. For losses per
    token, only the backward pass knows the factor of each loss: it recomputes the logits, with the
    random numbers of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Any,
        targets: Any,
        count: int,
        losses_of: Any,
        size: int,
        per_token: bool,
        *trained: Any,
    ) -> Any:
        ctx.arguments = (losses_of, size, trained, ctx.needs_input_grad[0])
        ctx.gradients = None
        if per_token:
            ctx.inputs = (hidden.detach(), targets)
            ctx.random = (torch.get_rng_state(), get_device_states(hidden))
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            # FSDP warns about views
            return torch.cat([losses_of(*chunk) for chunk in chunks])[:count].clone()
        ones = torch.ones(count, device=targets.device)
        total, ctx.gradients = _sum_and_gradients(hidden, targets, ones, *ctx.arguments)
        return total

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is not None:
            for gradient in gradients:
                gradient.mul_(factors)
        else:
            (hidden, targets), (cpu_state, states) = ctx.inputs, ctx.random
            with torch.random.fork_rng(devices=states[0], device_type=factors.device.type):
                torch.set_rng_state(cpu_state)
                set_device_states(*states)
                _, gradients = _sum_and_gradients(hidden, targets, factors, *ctx.arguments)
        # Autograd rounds them to the parameters' dtype only now, after the division by the number
        # of targets: the sum itself can exceed the range of fp16.
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
    """Return the sum of losses weighted by `factors`, and the gradients of that sum: of the hidden
    states if `for_hidden`, then of `trained`."""
    count = len(factors)
    factors = functional.pad(factors, (0, len(targets) - len(factors)))
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    by_hidden = [torch.empty_like(hidden)] if for_hidden else []
    by_trained = list[torch.Tensor]()
    # without targets, once: gradients are zero then
    for start in range(0, max(1, len(targets)), size):
        part = slice(start, start + size)
        chunk = hidden[part].detach().requires_grad_(for_hidden)
        with torch.enable_grad():
            losses = losses_of(chunk, targets[part])
        total += losses.detach()[: max(0, count - start)].sum()
        inputs = [chunk, *trained] if for_hidden else trained
        found = list(
            torch.autograd.grad(
                losses, inputs, factors[part].to(losses.dtype), materialize_grads=True
            )
        )
        if for_hidden:
            by_hidden[0][part] = found.pop(0)
        # In fp32, because rounding to 16 bits in each chunk would accumulate. Nothing may keep a
        # chunk's gradients
        # longer: those of a large LM head take a gigabyte.
        by_trained = (
            found
            if start == 0
            else [_add_up(*each) for each in zip(by_trained, found, strict=True)]
        )
    return total, by_hidden + by_trained


def _add_up(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    total = total.float()
    for part, added in zip(
        total.split(ROWS_ADDED_AT_ONCE), more.split(ROWS_ADDED_AT_ONCE), strict=True
    ):
        part.add_(added)
    return total
