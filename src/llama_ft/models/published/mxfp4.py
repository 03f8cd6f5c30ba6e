"""MXFP4 of gpt-oss: stacked experts in FP4, in blocks of 32 columns with an exponent as their scale.

*_blocks uint8 [experts, out, in / 32, 16]      *_scales uint8 [experts, out, in / 32]

value = code * 2^(scale - 127)
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from llama_ft.models.base.source import SafetensorsSource, StoredTensor, WeightSource
from llama_ft.models.published.packed_weights import (
    PackedWeight,
    damaged,
    find_tensor,
    fp4_values,
    read_matrix,
    scale_values,
)
from llama_ft.models.published.weight_format import StoredScheme, WeightFormat, check_finite

BLOCK = 32


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
