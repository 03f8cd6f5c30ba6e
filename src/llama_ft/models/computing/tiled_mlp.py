"""Tiled MLPs: the MLP of a decoder layer, or its experts, computes a few thousand tokens at a time.

An MLP keeps several tensors of tokens x intermediate size for the backward pass, mostly the largest
activations of a layer. But it computes each token by itself:

    forward    x [tokens, width]  --piece-->  MLP  -->  y          kept: x
    backward   x  --piece-->  MLP again  -->  gradient of the piece; gradients of weights are added up

So the memory of one piece is enough. Routers are not tiled: experts get their choices, piece by piece.

Source: the idea is ALST's tiled MLP, https://arxiv.org/abs/2506.13996. Here gradients of weights are
added in fp32. And x is kept before the MLP computes: a checkpointed layer is recomputed up to the
last tensor that was kept, so that it does not compute its MLP a third time.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.libraries.evidence import (
    ACTIVATIONS,
    MLP_CLASSES,
    MLP_PARAMETERS,
    PER_TOKEN_CLASSES,
    ROUTED_PARAMETERS,
    is_experts,
    parameters_of,
)
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.base.replaced import replace_method
from llama_ft.models.computing.chunked_loss import add_up
from llama_ft.models.computing.pieces import compute_pieces

_IN_PIECES: ContextVar[bool] = ContextVar("an MLP computes in pieces", default=False)
# Whether an MLP computes the forward pass of its pieces, of which nothing is kept.
computes_pieces = _IN_PIECES.get


def use_tiled_mlp(model: PreTrainedModel, train: TrainConfig) -> str:
    """Make the MLPs and the experts of decoder layers compute at most `train.tiled_mlp` tokens at a
    time, in training and evaluation. Return a text for the log; "" with auto and off, which change
    nothing.

    The model is on the meta device, with adapters and not sharded: pieces are computed inside the
    hooks with which fully_shard all-gathers a layer once. Raises UserError if there are none.
    """
    most = train.tiled_mlp
    if isinstance(most, str):
        return ""
    mlps = find_mlps(model)
    if not mlps:
        raise UserError(
            f"--tiled_mlp {most}: no MLP was found in the layers of {type(model).__name__}. Use --tiled_mlp off."
        )
    for mlp in mlps:
        replace_method(mlp, "forward", partial(_tiled, mlp, mlp.forward, most))
    return f"{len(mlps)} MLPs compute at most {most:,} tokens at a time."


def find_mlps(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs and stacked experts of decoder layers, with the adapters around them."""
    mlps = []

    def visit(module: nn.Module) -> None:
        base = _without_adapter(module)
        if _is_mlp(base) or _are_routed_experts(base):
            mlps.append(module)
            return
        for child in module.children():
            visit(child)

    for layer in decoder_layers(model):
        visit(layer)
    return mlps


