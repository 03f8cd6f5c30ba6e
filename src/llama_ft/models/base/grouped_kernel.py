"""Matmuls of all experts in one kernel, without a wait for the GPU. Written in Triton, which torch for CUDA
brings along; only a run on a GPU imports this file.

The programs read on the GPU where the rows of each expert end. Each computes a tile of the output:

    multiply    y [rows, out] = x W + scaling u R       tiles of one expert's rows
    outer       d [groups, in, out] = x^T g             tiles of one expert's matrix
"""

from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 64  # of a tile
COLUMNS = 128
TERMS = 32  # that are summed at once
OUTER_ROWS = 64  # of a tile of x^T g
SMALLEST = 16  # the tensor cores' smallest tile


# torch imports Triton itself, so that its own functions, such as tl.sum, are compiled ones in a test
# that interprets these here.
@triton.jit
def add(first, second):  # type: ignore[no-untyped-def]
    """The sum, for reductions."""
    return first + second


@triton.jit
def multiply_kernel(  # type: ignore[no-untyped-def]
    x, weight, u, right, y, ends, scaling, columns, terms,
    x_row, x_term, w_group, w_term, w_column, u_row, u_rank, r_group, r_rank, r_column,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y is contiguous. The other tensors have strides, as *_row and so on; RANK is 0 without u and right."""
    # which group this tile is of: groups have as many tiles as their rows need
    number = tl.arange(0, PADDED_GROUPS)
    is_group = number < GROUPS
    end = tl.load(ends + number, mask=is_group, other=0)
    start = tl.load(ends + number - 1, mask=is_group & (number > 0), other=0)
    tiles = tl.where(is_group, (end - start + ROWS - 1) // ROWS, 0)
    tiles_until = tl.associative_scan(tiles, 0, add)
    tile = tl.program_id(0)
    group = tl.reduce((is_group & (tiles_until <= tile)).to(tl.int32), 0, add)
    if group < GROUPS:
        own = number == group
        tile -= tl.reduce(tl.where(own, tiles_until - tiles, 0), 0, add)
        first = tl.reduce(tl.where(own, start, 0), 0, add) + tile * ROWS
        last = tl.reduce(tl.where(own, end, 0), 0, add)
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < last
        is_column = column < columns
        term = tl.arange(0, TERMS)
        x_tile = x + row[:, None] * x_row + term[None, :] * x_term
        w_tile = (
            weight
            + group.to(tl.int64) * w_group
            + term[:, None] * w_term
            + column[None, :] * w_column
        )
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for done in range(0, terms, TERMS):
            is_term = term < terms - done
            left = tl.load(x_tile, mask=is_row[:, None] & is_term[None, :], other=0.0)
            own_weight = tl.load(w_tile, mask=is_term[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(left, own_weight, total, input_precision=PRECISION)
            x_tile += TERMS * x_term
            w_tile += TERMS * w_term
        if RANK > 0:
            rank = tl.arange(0, PADDED_RANK)
            is_rank = rank < RANK
            low = tl.load(
                u + row[:, None] * u_row + rank[None, :] * u_rank,
                mask=is_row[:, None] & is_rank[None, :],
                other=0.0,
            )
            factor = tl.load(
                right
                + group.to(tl.int64) * r_group
                + rank[:, None] * r_rank
                + column[None, :] * r_column,
                mask=is_rank[:, None] & is_column[None, :],
                other=0.0,
            )
            total += tl.dot(low, factor, input_precision=PRECISION) * scaling
        places = row[:, None] * columns + column[None, :]
        tl.store(
            y + places, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :]
        )


@triton.jit
def outer_kernel(  # type: ignore[no-untyped-def]
    x, gradient, result, ends, height, width, x_row, x_column, g_row, g_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """result [groups, height, width] is contiguous. Groups without rows get zeros."""
    group = tl.program_id(0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    down = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    across = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_down = down < height
    is_across = across < width
    total = tl.full((HEIGHT, WIDTH), 0.0, tl.float32)
    for first in range(start, end, TERMS):
        row = (first + tl.arange(0, TERMS)).to(tl.int64)
        is_row = row < end
        left = tl.load(
            x + row[None, :] * x_row + down[:, None] * x_column,
            mask=is_row[None, :] & is_down[:, None],
            other=0.0,
        )
        right = tl.load(
            gradient + row[:, None] * g_row + across[None, :] * g_column,
            mask=is_row[:, None] & is_across[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    places = group.to(tl.int64) * height * width + down[:, None] * width + across[None, :]
    tl.store(
        result + places,
        total.to(result.dtype.element_ty),
        mask=is_down[:, None] & is_across[None, :],
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    low_rank: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Compute x W + scaling u R for the rows of each group.

    Args:
        x: [rows, in], sorted by groups.
        weight: W, [groups, in, out].
        ends: int32 [groups], on the GPU.
        low_rank: u [rows, r], R [groups, r, out], and scaling.
    """
    groups, terms, columns = weight.shape
    y = x.new_empty(len(x), columns)
    u, right, scaling = low_rank or (x, weight, 0.0)
    rank = u.shape[1] if low_rank else 0
    # each group may have a tile that is not full
    grid = (triton.cdiv(len(x), ROWS) + groups, triton.cdiv(columns, COLUMNS))
    kernel: Any = multiply_kernel
    kernel[grid](
        *(x, weight, u, right, y, ends, scaling, columns, terms),
        *(*x.stride(), *weight.stride(), *u.stride(), *right.stride()),
        RANK=rank,
        PADDED_RANK=padded(rank),
        GROUPS=groups,
        PADDED_GROUPS=triton.next_power_of_2(groups),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TERMS=TERMS,
        PRECISION=precision(x),
    )
    return y


def outer(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute x^T g for each group: x [rows, in] and g [rows, out] -> [groups, in, out]."""
    height = x.shape[1]
    width = gradient.shape[1]
    result = x.new_empty(len(ends), height, width)
    tile_height = min(OUTER_ROWS, padded(height))
    tile_width = min(COLUMNS, padded(width))
    grid = (len(ends), triton.cdiv(height, tile_height), triton.cdiv(width, tile_width))
    kernel: Any = outer_kernel
    kernel[grid](
        *(x, gradient, result, ends, height, width, *x.stride(), *gradient.stride()),
        HEIGHT=tile_height,
        WIDTH=tile_width,
        TERMS=TERMS,
        PRECISION=precision(x),
    )
    return result


def padded(size: int) -> int:
    """Return the size of a tile that has `size` rows or columns."""
    return max(SMALLEST, triton.next_power_of_2(size))


def precision(x: torch.Tensor) -> str:
    """Return how fp32 is multiplied: not rounded to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
