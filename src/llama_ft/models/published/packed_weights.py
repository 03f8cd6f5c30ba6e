"""Quantized weights of published checkpoints: which tensors they consist of, and the values of their
rows in fp32. published.py finds them and has the layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Protocol

import torch

from llama_ft.errors import UserError
from llama_ft.models.base.source import SafetensorsSource, WeightSource

# of E2M1, whose fourth bit is the sign
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DOWNLOAD_AGAIN = "Download it again, or use a version in 16 bits."


class PackedWeight(Protocol):
    """A quantized matrix [out, in], or a stack of them [experts, out, in]."""

    @property
    def codes(self) -> str:
        """The name of the tensor with the numbers of few bits."""

    @property
    def scale(self) -> str:
        """The name of the tensor with their scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before quantization."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all its tensors."""

    @property
    def is_transposed(self) -> bool:
        """Whether `shape` is that of the transposed matrices: [experts, in, out]."""

    def read(
        self, source: SafetensorsSource, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        """Return rows [start, stop) of a matrix in fp32."""


@dataclass(frozen=True)
class ScaledWeight:
    """Codes of 8 or 4 bits, and a scale per block of rows and columns."""

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]  # rows and columns with the same scale
    is_fp4: bool = False  # two codes per byte
    global_scale: str | None = None  # of the scale of NVFP4's scales
    divides: bool = True  # the scales are divided by it, not multiplied
    is_transposed: bool = False
    code_dtype: torch.dtype | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.global_scale)
        return tuple(name for name in names if name is not None)

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = _read_matrix(source, self.codes, expert, start, stop)
        values = fp4_values(codes) if self.is_fp4 else codes.float()
        scale = _read_grid(source, self, self.scale, expert, start, stop)
        if self.global_scale is not None:
            factor = source.read(self.global_scale).float()
            scale = scale / factor if self.divides else scale * factor
        return values.mul_(scale)


@dataclass(frozen=True)
class CompressedWeight:
    """A matrix of compressed-tensors: FP8 or INT8, or integers of 4 or 8 bits packed in int32."""

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]  # rows and columns with the same scale and zero point
    bits: int | None = None  # of packed integers
    zero_point: str | None = None
    shape_name: str | None = None  # of the tensor that holds the shape of packed integers
    is_transposed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.zero_point, self.shape_name)
        return tuple(name for name in names if name is not None)

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = source.read_rows(self.codes, start, stop)
        columns = self.shape[-1]
        values = codes.float() if self.bits is None else unpacked(codes, self.bits)[:, :columns]
        if self.zero_point is not None:
            values = values - self._zero_points(source, self.zero_point, start, stop)
        return values * _read_grid(source, self, self.scale, None, start, stop)

    def _zero_points(self, source: WeightSource, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the zero points of rows [start, stop) for each column. Those of packed integers
        are packed along the rows."""
        if self.bits is None or source.tensors[name].dtype != torch.int32:
            return _read_grid(source, self, name, None, start, stop)
        per_word = 32 // self.bits
        first = start // per_word
        words = source.read_rows(name, first, ceil(stop / per_word))
        by_row = unpacked(words.T, self.bits).T
        offset = first * per_word
        stored = by_row[start - offset : stop - offset]
        column = torch.arange(self.shape[-1]) // self.block[1]
        return stored[:, column]


def find_part(source: WeightSource, codes: str, names: Sequence[str]) -> str:
    """Return the first of the possible names of a part of a weight that the files have. Raises
    UserError if they have none."""
    for name in names:
        if name in source.tensors:
            return name
    header = source.tensors[codes]
    problem = f"{codes} is quantized ({header.dtype}), and {names[0]} is missing"
    raise damaged(header.file, problem)


def damaged(file: Path, problem: str) -> UserError:
    """Return the error for a file whose tensors do not fit each other."""
    return UserError(f"{file}: {problem}.\n{DOWNLOAD_AGAIN}")


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers of 4 or 8 bits, packed into the words of a matrix's rows from the lowest bit
    on, as fp32. They are stored with half of their range added."""
    return unpacked_codes(words, bits).float() - 2 ** (bits - 1)


def unpacked_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers of 4 or 8 bits, packed into the words of a matrix's rows, as uint8."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes


def _read_grid(
    source: WeightSource,
    weight: ScaledWeight | CompressedWeight,
    name: str,
    expert: int | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Return the scale (or zero point) of every weight in rows [start, stop) of a matrix."""
    by_row = _read_rows_of_grid(source, weight, name, expert, start, stop)
    column = torch.arange(weight.shape[-1]) // weight.block[1]
    return by_row[:, column]


def row_scales(source: WeightSource, weight: ScaledWeight, start: int, stop: int) -> torch.Tensor:
    """Return the fp32 scales of rows [start, stop) of a matrix, [rows, blocks of columns]."""
    return _read_rows_of_grid(source, weight, weight.scale, None, start, stop)


def _read_rows_of_grid(
    source: WeightSource,
    weight: ScaledWeight | CompressedWeight,
    name: str,
    expert: int | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    block_rows = weight.block[0]
    first = start // block_rows
    last = ceil(stop / block_rows)
    if source.tensors[name].shape:
        stored = _read_matrix(source, name, expert, first, last)
    else:
        stored = source.read(name)
    scale = scale_values(stored).reshape(last - first, -1)
    row = torch.arange(start, stop) // block_rows - first
    return scale[row]


@dataclass(frozen=True)
class Mxfp4Stack:
    """Experts in FP4, in blocks of 32 columns: two codes per byte, and exponents as scales."""

    codes: str
    scale: str
    shape: tuple[int, ...]
    is_transposed: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        return self.codes, self.scale

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = _read_matrix(source, self.codes, expert, start, stop)
        scale = _read_matrix(source, self.scale, expert, start, stop)
        values = fp4_values(codes)  # [rows, blocks, 32]
        return values.mul_(scale_values(scale).unsqueeze(-1)).flatten(1)


def _read_matrix(
    source: WeightSource, name: str, expert: int | None, start: int, stop: int
) -> torch.Tensor:
    if expert is None:
        return source.read_rows(name, start, stop)
    return source.read_rows(name, expert, expert + 1)[0, start:stop]


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of two E2M1 codes per byte, the low half first: the last dimension
    doubles."""
    values = torch.tensor(FP4_VALUES, device=packed.device)
    of_code = torch.cat([values, -values])
    low = of_code.repeat(16)
    high = of_code.repeat_interleave(16)
    of_byte = torch.stack([low, high], dim=-1)  # [256, 2]
    codes = packed.contiguous().view(torch.uint8)
    return of_byte[codes.int()].flatten(-2)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32. Bytes are exponents of 2 with a bias of 127 (UE8M0)."""
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return scale.float()
