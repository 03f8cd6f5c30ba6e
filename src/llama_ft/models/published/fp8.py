"""FP8, and the experts of DeepSeek V4 in FP4: a scale per block, per row or per tensor.

weight float8 [out, in]     weight_scale_inv [ceil(out / 128), ceil(in / 128)]

value = code * scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, cast

import torch

from llama_ft.models.base.source import SafetensorsSource, StoredTensor, WeightSource
from llama_ft.models.published.packed_weights import (
    FP8,
    PackedWeight,
    ScaledWeight,
    find_tensor,
    fitting_block,
    matrix_shape,
)
from llama_ft.models.published.quantization_config import is_block, wrong_setting
from llama_ft.models.published.weight_format import StoredScheme, WeightFormat, check_finite

# Suffixes of the scale's name, which replace that of the weight.
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
FP4_BLOCK = (1, 32)  # of DeepSeek V4's experts
NOT_A_NUMBER = 0x7F  # of float8_e4m3fn, without the sign


@dataclass(frozen=True)
class StoredFp8(StoredScheme):
    """FP8 of linear layers: a scale per `columns` of a row, or per row.

        weight uint8 [out, in]      scale [out, ceil(in / block)]

    A block has 128 rows. Here each row has its own copy of the scales (fp32, stored as int32), so
    ranks can hold any rows.
    """

    columns: int | None
    name = "FP8, as stored"
    is_of_experts = False
    is_transposed = False
    weights_per_byte = 1
    scale_dtype = torch.int32

    @classmethod
    def of(cls, quantization_config: Mapping[str, Any], dtype: torch.dtype) -> "StoredFp8":
        """See `StoredScheme`."""
        block = quantization_config.get("weight_block_size")
        return cls(dtype, None if block is None else block[1])

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """See `StoredScheme`."""
        return (out_features, ceil(in_features / self._columns(in_features)))

    def misfit(self, packed: object) -> str | None:
        """See `StoredScheme`."""
        if not isinstance(packed, ScaledWeight) or packed.code_dtype != torch.float8_e4m3fn:
            return "is not FP8 (e4m3)"
        return None

    def read(
        self, files: SafetensorsSource, header: StoredTensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredScheme`."""
        packed = cast(ScaledWeight, header.packed)
        codes = files.read_rows(packed.codes, start, stop).view(torch.uint8)
        scale = packed.row_scales(files, start, stop)
        check_finite(scale.isfinite().all(), packed.scale, header)
        check_finite((codes & NOT_A_NUMBER != NOT_A_NUMBER).all(), packed.codes, header)
        return codes, scale.contiguous().view(torch.int32)

    def values(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """See `StoredScheme`."""
        values = weight.view(torch.float8_e4m3fn).float()
        factor = scale.view(torch.float32)
        in_features = values.shape[1]
        columns = self._columns(in_features)
        if in_features % columns == 0:
            by_block = values.unflatten(1, (-1, columns))
            return by_block.mul_(factor.unsqueeze(-1)).flatten(1)
        return values.mul_(factor.repeat_interleave(columns, dim=1)[:, :in_features])

    def _columns(self, in_features: int) -> int:
        return min(self.columns or in_features, in_features)


class Fp8(WeightFormat):
    """FP8 checkpoints, with the FP4 experts of DeepSeek V4."""

    tensor_suffixes = ("_scale_inv", "_scale")
    scheme: ClassVar[type[StoredScheme]] = StoredFp8

    def check(self) -> None:
        """See `WeightFormat`."""
        block = self.quantization_config.get("weight_block_size")
        if block is not None and not is_block(block):
            raise wrong_setting("weight_block_size", block, "two whole numbers above 0, or null")

    def describe(self) -> str:
        """See `WeightFormat`."""
        block = self.quantization_config.get("weight_block_size")
        if block is None:
            return "FP8 with a scale per tensor"
        return f"FP8 in blocks of {block[0]} x {block[1]}"

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """See `WeightFormat`."""
        weights = dict[str, PackedWeight]()
        stored_block = self.quantization_config.get("weight_block_size")
        for name, header in source.tensors.items():
            is_fp4 = header.dtype == torch.int8
            if header.dtype not in FP8 and not is_fp4:
                continue
            scale = _find_scale(source, name)
            *stack, rows, columns = matrix_shape(name, header)
            if is_fp4:
                columns *= 2
                blocks = [FP4_BLOCK]
            elif stored_block is None:
                blocks = [(rows, columns), (1, columns)]
            else:
                blocks = [(stored_block[0], stored_block[1])]
            shape = (*stack, rows, columns)
            block = fitting_block(source, name, scale, shape, blocks)
            weights[name] = ScaledWeight(name, scale, shape, block, is_fp4, code_dtype=header.dtype)
        return weights


def _find_scale(source: WeightSource, name: str) -> str:
    """Return the name of a weight's scale. Stacked experts have no ".weight" in their names."""
    prefix, _, last = name.rpartition(".")
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if last == "weight":
        names = [f"{prefix}.{suffix}" for suffix in SCALES]
    return find_tensor(source, name, names)
