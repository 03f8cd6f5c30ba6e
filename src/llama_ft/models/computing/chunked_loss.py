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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models.architecture.text_part import TextOutput
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.built import BuiltModel
from llama_ft.models.computing.pieces import compute_pieces
from llama_ft.runtime.target import current_target

# Number of logits in memory: on CUDA 512 positions of Llama 3's 128,256 logits, 0.6 GiB in bf16 and
# fp32.
LOGITS_AT_ONCE = {"cuda": 2**26, "cpu": 2**22}
# The same if the whole LM head is trained: each chunk then adds to a gradient of the head's size in
# fp32, and moves 5 GB for Llama 3 8B. Not in fp16, where a larger sum may exceed the range.
LOGITS_WITH_TRAINED_HEAD = {"cuda": 2**28, "cpu": 2**22}
# A chunk is a multiple of this, the tile size of a GPU's matmul, and of twice as much if the LM head
# or its adapter is trained. The last chunk is padded to a multiple of half of it, because oneDNN on
# the CPU compiles a kernel for each new shape, and keeps it.
FEWEST_POSITIONS = 128
# torch adds two dtypes by a cast copy, which would be large for a whole LM head
ROWS_ADDED_AT_ONCE = 4096
LogitsFunction = Callable[[torch.Tensor], torch.Tensor]  # hidden [n, width] -> logits [n, vocab]


class TokenLoss(NamedTuple):
    """What a loss function may return instead of its losses."""

    losses: torch.Tensor  # float32 [targets]
    numbers: Mapping[str, torch.Tensor]  # to log, by name: float32 [targets], without gradient


# logits [targets, vocab] and targets [targets] -> losses [targets]
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | TokenLoss]


