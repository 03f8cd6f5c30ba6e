"""Quantized weights of published checkpoints: which tensors they consist of, and the values of their
rows in fp32. Formats share these kinds of weights and checks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import ClassVar

import torch

from llama_ft.errors import UserError
from llama_ft.models.base.source import SafetensorsSource, StoredTensor, WeightSource

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# of E2M1, whose fourth bit is the sign
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DOWNLOAD_AGAIN = "Download it again, or use a version in 16 bits."


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix [out, in], or a stack of them [experts, out, in]."""

    codes: str  # name of the tensor with the numbers of few bits
    scale: str  # name of the tensor with their scales
    shape: tuple[int, ...]  # before quantization
    # whether `shape` is that of the transposed matrices: [experts, in, out]
    is_transposed: ClassVar[bool] = False

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of all its tensors."""
        return self.codes, self.scale

    def read(
        self, source: SafetensorsSource, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        """Return rows [start, stop) of a matrix in fp32: of an expert's, or of the only one."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlockWeight(PackedWeight):
    """A weight with a scale per block of rows and columns."""

    block: tuple[int, int]  # rows and columns with the same scale, and zero point

    def read_grid(
        self, source: WeightSource, name: str, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        """Return the scale (or zero point) of every weight in rows [start, stop) of a matrix, from
        the tensor `name`."""
        by_row = self._read_rows_of_grid(source, name, expert, start, stop)
        column = torch.arange(self.shape[-1]) // self.block[1]
        return by_row[:, column]

    def row_scales(self, source: WeightSource, start: int, stop: int) -> torch.Tensor:
        """Return the fp32 scales of rows [start, stop) of a matrix, [rows, blocks of columns]."""
        return self._read_rows_of_grid(source, self.scale, None, start, stop)

    def _read_rows_of_grid(
        self, source: WeightSource, name: str, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        block_rows = self.block[0]
        first = start // block_rows
        last = ceil(stop / block_rows)
        if source.tensors[name].shape:
            stored = read_matrix(source, name, expert, first, last)
        else:
            stored = source.read(name)
        scale = scale_values(stored).reshape(last - first, -1)
        row = torch.arange(start, stop) // block_rows - first
        return scale[row]


@dataclass(frozen=True)
class ScaledWeight(BlockWeight):
    """Codes of 8 or 4 bits, without zero points."""

    is_fp4: bool = False  # two codes per byte
    global_scale: str | None = None  # of the scale of NVFP4's scales
    divides: bool = True  # the scales are divided by it, not multiplied
    code_dtype: torch.dtype | None = None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.global_scale)
        return tuple(name for name in names if name is not None)

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = read_matrix(source, self.codes, expert, start, stop)
        values = fp4_values(codes) if self.is_fp4 else codes.float()
        scale = self.read_grid(source, self.scale, expert, start, stop)
        if self.global_scale is not None:
            factor = source.read(self.global_scale).float()
            scale = scale / factor if self.divides else scale * factor
        return values.mul_(scale)


def read_matrix(
    source: WeightSource, name: str, expert: int | None, start: int, stop: int
) -> torch.Tensor:
    """Read rows [start, stop) of a stored matrix, or of an expert's."""
    if expert is None:
        return source.read_rows(name, start, stop)
    return source.read_rows(name, expert, expert + 1)[0, start:stop]


def unpacked_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers of 4 or 8 bits, packed into the words of a matrix's rows, as uint8."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes


def fp4_pairs(device: torch.device) -> torch.Tensor:
    """Return the fp32 values of the two E2M1 codes of each byte, the low half first: [256, 2]."""
    values = torch.tensor(FP4_VALUES, device=device)
    of_code = torch.cat([values, -values])
    low = of_code.repeat(16)
    high = of_code.repeat_interleave(16)
    return torch.stack([low, high], dim=-1)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of two E2M1 codes per byte: the last dimension doubles."""
    codes = packed.contiguous().view(torch.uint8)
    return fp4_pairs(packed.device)[codes.int()].flatten(-2)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32. Bytes are exponents of 2 with a bias of 127 (UE8M0)."""
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return scale.float()


def find_tensor(source: WeightSource, codes: str, names: Sequence[str]) -> str:
    """Return the first of the possible names of a tensor of a weight that the files have. Raises
    UserError if they have none."""
    for name in names:
        if name in source.tensors:
            return name
    header = source.tensors[codes]
    problem = f"{codes} is quantized ({header.dtype}), and {names[0]} is missing"
    raise damaged(header.file, problem)


def find_number(source: WeightSource, codes: str, name: str) -> str:
    """Return the name of a tensor that is one number. Raises UserError if it is missing or is not."""
    find_tensor(source, codes, [name])
    header = source.tensors[name]
    size = torch.Size(header.shape).numel()
    if size != 1:
        raise damaged(header.file, f"{name} has {size} values; expected one")
    return name


def matrix_shape(name: str, header: StoredTensor) -> tuple[int, ...]:
    """Return the shape of codes. Raises UserError unless they are a matrix or a stack of them."""
    if len(header.shape) not in (2, 3):
        problem = (
            f"{name} is quantized and has the shape {list(header.shape)}, which is not a matrix"
        )
        raise damaged(header.file, problem)
    return header.shape


def check_header(
    source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise a UserError if a tensor has another shape or dtype."""
    header = source.tensors[name]
    if header.shape != shape or header.dtype != dtype:
        stored = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {stored}; expected {dtype} {list(shape)}")


def fitting_block(
    source: WeightSource,
    name: str,
    scale: str,
    shape: tuple[int, ...],
    blocks: Iterable[tuple[int, int]],
) -> tuple[int, int]:
    """Return the one of the block sizes that the shape of a weight's scale fits. Blocks at an edge
    may be smaller. Raises UserError if none does, or the scale has no type of scales."""
    *stack, rows, columns = shape
    header = source.tensors[scale]
    if not header.dtype.is_floating_point and header.dtype != torch.uint8:
        problem = f"{scale} is {header.dtype}; expected floating-point numbers, or bytes"
        raise damaged(header.file, problem)
    expected = []
    for block_rows, block_columns in blocks:
        grid = (*stack, ceil(rows / block_rows), ceil(columns / block_columns))
        expected.append(grid)
        is_flat = not stack and grid[1] == 1 and header.shape == grid[:1]
        is_scalar = not stack and grid == (1, 1) and header.shape == ()
        if header.shape == grid or is_flat or is_scalar:
            return block_rows, block_columns
    shapes = " or ".join(str(list(grid)) for grid in expected)
    problem = f"{scale} has the shape {list(header.shape)}; expected {shapes} for {name}"
    raise damaged(header.file, f"{problem} {list(shape)}")


def damaged(file: Path, problem: str) -> UserError:
    """Return the error for a file whose tensors do not fit each other."""
    return UserError(f"{file}: {problem}.\n{DOWNLOAD_AGAIN}")
