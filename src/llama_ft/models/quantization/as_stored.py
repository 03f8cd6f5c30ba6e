"""Keep weights of a published checkpoint as they are stored, under LoRA (`--quantization as_stored`).

Like the quantized weights of quantized.py they are two frozen parameters, sharded by rows together:

    fp8      weight uint8 [out, in]                 scale [out, ceil(in / block)]
    mxfp4    weight uint8 [experts, out, in / 2]    scale uint8 [experts, out, in / 32]

A block of FP8 has 128 rows. Here each row has its own copy of the scales (fp32, stored as int32), so
ranks can hold any rows. The codes of FP8 are bytes because fully_shard would cast floating-point
parameters. While a weight is used, it is dequantized to the values that published.py reads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import torch
from torch.nn import functional

from llama_ft.errors import UserError
from llama_ft.models.base.source import SafetensorsSource, StoredTensor, row_blocks
from llama_ft.models.published.packed_weights import (
    Mxfp4Stack,
    ScaledWeight,
    damaged,
    fp4_values,
    row_scales,
    scale_values,
)

MXFP4_BLOCK = 32
NOT_A_NUMBER = 0x7F  # of float8_e4m3fn, without the sign
DEQUANTIZED_AT_ONCE = 2**24  # weights: the temporaries in fp32 take 64 MiB each
METHODS = ("fp8", "mxfp4")


@dataclass(frozen=True)
class _Stored:
    """What the two schemes have in common with each other, and with those of quantized.py."""

    dtype: torch.dtype  # to which weights are dequantized, as config.json says
    block_size = 1  # any width of a layer is supported
    weight_dtype = torch.uint8

    def dequantize(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows [n, in] in `dtype` from weight and scale."""
        columns = weight.shape[1] * self.weights_per_byte
        rows = torch.empty(len(weight), columns, dtype=dtype, device=weight.device)
        for start, stop in row_blocks(tuple(rows.shape), 0, len(rows), DEQUANTIZED_AT_ONCE):
            values = self._values(weight[start:stop], scale[start:stop])
            rows[start:stop] = values.to(self.dtype)
        return rows

    def matmul(
        self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] in the inputs' dtype."""
        return functional.linear(inputs, self.dequantize(weight, scale, inputs.dtype))

    @property
    def weights_per_byte(self) -> int:
        """The number of weights in a byte of codes."""
        raise NotImplementedError

    def _values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return rows in fp32."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoredFp8(_Stored):
    """FP8 of linear layers: a scale per `columns` of a row, or per row."""

    columns: int | None
    name = "FP8, as stored"
    scale_dtype = torch.int32
    is_transposed = False
    weights_per_byte = 1

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, in]."""
        return (out_features, ceil(in_features / self._columns(in_features)))

    def _columns(self, in_features: int) -> int:
        return min(self.columns or in_features, in_features)

    def _values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = weight.view(torch.float8_e4m3fn).float()
        factor = scale.view(torch.float32)
        in_features = values.shape[1]
        columns = self._columns(in_features)
        if in_features % columns == 0:
            by_block = values.unflatten(1, (-1, columns))
            return by_block.mul_(factor.unsqueeze(-1)).flatten(1)
        return values.mul_(factor.repeat_interleave(columns, dim=1)[:, :in_features])


@dataclass(frozen=True)
class StoredMxfp4(_Stored):
    """MXFP4 of stacked experts, which are stored transposed: [experts, out, in]."""

    name = "MXFP4, as stored"
    scale_dtype = torch.uint8
    is_transposed = True
    weights_per_byte = 2

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, in]."""
        return (out_features, in_features // MXFP4_BLOCK)

    def _values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        by_block = fp4_values(weight).unflatten(1, (-1, MXFP4_BLOCK))
        return by_block.mul_(scale_values(scale).unsqueeze(-1)).flatten(1)


STORED = (StoredFp8, StoredMxfp4)


def stored_scheme(note: Mapping[str, Any] | None, dtype: torch.dtype) -> StoredFp8 | StoredMxfp4:
    """Return how a published checkpoint is kept as stored. Raises UserError if it cannot be.

    Args:
        note: config.json's quantization_config.
        dtype: of dequantized weights.
    """
    method = None if note is None else note.get("quant_method")
    if note is None or method not in METHODS:
        found = "the checkpoint is not quantized" if note is None else f"the checkpoint is {method}"
        raise UserError(
            f"--quantization as_stored: {found}; expected fp8 or mxfp4. Leave it out, or use "
            f"--quantization 4bit."
        )
    if method == "mxfp4":
        return StoredMxfp4(dtype)
    block = note.get("weight_block_size")
    return StoredFp8(dtype, None if block is None else block[1])


def names_not_converted(note: Mapping[str, Any]) -> list[str]:
    """Return the modules that a checkpoint has in 16 bits: names, ends of names or patterns. Raises
    UserError if config.json has something else in their place."""
    names = note.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(_is_pattern(name) for name in names):
        shown = str(names)[:100]
        raise UserError(
            f"config.json: quantization_config.modules_to_not_convert is {shown}; expected a list of names.\n"
            f"Download config.json again, or leave out --quantization as_stored."
        )
    return names


def _is_pattern(name: Any) -> bool:
    try:
        re.compile(name)
    except (TypeError, re.error):
        return False
    return isinstance(name, str)


def misfit(scheme: StoredFp8 | StoredMxfp4, header: StoredTensor) -> str | None:
    """Return why a weight of the checkpoint cannot be kept as stored, or None."""
    packed = header.packed
    if packed is None:
        # A plan from config.json alone knows no more.
        return None if header.is_dequantized else f"is {header.dtype} and not quantized"
    if isinstance(scheme, StoredMxfp4):
        return None if isinstance(packed, Mxfp4Stack) else "is not MXFP4"
    if not isinstance(packed, ScaledWeight) or packed.code_dtype != torch.float8_e4m3fn:
        return "is not FP8 (e4m3)"
    return None


def read_stored(
    files: SafetensorsSource,
    scheme: StoredFp8 | StoredMxfp4,
    header: StoredTensor,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read rows [start, stop) of a weight, or experts of a stack. Return its codes and scales as the
    parameters hold them. Raises UserError for values that are not finite.

    Args:
        files: the checkpoint's.
        scheme: how it is stored.
        header: which tensors it consists of.
        start, stop: the rows.
    """
    packed = cast(ScaledWeight | Mxfp4Stack, header.packed)
    codes = files.read_rows(packed.codes, start, stop).view(torch.uint8)
    if isinstance(packed, Mxfp4Stack):
        scale = files.read_rows(packed.scale, start, stop)
        _check_finite(scale_values(scale).isfinite().all(), packed.scale, header)
        return codes.flatten(-2), scale
    factor = row_scales(files, packed, start, stop)
    _check_finite(factor.isfinite().all(), packed.scale, header)
    _check_finite((codes & NOT_A_NUMBER != NOT_A_NUMBER).all(), packed.codes, header)
    return codes, factor.contiguous().view(torch.int32)


def _check_finite(is_finite: torch.Tensor, name: str, header: StoredTensor) -> None:
    if not is_finite:
        raise damaged(header.file, f"{name} has values that are not finite (NaN or infinite)")
