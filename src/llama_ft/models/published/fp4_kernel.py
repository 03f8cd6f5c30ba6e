"""MXFP4 on a GPU, dequantized in one pass: 0.53 bytes are read per weight, and 2 written (bf16). In torch's
operators it is 10.6.

The kernel is written in Triton, which torch for CUDA brings along. Only a run on a GPU imports this
file.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCKS_PER_PROGRAM = 64


@triton.jit
def value_of(code):  # type: ignore[no-untyped-def]
    """E2M1 in fp32: a sign, 2 bits of the exponent and 1 of the mantissa. 1 is 0.5, without a leading 1."""
    size = code & 7
    normal = ((size >> 1) + 126 << 23) | ((size & 1) << 22)
    bits = tl.where(size < 2, size * (126 << 23), normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dequantize_kernel(codes, scale, values, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program has BLOCKS blocks of 32 weights: 16 bytes of codes, the low half first, and an exponent."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < blocks
    places = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    pairs = tl.load(codes + places, mask=is_block[:, None], other=0).to(tl.int32)
    exponent = tl.load(scale + block, mask=is_block, other=127).to(tl.int32)
    # 2^(exponent - 127); of 0 without a leading 1
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    factor = bits.to(tl.float32, bitcast=True)[:, None]
    both = tl.join(value_of(pairs & 15) * factor, value_of(pairs >> 4) * factor)
    weights = tl.reshape(both, [BLOCKS, 32]).to(values.dtype.element_ty)
    places = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(values + places, weights, mask=is_block[:, None])


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [rows, in] of codes [rows, in / 2] with scales [rows, in / 32]."""
    codes = codes.contiguous()
    scale = scale.contiguous()
    values = codes.new_empty(len(codes), 2 * codes.shape[1], dtype=dtype)
    blocks = scale.numel()
    programs = triton.cdiv(blocks, BLOCKS_PER_PROGRAM)
    kernel: Any = dequantize_kernel
    kernel[(programs,)](codes, scale, values, blocks, BLOCKS=BLOCKS_PER_PROGRAM)
    return values
