"""Matmuls of experts on GPUs without a kernel for all experts at once: A100, 3090, 4090, L40S, 5090, and
all of them in fp32 and fp16.

The rows of x are sorted by experts. Those of expert e, a group, end before ends[e]:

    y = x W        for each group       dx = g W^T        dW = x^T g

torch's grouped_mm reads the ends of the groups on the host, which waits for the GPU: in each matmul, 16
times per layer with LoRA. Here a kernel in Triton reads them on the GPU, if the matmul of one group would
leave a part of the GPU idle. Otherwise the host reads them once per layer, and its backward pass and
recomputation use the same ends; groups without rows cost nothing.

Source: aten/src/ATen/native/GroupedMMUtils.h of torch has the GPUs and dtypes of its kernel.
"""

import math
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakTensorKeyDictionary

from llama_ft.models.base.attention_kernels import AMPERE
from llama_ft.models.base.triton_kernels import Comparison, TritonKernels
from llama_ft.operators import LIBRARY
from llama_ft.runtime.target import current_target

# H100 and H200; B200 and B300
MAJORS_WITH_KERNEL = (9, 10)
CUBLAS_TILE = 128  # rows and columns of the output that a multiprocessor computes at once

LIBRARY.define("grouped_matmul(Tensor x, Tensor weight, Tensor ends) -> Tensor")
LIBRARY.define("grouped_weight_gradient(Tensor x, Tensor gradient, Tensor ends) -> Tensor")


def multiplies_by_group(dtype: torch.dtype) -> bool:
    """Return whether groups are multiplied one after another: on a GPU, if torch has no kernel for all of
    them. On a CPU torch does so itself, and waits for nothing."""
    capability = current_target().capability
    if capability is None or torch.compiler.is_compiling():
        return False
    return dtype != torch.bfloat16 or capability[0] not in MAJORS_WITH_KERNEL


def groups_with_rows(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each group that has rows. `ends`: on the host, or the host waits."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


LowRank = tuple[torch.Tensor, torch.Tensor, float]  # see `multiplied`


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, low_rank: LowRank | None = None
) -> torch.Tensor:
    """Compute x W + scaling u R for each group -> [rows, out].

    Args:
        x: [rows, in].
        weight: W, [groups, in, out].
        ends: see `placed`.
        low_rank: u [rows, r], R [groups, r, out], and scaling.
    """
    if ends.is_cuda:
        whole = KERNELS.call("multiply", x, weight, ends, low_rank)
        if whole is not None:
            return cast(torch.Tensor, whole)
    return _multiply_in_turn(x, weight, on_host(ends), low_rank)


def _multiply_in_turn(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, low_rank: LowRank | None = None
) -> torch.Tensor:
    y = x.new_empty(len(x), weight.shape[2])
    for group, rows in groups_with_rows(ends):
        of_group = torch.mm(x[rows], weight[group], out=y[rows])
        if low_rank is not None:
            u, right, scaling = low_rank
            of_group.addmm_(u[rows], right[group], alpha=scaling)
    return y


def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, in] and gradient [rows, out] -> [groups, in, out]. For `ends` see `placed`."""
    if ends.is_cuda:
        whole = KERNELS.call("outer", x, gradient, ends)
        if whole is not None:
            return cast(torch.Tensor, whole)
    return _outer_in_turn(x, gradient, on_host(ends))


def _outer_in_turn(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    groups = list(groups_with_rows(ends))
    make = x.new_empty if len(groups) == len(ends) else x.new_zeros
    result = make(len(ends), x.shape[1], gradient.shape[1])
    for group, rows in groups:
        torch.mm(x[rows].t(), gradient[rows], out=result[group])
    return result


# How the kernels are compared with matmuls in turn: on so many rows, and columns of x^T g, which is
# as large as all weights. Both ways round sums of fp32 to 16 bits, with a low-rank part twice.
COMPARED_ROWS = 256
COMPARED_COLUMNS = 128
TOLERANCE = 0.02


def _few_rows(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, low_rank: LowRank | None = None
) -> tuple[Any, ...]:
    x = x[:COMPARED_ROWS]
    if low_rank is not None:
        u, right, scaling = low_rank
        low_rank = (u[:COMPARED_ROWS], right, scaling)
    return x, weight, _few_ends(ends, len(x)), low_rank


def _few_rows_and_columns(
    x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor
) -> tuple[Any, ...]:
    x = x[:COMPARED_ROWS, :COMPARED_COLUMNS]
    gradient = gradient[:COMPARED_ROWS, :COMPARED_COLUMNS]
    return x, gradient, _few_ends(ends, len(x))


def _few_ends(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ends for fewer rows: some groups have more than a tile, or a part of one, others none."""
    first = [min(end, rows) for end in (70, 70, 200)]
    numbers = (first + first[-1:] * len(ends))[: len(ends) - 1]
    return ends.new_tensor([*numbers, rows])


