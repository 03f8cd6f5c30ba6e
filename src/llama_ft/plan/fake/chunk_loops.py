"""Loops over the chunks of a sequence, such as the gated delta rule of Qwen3.5, in a plan.

On fake tensors an operator takes the same time whatever its size, so a loop over 32 chunks in each of
24 layers takes minutes. Its memory grows by the same amount with each chunk. So a plan runs the loop
on two short sequences, once, and then counts what it would take, without the loop.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

# Functions of Transformers' modules: query, key, value, g, beta -> output, state.
LOOPS = ("torch_chunk_gated_delta_rule",)
CHUNKS = (8, 12)  # of the two short sequences; calls with fewer run the loop
INPUTS = ("query", "key", "value", "g", "beta")


class LoopMeter(Protocol):
    """Counts memory, as plan.fake.tracker.MemoryTracker."""

    def count_workspace(self, nbytes: int, is_kept: bool = False) -> None: ...
    def count_moved(self, nbytes: int) -> None: ...
    def measure(self, call: "LoopCall") -> "LoopMemory": ...


@dataclass(frozen=True)
class LoopMemory:
    """Bytes of a call in addition to its inputs.

    Attributes:
        forward: the peak of the forward pass, with what is kept and returned.
        graph: what autograd keeps.
        backward: the peak of the backward pass, in addition to what is kept and the gradient of the
            output.
        moved_forward: what the operators of the forward pass read and write.
        moved_backward: the same of the backward pass. Without the gradients of the whole sequence that torch
            writes for each chunk: a GPU's kernel does not.
    """

    forward: int
    graph: int = 0
    backward: int = 0
    moved_forward: int = 0
    moved_backward: int = 0

    def further(self, other: "LoopMemory", share: float) -> "LoopMemory":
        """Return the use on the line through two uses: this one at 0, the other one at 1."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LoopMemory(*(round(first + (second - first) * share) for first, second in pairs))


@dataclass(frozen=True)
class LoopCall:
    """A call of a loop: its function, and what its memory depends on."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # of the inputs: [samples, tokens, ...]
    dtypes: tuple[torch.dtype, ...]
    has_gradients: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    keeps: bool  # for the backward pass

    def of_tokens(self, tokens: int) -> "LoopCall":
        """Return the call for another number of tokens."""
        shapes = tuple((samples, tokens, *rest) for samples, _, *rest in self.shapes)
        return LoopCall(
            self.function, shapes, self.dtypes, self.has_gradients, self.options, self.keeps
        )

    def inputs(self) -> list[torch.Tensor]:
        """Return empty inputs."""
        return [
            torch.empty(shape, dtype=dtype, requires_grad=has_gradient and self.keeps)
            for shape, dtype, has_gradient in zip(
                self.shapes, self.dtypes, self.has_gradients, strict=True
            )
        ]


class ShortLoop:
    """Stands for a loop in a plan.

    Args:
        function: the loop.
        meter: counts its memory.
    """

    def __init__(self, function: Callable[..., Any], meter: LoopMeter) -> None:
        self._function = function
        self._meter = meter
        self._signature = inspect.signature(function)
        self._known = dict[LoopCall, LoopMemory]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the memory of the loop and return its output without values."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        options |= options.pop("kwargs", {})
        inputs = [options.pop(name) for name in INPUTS]
        tokens = inputs[0].shape[1]
        chunks = -(-tokens // options["chunk_size"])
        is_plain = options["initial_state"] is None and not options["output_final_state"]
        if chunks <= max(CHUNKS) or not is_plain:
            return self._function(*args, **kwargs)
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        keeps = is_trained and _is_kept(inputs)
        forward = self._use(inputs, options, chunks, keeps)
        again = self._use(inputs, options, chunks, True) if is_trained and not keeps else forward
        return _CountedLoop.apply(self._meter, forward, again, keeps, *inputs), None

    def _use(
        self, inputs: list[torch.Tensor], options: dict[str, Any], chunks: int, keeps: bool
    ) -> LoopMemory:
        call = LoopCall(
            self._function,
            tuple(tuple(tensor.shape) for tensor in inputs),
            tuple(tensor.dtype for tensor in inputs),
            tuple(tensor.requires_grad for tensor in inputs),
            tuple(options.items()),
            keeps,
        )
        use = self._known.get(call)
        if use is None:
            size = options["chunk_size"]
            few, more = (self._meter.measure(call.of_tokens(count * size)) for count in CHUNKS)
            use = few.further(more, (chunks - CHUNKS[0]) / (CHUNKS[1] - CHUNKS[0]))
            self._known[call] = use
        return use


def _is_kept(inputs: list[torch.Tensor]) -> bool:
    """Return whether autograd keeps tensors here. In the first forward pass of activation
    checkpointing it does not."""
    factor = torch.empty((), dtype=inputs[0].dtype)
    trained = next(tensor for tensor in inputs if tensor.requires_grad)
    storage = weakref.ref(factor.untyped_storage())
    product = trained.reshape(-1)[:1] * factor
    del factor
    is_kept = storage() is not None
    del product
    return is_kept


class _CountedLoop(torch.autograd.Function):
    """The memory of a loop, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        meter: LoopMeter,
        use: LoopMemory,
        trained_use: LoopMemory,
        keeps: bool,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        query, _, value, *_ = inputs
        output = torch.empty_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)
        # Autograd drops a tensor that it does not keep. It must have the shape of the one that it
        # keeps when the pass is repeated, but needs no memory.
        if keeps:
            graph = torch.empty(use.graph, dtype=torch.uint8)
        else:
            graph = torch.empty(1, dtype=torch.uint8).expand(trained_use.graph)
        ctx.save_for_backward(graph)
        held = output.nbytes + (use.graph if keeps else 0)
        meter.count_workspace(max(0, use.forward - held))
        meter.count_moved(use.moved_forward)
        ctx.meter = meter
        ctx.backward_bytes = trained_use.backward
        ctx.moved_bytes = trained_use.moved_backward
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _ = ctx.saved_tensors  # activation checkpointing repeats the forward pass here
        ctx.meter.count_workspace(ctx.backward_bytes)
        ctx.meter.count_moved(ctx.moved_bytes)
        needed = ctx.needs_input_grad[4:]
        gradients = [
            torch.empty(shape, dtype=dtype) if is_needed else None
            for (shape, dtype), is_needed in zip(ctx.inputs, needed, strict=True)
        ]
        return (None, None, None, None, *gradients)


def loops_of(model: nn.Module) -> Iterator[tuple[ModuleType, str]]:
    """Yield the loops that the layers of a model call, each as its module and its name."""
    names = {type(module).__module__ for module in model.modules()}
    for name in sorted(names):
        for loop in LOOPS:
            if hasattr(sys.modules[name], loop):
                yield sys.modules[name], loop