def token_loss(result: torch.Tensor | TokenLoss) -> TokenLoss:
    """Return what a loss function has returned, with its numbers if it has some."""
    return result if isinstance(result, TokenLoss) else TokenLoss(result, {})


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy, float32 [targets], of logits [targets, vocab] with int64 targets
    [targets]. It makes no second fp32 copy of the logits, and is differentiable once."""
    return cast(torch.Tensor, CrossEntropy.apply(logits, targets))


def use_chunked_loss(built: BuiltModel) -> bool:
    """Make a model return a loss instead of logits if it is called with `targets` [targets] and
    `positions` [targets], the positions in the flattened micro-batch that predict them.

    It then returns the loss, its routers' logits (for `router_loss`), and the sums of the numbers
    of a `TokenLoss`. The loss is the sum of `loss_fn(logits, targets)`; its gradient is computed in
    the forward pass. With `per_token` the loss is [targets], and only the backward pass knows the
    factor of each target's loss. For a trained LM head it recomputes each chunk's logits. All
    chunks run inside one `forward` of the LM head, and so inside the hooks with which fully_shard
    all-gathers its weight.

    The model is on the meta device, with adapters and not sharded. Returns False, and does not
    change the model, unless its forward is a decoder followed by an LM head.
    """
    model = cast(PreTrainedModel, built.model.get_submodule(built.left_out.causal))
    head = model.get_output_embeddings()
    decoder = _find_decoder(model, head)
    if decoder is None:
        return False
    names = {id(module): name for name, module in model.named_children()}
    logits_of = _head_function(model, names[id(decoder)], names[id(head)])
    vocabulary = _logits_per_position(logits_of, model, head)
    if vocabulary is None:
        return False
    replace_method(model, "forward", _forward_with_loss(model, decoder, head))
    replace_method(head, "forward", _head_with_loss(head, logits_of, vocabulary))
    return True


def _find_decoder(model: PreTrainedModel, head: nn.Module | None) -> nn.Module | None:
    """Return the decoder of a model that is a decoder followed by `head`; None of other models."""
    children = list(model.children())
    embedding = model.get_input_embeddings()
    decoder = next((child for child in children if embedding in child.modules()), None)
    if decoder is None or head is None or head not in children:
        return None
    reached = {id(parameter) for parameter in decoder.parameters()}
    reached |= {id(parameter) for parameter in head.parameters()}
    for parameter in model.parameters():
        # ModernBERT has a layer between decoder and LM head, which would get no gradient
        if parameter.requires_grad and id(parameter) not in reached:
            return None
    return decoder


def _logits_per_position(
    logits_of: LogitsFunction, model: PreTrainedModel, head: nn.Module
) -> int | None:
    """Return the number of logits per position; None if the LM head cannot run on its own."""
    width = getattr(head, "in_features", None) or model.config.get_text_config().hidden_size
    hidden = torch.empty(2, width, device="meta", dtype=model.dtype)
    try:
        logits = logits_of(hidden)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None  # forward changes the hidden states between decoder and LM head
    return logits.shape[-1] if logits.shape[:-1] == (2,) else None


def _forward_with_loss(
    model: PreTrainedModel, decoder: nn.Module, head: nn.Module
) -> Callable[..., Any]:
    """Return a `forward` of the model that returns a loss if it is called with targets."""
    plain = model.forward

    @wraps(plain)  # generate() inspects the names of its parameters
    def forward(
        *args: Any,
        positions: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        loss_fn: LossFunction = cross_entropy,
        per_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        if positions is None or targets is None:
            return plain(*args, **kwargs)
        count = len(targets)
        added = -count % (FEWEST_POSITIONS // 2)
        # repeat the last position: its loss is as finite as before
        if added and count:
            positions = torch.cat([positions, positions[-1:].expand(added)])
            targets = torch.cat([targets, targets[-1:].expand(added)])
        decoded = decoder(*args, **kwargs)
        # [targets, width]
        hidden = decoded.last_hidden_state.flatten(0, 1).index_select(0, positions)
        loss, sums = head(hidden, loss_of=(targets, count, loss_fn, per_token))
        return loss, getattr(decoded, "router_logits", None), sums

    return forward


def _head_with_loss(
    head: nn.Module, logits_of: LogitsFunction, vocabulary: int
) -> Callable[..., Any]:
    """Return a `forward` of the LM head that returns a loss if it is called with `loss_of`."""
    plain = head.forward

    def forward(
        hidden: torch.Tensor,
        *args: Any,
        loss_of: Any = None,  # see _forward_with_loss
        **kwargs: Any,
    ) -> Any:
        if loss_of is None:
            # generate() passes the last position of each prompt, a slice. If it is not contiguous and
            # the head is frozen, torch's matmul on the CPU copies the weight once per prompt.
            return plain(hidden.contiguous(), *args, **kwargs)
        targets, count, loss_fn, per_token = loss_of

        def losses_of(chunk: torch.Tensor, chunk_targets: torch.Tensor) -> TokenLoss:
            return token_loss(loss_fn(logits_of(chunk), chunk_targets))

        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        trained_numbers = sum(parameter.numel() for parameter in trained)
        is_whole = trained_numbers >= vocabulary * hidden.shape[-1]
        is_fp16 = hidden.dtype == torch.float16
        limits = LOGITS_WITH_TRAINED_HEAD if is_whole and not is_fp16 else LOGITS_AT_ONCE
        tiles = limits[current_target().device] // (vocabulary * FEWEST_POSITIONS)
        fewest_tiles = 2 if trained else 1
        size = FEWEST_POSITIONS * max(fewest_tiles, tiles)
        chunks = _Chunks(losses_of, size, trained)
        needs_gradients = torch.is_grad_enabled() and (hidden.requires_grad or trained)
        if per_token or not needs_gradients:
            losses = _ChunkedLoss.apply(hidden, targets, count, chunks, True, *trained)
            loss = losses if per_token else losses.sum()
        else:
            loss = _ChunkedLoss.apply(hidden, targets, count, chunks, False, *trained)
        return loss, chunks.sums

    return forward


def _head_function(model: PreTrainedModel, decoder: str, head: str) -> LogitsFunction:
    """Return a function hidden states -> logits. It runs the model's own forward, with its soft caps
    and scales, on a stub that returns the hidden states as the decoder's output."""
    view = copy.copy(model)  # shares all parameters
    view._modules = dict(model._modules)
    modules: dict[str, Any] = view._modules
    modules[decoder] = lambda *_, inputs_embeds, **__: TextOutput(last_hidden_state=inputs_embeds)
    # without hooks, which would all-gather its weight for every chunk
    modules[head] = getattr(model, head).forward
    forward = type(model).forward

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        output = forward(view, inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: torch.Tensor = output.logits
        return logits.squeeze(0)

    return logits_of


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. The gradient, softmax - one-hot, overwrites the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # The largest probability is 1 / sum(exp(logits - largest)), so the loss follows from the
        # softmax.
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        by_position = current_target().is_cuda
        largest, probability = _largest(logits, probabilities, by_position)
        log_sum = largest.float() - probability.log()
        ctx.dtype = logits.dtype
        ctx.targets = targets.unsqueeze(1)
        ctx.probabilities = probabilities if ctx.needs_input_grad[0] else None
        ctx.has_factors = True
        return (log_sum - logits.gather(1, ctx.targets).float()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradient = ctx.probabilities
        ctx.probabilities = None
        minus_one = torch.full_like(ctx.targets, -1, dtype=torch.float32)
        gradient.scatter_add_(1, ctx.targets, minus_one)
        if ctx.has_factors:
            gradient.mul_(factors.unsqueeze(1))
        return gradient.to(ctx.dtype), None


def _largest(
    logits: torch.Tensor, probabilities: torch.Tensor, by_position: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit and the largest probability of each target, [targets, 1].
    `by_position` does not read all probabilities, which is faster on CUDA. On one thread of an AMD
    Zen 4 it takes 1.5 times as long."""
    if by_position:
        largest, positions = logits.max(dim=-1, keepdim=True)
        return largest, probabilities.gather(1, positions)
    return logits.amax(dim=-1, keepdim=True), probabilities.amax(dim=-1, keepdim=True)


@dataclass(frozen=True)
class _Chunks:
    """The LM head and its loss, and how the positions are divided into chunks."""

    # hidden states and targets of a chunk -> its losses
    losses_of: Callable[[torch.Tensor, torch.Tensor], TokenLoss]
    size: int  # positions per chunk
    trained: Sequence[torch.Tensor]  # the LM head's trained parameters
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # of numbers, after a forward pass

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        """Return the loss of each position, and add up the numbers of the first `count`."""

        def compute(number: int) -> TokenLoss:
            start = number * self.size
            rows = slice(start, start + self.size)
            return self.losses_of(hidden[rows], targets[rows])

        # without targets, once
        chunks = -(-max(1, len(targets)) // self.size)
        results = compute_pieces(compute, chunks)
        for number, result in enumerate(results):
            self._add_numbers(result, count - number * self.size)
        return torch.cat([result.losses for result in results])

    def _add_numbers(self, result: TokenLoss, count: int) -> None:
        for name, values in result.numbers.items():
            added = values[: max(0, count)].detach().float().sum()
            self.sums[name] = self.sums[name] + added if name in self.sums else added

    def losses_and_gradients(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        count: int,
        factors: torch.Tensor | None,
        for_hidden: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the first `count` losses, a tensor for each chunk, and the gradients of their sum
        weighted by `factors` (None: 1): of the hidden states if `for_hidden`, then of `trained`."""
        has_factors = factors is not None
        if factors is None:
            factors = torch.ones(count, device=targets.device)
        factors = functional.pad(factors, (0, len(targets) - count))
        by_hidden = [torch.empty_like(hidden)] if for_hidden else []
        by_trained = list[torch.Tensor]()

        def compute(number: int) -> torch.Tensor:
            nonlocal by_trained
            start = number * self.size
            rows = slice(start, start + self.size)
            chunk = hidden[rows].detach().requires_grad_(for_hidden)
            with torch.enable_grad():
                result = self.losses_of(chunk, targets[rows])
            losses = result.losses
            if not has_factors:  # else the backward pass recomputes them
                self._add_numbers(result, count - start)
            node = losses.grad_fn
            is_padded = start + len(losses) > count  # there the factors are 0
            if isinstance(node, CrossEntropy._backward_cls) and not (has_factors or is_padded):
                cast(Any, node).has_factors = False  # this node is the `ctx` of CrossEntropy
            inputs = [chunk, *self.trained] if for_hidden else self.trained
            weights = factors[rows].to(losses.dtype)
            gradients = torch.autograd.grad(losses, inputs, weights, materialize_grads=True)
            of_chunk = list(gradients)
            # Nothing may keep a chunk's gradients longer: those of a large LM head take a gigabyte.
            del gradients
            if for_hidden:
                by_hidden[0][rows] = of_chunk.pop(0)
            by_trained = of_chunk if start == 0 else add_up(by_trained, of_chunk)
            return losses.detach()[: max(0, count - start)]

        # without targets, once: gradients are zero then
        chunks = -(-max(1, len(targets)) // self.size)
        all_losses = compute_pieces(compute, chunks)
        return all_losses, by_hidden + by_trained


class _ChunkedLoss(torch.autograd.Function):
    """The loss of the first `count` of hidden states [targets, width], chunk by chunk. The forward
    pass computes gradients and the backward pass scales them. But for losses per token, only the
    backward pass knows the factor of each loss, and the gradients of a trained LM head are sums over
    all of them: then it recomputes the logits, with the random numbers of the forward pass."""

    # `trained` are arguments, although `chunks` has them: autograd gives gradients to arguments.
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        count: int,
        chunks: _Chunks,
        per_token: bool,
        *trained: torch.Tensor,
    ) -> Any:
        ctx.chunks = chunks
        ctx.for_hidden = ctx.needs_input_grad[0]
        ctx.per_token = per_token
        ctx.gradients = None
        is_recomputed = per_token and (chunks.trained or not ctx.for_hidden)
        if is_recomputed:
            ctx.inputs = (hidden.detach(), targets)
            ctx.random = (torch.get_rng_state(), get_device_states(hidden))
            # FSDP warns about views
            return chunks.losses(hidden, targets, count)[:count].clone()
        losses, ctx.gradients = chunks.losses_and_gradients(
            hidden, targets, count, None, ctx.for_hidden
        )
        if per_token:
            return torch.cat(losses)
        return sum(of_chunk.sum() for of_chunk in losses)

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> Any:
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            hidden, targets = ctx.inputs
            cpu_state, (devices, device_states) = ctx.random
            with torch.random.fork_rng(devices=devices, device_type=factors.device.type):
                torch.set_rng_state(cpu_state)
                set_device_states(devices, device_states)
                _, gradients = ctx.chunks.losses_and_gradients(
                    hidden, targets, len(factors), factors, ctx.for_hidden
                )
        elif ctx.per_token:
            # those of added positions are 0
            gradients[0][: len(factors)] *= factors.unsqueeze(1)
        else:
            for gradient in gradients:
                gradient.mul_(factors)
        # Autograd rounds them to the parameters' dtype only now, after the division by the number
        # of targets: the sum itself can exceed the range of fp16.
        by_hidden = gradients.pop(0) if ctx.for_hidden else None
        # none for targets, count, chunks and per_token
        return by_hidden, None, None, None, None, *gradients


def add_up(
    totals: list[torch.Tensor],
    added: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Add in fp32, because rounding to 16 bits in each chunk would accumulate."""
    sums = []
    for total, more in zip(totals, added, strict=True):
        wide = total.float()  # no copy after the first time
        blocks = wide.split(ROWS_ADDED_AT_ONCE)
        added_blocks = more.split(ROWS_ADDED_AT_ONCE)
        for rows, added_rows in zip(blocks, added_blocks, strict=True):
            rows.add_(added_rows)
        sums.append(wide)
    return sums
