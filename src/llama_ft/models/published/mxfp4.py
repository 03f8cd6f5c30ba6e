"""MXFP4 of gpt-oss: stacked experts in FP4, in blocks of 32 columns with an exponent as their scale.

*_blocks uint8 [experts, out, in / 32, 16]      *_scales uint8 [experts, out, in / 32]

value = code * 2^(scale - 127)
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, cast

import torch

from llama_ft.models.base.source import SafetensorsSource, StoredTensor, WeightSource, row_blocks
from llama_ft.models.base.triton_kernels import Comparison, TritonKernels
from llama_ft.models.published.packed_weights import (
    PackedWeight,
    damaged,
    find_tensor,
    fp4_pairs,
    fp4_values,
    read_matrix,
    scale_values,
)
from llama_ft.models.published.weight_format import (
    DEQUANTIZED_AT_ONCE,
    StoredScheme,
    WeightFormat,
    check_finite,
)
from llama_ft.operators import LIBRARY

BLOCK = 32
LIBRARY.define("dequantize_mxfp4(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor")


def _dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [n, in] in bf16 or fp32, which are exact, from codes [n, in / 2] and scales."""
    if KERNELS.can_run(codes):
        dequantized = KERNELS.call("dequantize", codes, scale, dtype)
        if dequantized is not None:
            return cast(torch.Tensor, dequantized)
    return _by_operators(codes, scale, dtype)


def _by_operators(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = codes.new_empty(len(codes), 2 * codes.shape[1], dtype=dtype)
    pairs = _pairs(dtype, codes.device)
    for start, stop in row_blocks(tuple(values.shape), 0, len(values), DEQUANTIZED_AT_ONCE):
        block = values[start:stop]
        numbers = codes[start:stop].int().flatten()
        torch.index_select(pairs, 0, numbers, out=block.view(pairs.dtype).flatten())
        factor = scale_values(scale[start:stop]).to(dtype).unsqueeze(-1)
        block.unflatten(1, (-1, BLOCK)).mul_(factor)
    return values


def _few_rows(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    return codes[:COMPARED_ROWS], scale[:COMPARED_ROWS], dtype


COMPARED_ROWS = 256
# Values are exact, but for those that are too small for a normal number.
KERNELS = TritonKernels(
    "llama_ft.models.published.fp4_kernel",
    "experts in MXFP4 are dequantized more slowly",
    {"dequantize": Comparison(_by_operators, _few_rows, 1e-6)},
)
LIBRARY.impl("dequantize_mxfp4", _dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("llama_ft::dequantize_mxfp4", lib=LIBRARY)
def _values(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(len(codes), 2 * codes.shape[1], dtype=dtype)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the two values of each byte as one number, [256]. To make it, the host waits for the GPU."""
    of_byte = fp4_pairs(device).to(dtype)
    return of_byte.view(torch.int32 if of_byte.itemsize == 2 else torch.int64).flatten()


def workspace_bytes(codes: torch.Tensor, is_cuda: bool) -> int:
    """Return the bytes that the operator allocates and frees: numbers of one block's bytes."""
    most = DEQUANTIZED_AT_ONCE // 2
    return 0 if is_cuda else min(codes.numel(), most) * torch.int32.itemsize


@dataclass(frozen=True)
class Mxfp4Stack(PackedWeight):
    """Experts: two codes per byte, and exponents as scales."""

    is_transposed = True

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = read_matrix(source, self.codes, expert, start, stop)
        scale = read_matrix(source, self.scale, expert, start, stop)
        values = fp4_values(codes)  # [rows, blocks, 32]
        return values.mul_(scale_values(scale).unsqueeze(-1)).flatten(1)


@dataclass(frozen=True)
class StoredMxfp4(StoredScheme):
    """Stacked experts, which are stored transposed: [experts, out, in].

    weight uint8 [experts, out, in / 2]      scale uint8 [experts, out, in / 32]
    """

    name = "MXFP4, as stored"
    is_of_experts = True
    is_transposed = True
    weights_per_byte = 2
    scale_dtype = torch.uint8

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """See `StoredScheme`."""
        return (out_features, in_features // BLOCK)

    def misfit(self, packed: object) -> str | None:
        """See `StoredScheme`."""
        return None if isinstance(packed, Mxfp4Stack) else "is not MXFP4"

    def read(
        self, files: SafetensorsSource, header: StoredTensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredScheme`."""
        packed = cast(Mxfp4Stack, header.packed)
        codes = files.read_rows(packed.codes, start, stop).view(torch.uint8)
        scale = files.read_rows(packed.scale, start, stop)
        check_finite(scale_values(scale).isfinite().all(), packed.scale, header)
        return codes.flatten(-2), scale

    def values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `StoredScheme`."""
        by_block = fp4_values(weight).unflatten(1, (-1, BLOCK))
        return by_block.mul_(scale_values(scale).unsqueeze(-1)).flatten(1)

    def dequantize(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `StoredScheme`."""
        if torch.float16 in (dtype, self.dtype):  # it has too few exponents
            return super().dequantize(weight, scale, dtype)
        return cast(torch.Tensor, torch.ops.llama_ft.dequantize_mxfp4(weight, scale, dtype))


class Mxfp4(WeightFormat):
    """Checkpoints with experts in MXFP4."""

    tensor_suffixes = ("_blocks", "_scales")
    scheme: ClassVar[type[StoredScheme]] = StoredMxfp4

    def describe(self) -> str:
        """See `WeightFormat`."""
        return "experts in MXFP4"

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """See `WeightFormat`."""
        weights = dict[str, PackedWeight]()
        for codes, header in source.tensors.items():
            if not codes.endswith("_blocks"):
                continue
            name = codes.removesuffix("_blocks")
            scale = find_tensor(source, codes, [f"{name}_scales"])
            grid = header.shape[:-1]
            fits = len(header.shape) == 4 and header.shape[-1] == 16
            _check_bytes(source, codes, fits, "[experts, out, in / 32, 16]")
            _check_bytes(source, scale, source.tensors[scale].shape == grid, str(list(grid)))
            experts, rows, blocks, _ = header.shape
            weights[name] = Mxfp4Stack(codes, scale, (experts, blocks * BLOCK, rows))
        return weights


def _check_bytes(source: WeightSource, name: str, fits: bool, expected: str) -> None:
    header = source.tensors[name]
    if not fits or header.dtype != torch.uint8:
        stored = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {stored}; expected bytes {expected}")
