"""Read checkpoints that are published quantized, as if they were in 16 bits.

Their weights are codes of few bits and the scales of blocks of codes:

    fp8      weight float8 [out, in]                 weight_scale_inv [ceil(out / 128), ceil(in / 128)]
    int4     weight_packed int32 [out, in / 8]      weight_scale [out, in / group], weight_zero_point
    mxfp4    *_blocks uint8 [experts, out, in / 32, 16]    *_scales uint8 [experts, out, in / 32]

    value = (code - zero point) * scale

`open_dequantized` returns a source of weights under the names and in the shapes of the model that was
quantized. Requested rows are dequantized in fp32 and rounded once, to the dtype of config.json. So the
conversion of names, sharding, quantization to 8 or 4 bits and exports see a checkpoint in 16 bits. Which
tensors are quantized is read from the files, not from config.json's lists of excluded modules.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from llama_ft.errors import UserError
from llama_ft.models.source import StoredTensor, WeightSource, open_weights, row_blocks

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# of E2M1, whose fourth bit is the sign
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Suffixes of the scale's name, which replace that of the weight.
SCALES_OF_FP8 = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
# Of activations, which stay in 16 bits here.
UNUSED = (".activation_scale", ".input_scale", ".input_zero_point", ".qscale_act")
# Of compressed-tensors: name -> how the log calls it
COMPRESSED_FORMATS = {
    "pack-quantized": "integers of 4 or 8 bits in groups",
    "int-quantized": "INT8",
    "float-quantized": "FP8",
    "naive-quantized": "FP8 or INT8",
}
FP4_BLOCK = (1, 32)  # of DeepSeek V4's experts
WORK_ELEMENTS = 2**20  # dequantized at once: temporaries in fp32 and of indices take 4 MiB each
SIXTEEN_BITS = "Download it again, or use a version in 16 bits."


def stored_method(model_config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config of a published format that can be read here, or None. Raises
    UserError if its variant cannot be read."""
    stored = getattr(model_config, "quantization_config", None)
    if stored is None:
        return None
    note: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    if note.get("quant_method") not in READERS:
        return None
    check_note(note)
    if note["quant_method"] == "compressed-tensors":
        _compressed_formats(note)  # rejects others
    return note


def check_note(note: dict[str, Any]) -> None:
    """Raise a UserError if a quantization_config has a value that no such checkpoint can have."""
    if note["quant_method"] == "fp8":
        blocks = note.get("weight_block_size")
        is_pair = isinstance(blocks, list | tuple) and len(blocks) == 2
        if blocks is not None and not (is_pair and all(map(_is_positive, blocks))):
            raise _wrong_note("weight_block_size", blocks, "two whole numbers above 0, or null")
    if note["quant_method"] != "compressed-tensors":
        return
    groups = note.get("config_groups")
    are_groups = isinstance(groups, dict) and all(
        isinstance(group, dict) for group in groups.values()
    )
    if not groups or not are_groups:
        raise _wrong_note("config_groups", groups, "groups by name")
    schemes = _weight_schemes(note)
    if not schemes:
        raise _wrong_note("config_groups", groups, "a group with weights")
    for scheme in schemes:
        if not isinstance(scheme, dict) or not _is_positive(scheme.get("num_bits")):
            raise _wrong_note("config_groups", groups, "weights with num_bits in each group")
        size = scheme.get("group_size")
        if size not in (None, -1) and not _is_positive(size):
            raise _wrong_note("group_size", size, "a whole number above 0, or null")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _wrong_note(name: str, value: Any, expected: str) -> UserError:
    shown = str(value)[:100]
    return UserError(
        f"config.json: quantization_config.{name} is {shown}; expected {expected}.\n"
        "Download config.json again, or use a version in 16 bits."
    )


def describe_stored(model_config: PretrainedConfig) -> str | None:
    """Return a log text about a published format: what it is, and what it becomes."""
    note = stored_method(model_config)
    if note is None:
        return None
    return (
        f"The checkpoint is quantized: {_describe(note)}. It is read in 16 bits, and whole models are "
        f"written in 16 bits."
    )


def _describe(note: dict[str, Any]) -> str:
    if note["quant_method"] == "mxfp4":
        return "experts in MXFP4"
    if note["quant_method"] == "compressed-tensors":
        formats = _compressed_formats(note)
        return ", ".join(COMPRESSED_FORMATS[name] for name in formats)
    blocks = note.get("weight_block_size")
    if blocks is None:
        return "FP8 with a scale per tensor"
    return f"FP8 in blocks of {blocks[0]} x {blocks[1]}"


