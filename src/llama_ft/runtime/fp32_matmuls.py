"""Matrix products of bf16 matrices by way of fp32, on CPUs where that is faster.

Intel's AVX512-BF16 alone multiplies no faster than fp32; only AMX does, which many virtual machines
hide. On one core of an Emerald Rapids without AMX, oneDNN's bf16 products reach 84 GFLOPS, MKL's
fp32 products 160, and these here 125 to 147. The sums are in fp32 both ways.
"""

import warnings
from functools import cache
from typing import Any

import torch

from llama_ft.runtime.devices import cpu_features, cpu_vendor

# Larger matrices are divided, so that the three fp32 copies take 4 MiB each.
EDGE = 1024
# With fewer rows or columns the conversions take longer than they save.
SMALLEST = 64
_LIBRARIES: list[torch.library.Library] = []  # their functions end with them


@cache
def use_fp32_matmuls() -> bool:
    """Compute torch's bf16 products on the CPU by way of fp32 from now on, if that is faster.
    Return whether it is. Called again, it changes nothing."""
    if not _is_faster():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the kernels are replaced
        library.impl("mm", _mm, "CPU")
        library.impl("addmm", _addmm, "CPU")
    _LIBRARIES.append(library)
    return True


def workspace_bytes(rows: int, inner: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes that a product [rows, inner] by [inner, columns] needs next to its operands
    and before it returns: its output and three fp32 parts. 0 if it is computed as always."""
    if not _is_faster() or dtype != torch.bfloat16 or min(rows, inner, columns) < SMALLEST:
        return 0
    row_part = min(rows, EDGE)
    inner_part = min(inner, EDGE)
    column_part = min(columns, EDGE)
    parts = row_part * inner_part + inner_part * column_part + row_part * column_part
    return 2 * rows * columns + 4 * parts


@cache
def _is_faster() -> bool:
    features = cpu_features()
    is_intel = cpu_vendor() == "GenuineIntel"
    return is_intel and "avx512_bf16" in features and "amx_bf16" not in features


def _gains(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != torch.bfloat16 or right.dtype != torch.bfloat16:
        return False
    return min(*left.shape, right.shape[1]) >= SMALLEST


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    output = left.new_empty(left.shape[0], right.shape[1])
    if _gains(left, right):
        return _multiply(left, right, output)
    return torch.mm(left, right, out=output)


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **factors: Any
) -> torch.Tensor:
    output = left.new_empty(left.shape[0], right.shape[1])
    if factors or not _gains(left, right):  # beta or alpha
        return torch.addmm(bias, left, right, **factors, out=output)
    return _multiply(left, right, output, bias)


def _multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    output: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write left [m, k] times right [k, n], and the bias, which broadcasts, into output [m, n]."""
    if bias is not None:
        bias = bias.expand_as(output)
    rows = range(0, left.shape[0], EDGE)
    columns = range(0, right.shape[1], EDGE)
    for row, column in ((row, column) for row in rows for column in columns):
        left_rows = left[row : row + EDGE]
        right_columns = right[:, column : column + EDGE]
        block = (slice(row, row + EDGE), slice(column, column + EDGE))
        total = torch.zeros(len(left_rows), right_columns.shape[1])
        if bias is not None:
            total += bias[block]
        pairs = zip(left_rows.split(EDGE, dim=1), right_columns.split(EDGE), strict=True)
        for one, other in pairs:
            torch.addmm(total, _in_fp32(one), _in_fp32(other), out=total)
        output[block] = total
    return output


def _in_fp32(part: torch.Tensor) -> torch.Tensor:
    """Convert a part of a matrix. One of a transposed matrix stays transposed, which takes less
    time than to rearrange it."""
    if part.stride(0) == 1:
        return part.t().float().t()
    return part.float()