def _without_adapter(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module computes each token by itself: by its name and its arguments, and
    because it has nothing but linear layers, activation functions, dropout and norms."""
    if not MLP_CLASSES.search(type(module).__name__) or list(module.parameters(recurse=False)):
        return False
    if parameters_of(type(module).forward) not in MLP_PARAMETERS:
        return False
    linears = 0
    for child in map(_without_adapter, module.children()):
        if isinstance(child, nn.Linear | Conv1D):
            linears += 1
        elif list(child.children()) or not (
            type(child).__module__ in ACTIVATIONS or PER_TOKEN_CLASSES.search(type(child).__name__)
        ):
            return False
    return linears > 1


def _are_routed_experts(module: nn.Module) -> bool:
    """Return whether a module is experts that get the choices of each token."""
    # also of the class that a quantized one is derived from
    forwards = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    arguments = map(parameters_of, forwards)
    return is_experts(module) and any(each in ROUTED_PARAMETERS for each in arguments)


def _tiled(
    module: nn.Module,
    plain: Callable[..., torch.Tensor],
    most: int,
    *args: torch.Tensor,
    **kwargs: torch.Tensor,
) -> torch.Tensor:
    """Compute a module's `forward`, whose arguments are tensors [samples, positions, ..] or
    [tokens, ..]."""
    values = [*args, *kwargs.values()]
    shape = values[0].shape[:-1]  # [samples, positions] or [tokens]
    tokens = shape.numel()
    count = -(-tokens // most)
    if count < 2:
        return plain(*args, **kwargs)

    # Not of the tensors: whatever knows them would keep them.
    compute = partial(_call, plain, len(args), tuple(kwargs))
    # [1, tokens, ..] or [tokens, ..]
    flat_shape = (*[1] * (len(shape) - 1), tokens)
    inputs = [value.reshape(*flat_shape, *value.shape[len(shape) :]) for value in values]
    # pieces of one size: each new shape costs a kernel
    pieces = _Pieces(compute, -(-tokens // count), len(shape) - 1, tokens)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    needs_gradients = any(value.requires_grad for value in (*inputs, *trained))
    if torch.is_grad_enabled() and needs_gradients:
        store = _InputStore.apply(torch.empty(0, requires_grad=True), *inputs)
        # Not its grad_fn: torch 2.11 frees what a node has saved with the node's last tensor. In a
        # list, so that autograd does not take it for an input.
        result = _InPieces.apply(pieces, [store], len(inputs), *inputs, *trained)
    else:
        result = pieces.compute_all(inputs)
    return result.reshape(*shape, *result.shape[len(shape) :])


def _call(
    function: Callable[..., torch.Tensor],
    positional: int,
    names: Sequence[str],
    *values: torch.Tensor,
) -> torch.Tensor:
    """Call a function with some positional arguments, and the others by name."""
    return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


@dataclass(frozen=True)
class _Pieces:
    """How a module computes, and how its arguments are divided."""

    compute: Callable[..., torch.Tensor]
    size: int  # tokens per piece
    dim: int  # dimension of the tokens
    tokens: int

    @property
    def count(self) -> int:
        """Number of pieces."""
        return -(-self.tokens // self.size)

    def part(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """Return a piece of a tensor, as a view."""
        start = number * self.size
        return whole.narrow(self.dim, start, min(self.size, self.tokens - start))

    def compute_all(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the module's result for all tokens."""
        whole = torch.empty(0)

        def compute(number: int) -> None:
            nonlocal whole
            result = self.compute(*(self.part(value, number) for value in inputs))
            if number == 0:
                shape = list(result.shape)
                shape[self.dim] = self.tokens
                whole = result.new_empty(shape)
            self.part(whole, number).copy_(result)

        compute_pieces(compute, self.count)
        return whole


class _InputStore(torch.autograd.Function):
    """Keeps tensors for the backward pass of another function, before that one computes."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*values)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise AssertionError("nothing is computed from it")


class _InPieces(torch.autograd.Function):
    """A module's forward pass, of which nothing is kept; and its backward pass, which computes a
    piece again before the gradients of this piece."""

    # `others`: the inputs, and the module's trained parameters. They are arguments although the module
    # has them: autograd gives gradients to arguments.
    @staticmethod
    def forward(
        ctx: Any, pieces: _Pieces, store: list[Any], count: int, *others: torch.Tensor
    ) -> torch.Tensor:
        inputs = others[:count]
        ctx.pieces = pieces
        ctx.store = store
        ctx.trained = others[count:]
        ctx.random = (torch.get_rng_state(), get_device_states(*inputs))
        token = _IN_PIECES.set(True)
        try:
            return pieces.compute_all(inputs)
        finally:
            _IN_PIECES.reset(token)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, *inputs = ctx.store[0].grad_fn.saved_tensors
        ctx.store = None  # the graph outlives this
        needs = ctx.needs_input_grad[3 : 3 + len(inputs)]
        by_input = [
            torch.empty_like(value) if is_needed else None
            for value, is_needed in zip(inputs, needs, strict=True)
        ]
        by_trained: list[torch.Tensor | None] = [None] * len(ctx.trained)
        pieces = ctx.pieces

        def compute(number: int) -> None:
            nonlocal by_trained
            of_result, *piece = [pieces.part(value, number) for value in (gradient, *inputs)]
            gradients = _gradients(pieces.compute, piece, needs, ctx.trained, of_result)
            for whole in by_input:
                if whole is None:
                    continue
                part = pieces.part(whole, number)
                of_input = gradients.pop(0)
                part.zero_() if of_input is None else part.copy_(of_input)
                del of_input
            by_trained = _added(by_trained, gradients)

        cpu_state, (devices, device_states) = ctx.random
        with torch.random.fork_rng(devices=devices, device_type=gradient.device.type):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states)
            compute_pieces(compute, pieces.count)
        # Autograd rounds the sums to the parameters' dtype.
        return None, None, None, *by_input, *by_trained


def _gradients(
    compute: Callable[..., torch.Tensor],
    piece: Sequence[torch.Tensor],
    needs: Sequence[bool],
    trained: Sequence[torch.Tensor],
    of_result: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Compute a piece again. Return the gradients of its arguments that need one, and of `trained`;
    None for what it does not use, such as an expert without tokens."""
    leaves = []
    for value, is_needed in zip(piece, needs, strict=True):
        leaves.append(value.detach().requires_grad_(is_needed))
    with torch.enable_grad():
        result = compute(*leaves)
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(result, [*inputs, *trained], of_result, allow_unused=True))


def _added(
    totals: list[torch.Tensor | None], more: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the sums of gradients, and free those that were added."""
    sums = list[torch.Tensor | None]()
    for total in totals:
        added = more.pop(0)
        if total is not None and added is not None:
            (total,) = add_up([total], [added])
        sums.append(added if total is None else total)
        del added
    return sums