KERNELS = TritonKernels(
    "llama_ft.models.base.grouped_kernel",
    "experts are multiplied one after another",
    {
        "multiply": Comparison(_multiply_in_turn, _few_rows, TOLERANCE),
        "outer": Comparison(_outer_in_turn, _few_rows_and_columns, TOLERANCE),
    },
)
LIBRARY.impl("grouped_matmul", multiplied, "CompositeExplicitAutograd")
LIBRARY.impl("grouped_weight_gradient", _weight_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("llama_ft::grouped_matmul", lib=LIBRARY)
def _output(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), weight.shape[2])


@torch.library.register_fake("llama_ft::grouped_weight_gradient", lib=LIBRARY)
def _gradient(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(ends), x.shape[1], gradient.shape[1])


@register_flop_formula(torch.ops.llama_ft.grouped_matmul)
def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.llama_ft.grouped_weight_gradient)
def _gradient_flops(x: torch.Size, gradient: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * gradient[1]


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None, ends)
        y: torch.Tensor = torch.ops.llama_ft.grouped_matmul(x, weight, ends)
        # Gradients of weights are made with the layout of the parameter, which may be transposed.
        ctx.is_transposed = weight.stride(1) == 1
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        multiply = torch.ops.llama_ft.grouped_matmul
        multiply_transposed = torch.ops.llama_ft.grouped_weight_gradient
        dx = None if weight is None else multiply(gradient, weight.transpose(1, 2), ends)
        dw = None
        if x is not None and ctx.is_transposed:
            dw = multiply_transposed(gradient, x, ends).transpose(1, 2)
        elif x is not None:
            dw = multiply_transposed(x, gradient, ends)
        return dx, dw, None


def grouped_matmul(x: torch.Tensor, weight: Any, ends: torch.Tensor) -> torch.Tensor:
    """Multiply x [rows, in] by weight [groups, in, out] group by group -> [rows, out].

    Args:
        x: sorted by groups.
        weight: anything that torch.nn.functional.grouped_mm takes.
        ends: int32 [groups], on the device: where the rows of each group end.
    """
    if not isinstance(weight, torch.Tensor):  # it has a product of its own
        return functional.grouped_mm(x, weight, offs=ends)
    return cast(torch.Tensor, _GroupedMatmul.apply(x, weight, placed(ends, x, weight.shape)))


def placed(ends: torch.Tensor, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the ends of groups where their matmuls read them: on the GPU for one kernel, or on the host
    to multiply them one after another. The backward pass takes the same way.

    Args:
        ends: on the device.
        x: [rows, in].
        shape: of the weight, [groups, in, out].
    """
    capability = current_target().capability
    has_kernel = capability is not None and capability >= AMPERE and x.itemsize == 2
    if not has_kernel or not KERNELS.can_run(x):
        return on_host(ends)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return on_host(ends) if one_group_fills(processors, len(x), shape) else ends


def one_group_fills(processors: int, rows: int, shape: torch.Size) -> bool:
    """Return whether the matmul of one group of average size has a tile for each multiprocessor. Then
    matmuls one after another leave none idle, and cuBLAS computes a tile faster than Triton. An A100 has
    108, and the 128 experts of Qwen3-30B-A3B fill it beyond 16,384 tokens."""
    groups, _, columns = shape
    tiles_down = math.ceil(rows / groups / CUBLAS_TILE)
    return tiles_down * math.ceil(columns / CUBLAS_TILE) >= processors


# ends -> the same on the host. An entry ends with its tensor; both matmuls of a layer use it.
_ON_HOST: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def on_host(ends: torch.Tensor) -> torch.Tensor:
    """Return the ends of groups on the host. The first call for a tensor waits for the GPU; a recomputed
    layer reads what its forward pass has read."""
    if ends.device.type == "cpu":
        return ends
    if ends not in _ON_HOST:
        reads = _READS.get()
        _ON_HOST[ends] = ends.to("cpu") if reads is None else reads.read(ends)
    return _ON_HOST[ends]


class _Reads:
    """A checkpointed layer, which is computed again in the backward pass, and reads ends on the host once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._copies: list[torch.Tensor] = []
        self._is_again = False
        self._next = 0

    def __call__(self, *args: Any) -> Any:
        """Compute the layer."""
        self._next = 0
        token = _READS.set(self)
        try:
            return self._function(*args)
        finally:
            _READS.reset(token)
            self._is_again = True

    def read(self, ends: torch.Tensor) -> torch.Tensor:
        """Return `ends` on the host. The layer reads them in the same order again."""
        if self._is_again and self._next < len(self._copies):
            self._next += 1
            return self._copies[self._next - 1]
        copy = ends.to("cpu")
        if not self._is_again:
            self._copies.append(copy)
        return copy


_READS: ContextVar[_Reads | None] = ContextVar("reads of a checkpointed layer", default=None)


def checkpoint_with_reads(
    checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    """Call torch's `checkpoint` of a layer that may have experts. Its recomputation does not wait for the
    GPU again."""
    if torch.compiler.is_compiling():  # there, nothing is read on the host
        return checkpoint(function, *args)
    return checkpoint(_Reads(function), *args)