def open_dequantized(folder: Path) -> WeightSource:
    """Open the weights of a model directory. Those of a published format are shown in 16 bits. Only
    headers are read. Raises UserError if a tensor of the format is missing or does not fit."""
    source = open_weights(folder)
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return source  # building the model reports it
    note = settings.get("quantization_config")
    if not note or note.get("quant_method") not in READERS:
        return source
    check_note(note)
    text = settings.get("text_config") or {}
    names = (settings.get("dtype"), settings.get("torch_dtype"), text.get("dtype"))
    name = next((name for name in names if name), "bfloat16")
    dtype = getattr(torch, str(name), torch.bfloat16)
    return DequantizedSource(source, note, dtype)


class PackedWeight(Protocol):
    """A quantized matrix [out, in], or a stack of them [experts, out, in]."""

    @property
    def codes(self) -> str:
        """The name of the tensor with the numbers of few bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before quantization."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all its tensors."""

    @property
    def is_transposed(self) -> bool:
        """Whether `shape` is that of the transposed matrices: [experts, in, out]."""

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a matrix in fp32."""


class DequantizedSource(WeightSource):
    """The tensors of another source with quantized ones replaced by what they stand for.

    Args:
        source: the files.
        note: config.json's quantization_config.
        dtype: of the dequantized tensors.
    """

    def __init__(self, source: WeightSource, note: dict[str, Any], dtype: torch.dtype) -> None:
        self._source = source
        self._packed = READERS[note["quant_method"]](source, note)
        self.tensors = dict(source.tensors)
        for name, packed in self._packed.items():
            file = source.tensors[packed.codes].file
            for part in packed.parts:
                self.tensors.pop(part, None)
            self.tensors[name] = StoredTensor(file, packed.shape, dtype, is_dequantized=True)
        for name in source.tensors:
            if name.endswith(UNUSED):
                del self.tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`. The rows of a stack are its experts."""
        packed = self._packed.get(name)
        if packed is None:
            return self._source.read_rows(name, start, stop)
        header = self.tensors[name]
        rows = torch.empty(stop - start, *header.shape[1:], dtype=header.dtype)
        if len(header.shape) == 2:
            self._fill(rows, packed, None, start)
            return rows
        for expert in range(start, stop):
            matrix = rows[expert - start]
            self._fill(matrix.T if packed.is_transposed else matrix, packed, expert, 0)
        return rows

    def _fill(
        self, matrix: torch.Tensor, packed: PackedWeight, expert: int | None, offset: int
    ) -> None:
        """Write consecutive rows of a quantized matrix, from row `offset` on."""
        for start, stop in row_blocks(tuple(matrix.shape), 0, len(matrix), WORK_ELEMENTS):
            values = packed.read(self._source, expert, offset + start, offset + stop)
            matrix[start:stop] = values


@dataclass(frozen=True)
class ScaledWeight:
    """Codes of 8 or 4 bits, and a scale per block of rows and columns."""

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]  # rows and columns with the same scale
    is_fp4: bool = False  # two codes per byte
    is_transposed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        return self.codes, self.scale

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = _read_matrix(source, self.codes, expert, start, stop)
        values = fp4_values(codes) if self.is_fp4 else codes.float()
        return values.mul_(_read_grid(source, self, self.scale, expert, start, stop))


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


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers of 4 or 8 bits, packed into the words of a matrix's rows from the lowest bit
    on, as fp32. They are stored with half of their range added."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes.float() - 2 ** (bits - 1)


