"""Frozen 16-bit products in fp32, on CPUs where runtime.cpu_kernels computes them so anyway.

Those kernels widen the operands of each product and round its result. Where a layer makes several products of one
input, or dequantizes its weight first, widening once and rounding at the end saves those passes.
"""

from collections.abc import Iterator

import torch

from llama_ft.planning import planned_device
from llama_ft.runtime import cpu_kernels

MOST_WEIGHTS = 2**24  # of a weight held in fp32 as a whole, 64 MiB; the kernels take larger ones a block at a time
BLOCK = 2**22  # elements of a block of rows in fp32, 16 MiB


def is_wide(inputs: torch.Tensor, weights: int) -> bool:
    """Whether a product of `inputs` with a frozen weight of so many elements is to be computed in fp32."""
    return (
        not inputs.is_cuda
        and inputs.dtype in cpu_kernels.NARROW
        and weights <= MOST_WEIGHTS
        and cpu_kernels.is_installed()
        and planned_device() != "cuda"
    )


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Rows to compute at a time, where up to `width` elements of each are in fp32."""
    step = max(1, BLOCK // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def wide_product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inputs [..., k] in 16 bits x weight [k, n] in fp32 -> [..., n] of the inputs' dtype."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    output = flat.new_empty(len(flat), weight.shape[1])
    for rows in row_blocks(len(flat), max(weight.shape)):
        output[rows] = flat[rows].float() @ weight
    return output.view(*inputs.shape[:-1], weight.shape[1])