def _read_grid(
    source: WeightSource,
    weight: ScaledWeight | CompressedWeight,
    name: str,
    expert: int | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Return the scale (or zero point) of every weight in rows [start, stop) of a matrix."""
    block_rows, block_columns = weight.block
    first = start // block_rows
    last = ceil(stop / block_rows)
    if source.tensors[name].shape:
        stored = _read_matrix(source, name, expert, first, last)
    else:
        stored = source.read(name)
    scale = scale_values(stored).reshape(last - first, -1)
    row = torch.arange(start, stop) // block_rows - first
    column = torch.arange(weight.shape[-1]) // block_columns
    return scale[row][:, column]


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
    values = torch.tensor(FP4_VALUES)
    table = torch.cat([values, -values])
    packed = packed.contiguous().view(torch.uint8)
    low = table[(packed & 15).int()]
    high = table[(packed >> 4).int()]
    return torch.stack([low, high], dim=-1).flatten(-2)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32. Bytes are exponents of 2 with a bias of 127 (UE8M0)."""
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return scale.float()


def find_fp8(source: WeightSource, note: dict[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights in FP8, and DeepSeek V4's experts in FP4, by name."""
    found = dict[str, PackedWeight]()
    stored_block = note.get("weight_block_size")
    for name, header in source.tensors.items():
        is_fp4 = header.dtype == torch.int8
        if header.dtype not in FP8 and not is_fp4:
            continue
        scale = _find_scale(source, name)
        *stack, rows, columns = _matrix_shape(name, header)
        if is_fp4:
            columns *= 2
            blocks = [FP4_BLOCK]
        elif stored_block is None:
            blocks = [(rows, columns), (1, columns)]
        else:
            blocks = [(stored_block[0], stored_block[1])]
        shape = (*stack, rows, columns)
        block = _block(source, name, scale, shape, blocks)
        found[name] = ScaledWeight(name, scale, shape, block, is_fp4)
    return found


def find_mxfp4(source: WeightSource, note: dict[str, Any]) -> dict[str, PackedWeight]:
    """Return the stacked experts in MXFP4, by name."""
    found = dict[str, PackedWeight]()
    for codes, header in source.tensors.items():
        if not codes.endswith("_blocks"):
            continue
        name = codes.removesuffix("_blocks")
        scale = f"{name}_scales"
        if scale not in source.tensors:
            raise UserError(
                f"{header.file}: {codes} is quantized, and its scale {scale} is missing.\n{SIXTEEN_BITS}"
            )
        is_packed = header.dtype == torch.uint8 and len(header.shape) == 4
        if not is_packed or header.shape[-1] != 16:
            raise UserError(
                f"{header.file}: {codes} is {header.dtype} {list(header.shape)}; expected bytes "
                f"[experts, out, in / 32, 16].\n{SIXTEEN_BITS}"
            )
        stored = source.tensors[scale]
        if stored.dtype != torch.uint8 or stored.shape != header.shape[:-1]:
            raise UserError(
                f"{stored.file}: {scale} is {stored.dtype} {list(stored.shape)}; expected bytes "
                f"{list(header.shape[:-1])}.\n{SIXTEEN_BITS}"
            )
        experts, rows, blocks, _ = header.shape
        found[name] = Mxfp4Stack(codes, scale, (experts, blocks * 32, rows))
    return found


def _compressed_formats(note: dict[str, Any]) -> list[str]:
    """Return the formats of the groups of a compressed-tensors checkpoint. Raises UserError if one
    of them cannot be read."""
    groups = note.get("config_groups") or {}
    default = str(note.get("format"))
    named = [str(group.get("format") or default) for group in groups.values()]
    formats = list(dict.fromkeys(named or [default]))
    problems = [name for name in formats if name not in COMPRESSED_FORMATS]
    for scheme in _weight_schemes(note):
        if scheme["num_bits"] not in (4, 8):
            problems.append(f"{scheme['num_bits']} bits")
    if (note.get("sparsity_config") or {}).get("format", "dense") != "dense":
        problems.append("sparsity")
    if (note.get("transform_config") or {}).get("config_groups"):
        problems.append("transforms")
    if problems:
        raise UserError(
            f"--model_name: quantized with compressed-tensors ({', '.join(problems)}), which is not supported. "
            f"Supported are: {', '.join(COMPRESSED_FORMATS)}.\nUse a version in 16 bits or in bitsandbytes' 4 bits."
        )
    return formats


def _weight_schemes(note: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how each group of modules quantizes its weights. Some quantize only activations."""
    groups = note.get("config_groups") or {}
    return [group["weights"] for group in groups.values() if group.get("weights")]


def find_compressed(source: WeightSource, note: dict[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights of a compressed-tensors checkpoint, by name."""
    _compressed_formats(note)
    schemes = _weight_schemes(note)
    symmetric = [scheme.get("symmetric", True) for scheme in schemes]
    has_zero_points = bool(symmetric) and not any(symmetric)
    found = dict[str, PackedWeight]()
    for codes, header in source.tensors.items():
        prefix, _, last = codes.rpartition(".")
        is_packed = last == "weight_packed"
        is_plain = last == "weight" and header.dtype in (*FP8, torch.int8)
        if last == "weight_g_idx":
            raise UserError(
                f"{header.file}: {codes}: groups of columns in another order (actorder) are not supported.\n"
                f"Use a version in 16 bits."
            )
        if not (is_packed or is_plain):
            continue
        name = f"{prefix}.weight"
        scale = f"{name}_scale"
        zero_point = f"{name}_zero_point"
        needed = [scale, f"{name}_shape"] if is_packed else [scale]
        if has_zero_points:
            needed.append(zero_point)
        for part in needed:
            if part not in source.tensors:
                raise UserError(
                    f"{header.file}: {codes} is quantized, and {part} is missing.\n{SIXTEEN_BITS}"
                )
        shape = _matrix_shape(codes, header)
        bits = None
        if is_packed:
            shape = tuple(source.read(needed[1]).tolist())
            bits = _packed_bits(codes, header, shape)
        blocks = _blocks_of(schemes, shape)
        if zero_point in source.tensors:
            _check_zero_point(source, scale, zero_point, shape, bits)
        found[name] = CompressedWeight(
            codes=codes,
            scale=scale,
            shape=shape,
            block=_block(source, name, scale, shape, blocks),
            bits=bits,
            zero_point=zero_point if zero_point in source.tensors else None,
            shape_name=needed[1] if is_packed else None,
        )
    return found


def _check_zero_point(
    source: WeightSource, scale: str, zero_point: str, shape: tuple[int, ...], bits: int | None
) -> None:
    """Raise a UserError if zero points do not fit the scales. They may be packed along the rows."""
    header = source.tensors[zero_point]
    expected = source.tensors[scale].shape
    if bits is not None and header.dtype == torch.int32:
        expected = (ceil(shape[0] * bits / 32), *expected[1:])
    if header.shape != expected:
        raise UserError(
            f"{header.file}: {zero_point} has the shape {list(header.shape)}; expected {list(expected)}.\n"
            f"{SIXTEEN_BITS}"
        )


def _packed_bits(name: str, header: StoredTensor, shape: tuple[int, ...]) -> int:
    """Return the number of bits of integers that are packed into words."""
    for bits in (4, 8):
        words = (shape[0], ceil(shape[-1] * bits / 32))
        if header.dtype == torch.int32 and header.shape == words:
            return bits
    raise UserError(
        f"{header.file}: {name} is {header.dtype} {list(header.shape)}, which does not hold {list(shape)} integers "
        f"of 4 or 8 bits.\n{SIXTEEN_BITS}"
    )


def _blocks_of(schemes: list[dict[str, Any]], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the possible sizes of blocks with one scale, of all groups of modules."""
    rows, columns = shape[-2:]
    found = []
    for scheme in schemes:
        strategy = scheme.get("strategy")
        if strategy == "block":
            block_rows, block_columns = scheme["block_structure"]
            found.append((block_rows, block_columns))
        elif strategy == "group":
            found.append((1, scheme["group_size"]))
        elif strategy == "channel":
            found.append((1, columns))
        else:
            found.append((rows, columns))
    return list(dict.fromkeys(found))


def _find_scale(source: WeightSource, name: str) -> str:
    """Return the name of a weight's scale. Stacked experts have no ".weight" in their names."""
    prefix, _, last = name.rpartition(".")
    names = [f"{name}_scale_inv", f"{name}_scale"]
    if last == "weight":
        names = [f"{prefix}.{suffix}" for suffix in SCALES_OF_FP8]
    for candidate in names:
        if candidate in source.tensors:
            return candidate
    header = source.tensors[name]
    raise UserError(
        f"{header.file}: {name} is quantized ({header.dtype}), and its scale {names[0]} is missing.\n{SIXTEEN_BITS}"
    )


def _matrix_shape(name: str, header: StoredTensor) -> tuple[int, ...]:
    if len(header.shape) not in (2, 3):
        raise UserError(
            f"{header.file}: {name} is quantized and has the shape {list(header.shape)}, which is not a matrix.\n"
            f"{SIXTEEN_BITS}"
        )
    return header.shape


def _block(
    source: WeightSource,
    name: str,
    scale: str,
    shape: tuple[int, ...],
    blocks: Iterable[tuple[int, int]],
) -> tuple[int, int]:
    """Return the one of the block sizes that the shape of a weight's scale fits. Blocks at an edge
    may be smaller. Raises UserError if none does."""
    *stack, rows, columns = shape
    header = source.tensors[scale]
    expected = []
    for block_rows, block_columns in blocks:
        grid = (*stack, ceil(rows / block_rows), ceil(columns / block_columns))
        expected.append(grid)
        is_flat = not stack and grid[1] == 1 and header.shape == grid[:1]
        is_scalar = not stack and grid == (1, 1) and header.shape == ()
        if header.shape == grid or is_flat or is_scalar:
            return block_rows, block_columns
    shapes = " or ".join(str(list(grid)) for grid in expected)
    raise UserError(
        f"{header.file}: {scale} has the shape {list(header.shape)}; expected {shapes} for {name} {list(shape)}.\n"
        f"{SIXTEEN_BITS}"
    )


# by quant_method
READERS = {"fp8": find_fp8, "mxfp4": find_mxfp4, "compressed-tensors": find_compressed}
