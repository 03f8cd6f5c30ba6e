"""Read checkpoints that are published quantized, as if they were in 16 bits.

Their weights are codes of few bits and the scales of blocks of codes:

    fp8      weight float8 [out, in]                 weight_scale_inv [ceil(out / 128), ceil(in / 128)]
    int4     weight_packed int32 [out, in / 8]      weight_scale [out, in / group], weight_zero_point
    fp4      weight_packed uint8 [out, in / 2]      weight_scale [out, in / group], weight_global_scale
    modelopt    weight float8 or uint8 [out, in / 2]    weight_scale, weight_scale_2
    mxfp4    *_blocks uint8 [experts, out, in / 32, 16]    *_scales uint8 [experts, out, in / 32]

    value = (code - zero point) * scale

packed_columns.py has the layouts of GPTQ and AWQ.

`open_dequantized` returns a source of weights under the names and in the shapes of the model that was
quantized. Requested rows are dequantized in fp32 and rounded once, to the dtype of config.json. So the
conversion of names, sharding, quantization to 8 or 4 bits and exports see a checkpoint in 16 bits. Which
tensors are quantized is read from the files, not from config.json's lists of excluded modules.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from llama_ft.errors import UserError
from llama_ft.models.base.source import (
    SafetensorsSource,
    StoredTensor,
    WeightSource,
    open_weights,
    row_blocks,
)
from llama_ft.models.published.packed_columns import find_awq, find_gptq
from llama_ft.models.published.packed_weights import (
    CompressedWeight,
    Mxfp4Stack,
    PackedWeight,
    ScaledWeight,
    damaged,
    find_part,
    scale_values,
)
from llama_ft.models.published.published_note import (
    check_note,
    describe_note,
    find_note,
    is_positive,
    read_settings,
    weight_schemes,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Suffixes of the scale's name, which replace that of the weight.
SCALES_OF_FP8 = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
# Of activations and of the cache of keys and values, which stay in 16 bits here.
UNUSED = (
    ".activation_scale",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".qscale_act",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)
# The dtypes of dequantized weights, by their names in config.json.
READ_AS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
FP4_BLOCK = (1, 32)  # of DeepSeek V4's experts
NVFP4_BLOCK = (1, 16)
WORK_ELEMENTS = 2**20  # dequantized at once: temporaries in fp32 and of indices take 4 MiB each


def stored_method(model_config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization_config of a published format that can be read here, or None. Raises
    UserError if its variant cannot be read."""
    note = find_note(model_config.to_dict())
    if note is None or note.get("quant_method") not in READERS:
        return None
    check_note(note)
    return note


def remove_note(model_config: PretrainedConfig) -> dict[str, Any] | None:
    """Remove the quantization_config from a model's config, and return it."""
    note = find_note(model_config.to_dict())
    parts = [getattr(model_config, name, None) for name in model_config.sub_configs]
    for part in (model_config, model_config.get_text_config(), *parts):
        if part is not None:
            vars(part).pop("quantization_config", None)
    return note


def describe_stored(
    folder: Path, model_config: PretrainedConfig, keeps_stored: bool = False
) -> str | None:
    """Read the headers of a model's weights. Return a log text about a published format: what it is,
    and what it becomes (`keeps_stored`: with --quantization as_stored). Raises UserError if a file
    cannot be read, or a tensor of the format is missing or does not fit."""
    source = open_dequantized(folder)
    note = stored_method(model_config)
    if note is None:
        return None
    is_packed = any(header.is_dequantized for header in source.tensors.values())
    if not is_packed:
        return (
            f"config.json says that the checkpoint is quantized ({describe_note(note)}), but no tensor is. "
            f"The weights are read as they are stored."
        )
    read = "Other weights than those kept as stored are" if keeps_stored else "It is"
    return (
        f"The checkpoint is quantized: {describe_note(note)}. {read} read in 16 bits, and whole models are "
        f"written in 16 bits."
    )


def open_dequantized(folder: Path) -> WeightSource:
    """Open the weights of a model directory. Those of a published format are shown in 16 bits. Only
    headers are read. Raises UserError if a tensor of the format is missing or does not fit."""
    source = open_weights(folder)
    settings = read_settings(folder)
    note = find_note(settings)
    if note is None or note.get("quant_method") not in READERS:
        return source
    check_note(note)
    return DequantizedSource(source, note, dequantized_dtype(settings))


def dequantized_dtype(settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of dequantized weights: that of a config.json, or bf16."""
    text = settings.get("text_config") or {}
    names = [part.get(key) for part in (settings, text) for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name), "bfloat16")
    return READ_AS.get(str(name), torch.bfloat16)


class DequantizedSource(WeightSource):
    """The tensors of another source with quantized ones replaced by what they stand for.

    Args:
        source: the files.
        note: config.json's quantization_config.
        dtype: of the dequantized tensors.
    """

    def __init__(
        self, source: SafetensorsSource, note: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        self._source = source
        self._packed = READERS[note["quant_method"]](source, note)
        self.tensors = dict(source.tensors)
        for name, packed in self._packed.items():
            file = source.tensors[packed.codes].file
            if name != packed.codes and name in source.tensors:
                raise damaged(file, f"{name} is stored twice: {packed.codes} is the same weight")
            for part in packed.parts:
                self.tensors.pop(part, None)
            self.tensors[name] = StoredTensor(
                file, packed.shape, dtype, is_dequantized=True, packed=packed
            )
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
            # the sum first: of 9.4 ms for a block it takes 0.2, and the second check 3.8
            if not values.sum().isfinite() and not values.isfinite().all():
                raise self._not_finite(packed)
            matrix[start:stop] = values

    def _not_finite(self, packed: PackedWeight) -> UserError:
        """Return the error for a weight with a value that is not a number, or is infinite."""
        scale = scale_values(self._source.read(packed.scale))
        broken = packed.codes if scale.isfinite().all() else packed.scale
        file = self._source.tensors[broken].file
        return damaged(file, f"{broken} has values that are not finite (NaN or infinite)")


def find_fp8(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
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
        found[name] = ScaledWeight(name, scale, shape, block, is_fp4, code_dtype=header.dtype)
    return found


def find_mxfp4(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
    """Return the stacked experts in MXFP4, by name."""
    found = dict[str, PackedWeight]()
    for codes, header in source.tensors.items():
        if not codes.endswith("_blocks"):
            continue
        name = codes.removesuffix("_blocks")
        scale = find_part(source, codes, [f"{name}_scales"])
        grid = header.shape[:-1]
        fits = len(header.shape) == 4 and header.shape[-1] == 16
        _check_bytes(source, codes, fits, "[experts, out, in / 32, 16]")
        _check_bytes(source, scale, source.tensors[scale].shape == grid, str(list(grid)))
        experts, rows, blocks, _ = header.shape
        found[name] = Mxfp4Stack(codes, scale, (experts, blocks * 32, rows))
    return found


def _check_bytes(source: WeightSource, name: str, fits: bool, expected: str) -> None:
    header = source.tensors[name]
    if not fits or header.dtype != torch.uint8:
        found = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {found}; expected bytes {expected}")


def find_compressed(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights of a compressed-tensors checkpoint, by name."""
    schemes = weight_schemes(note)
    symmetric = [scheme.get("symmetric", True) for scheme in schemes]
    has_zero_points = bool(symmetric) and not any(symmetric)
    found = dict[str, PackedWeight]()
    for codes, header in source.tensors.items():
        prefix, _, last = codes.rpartition(".")
        is_packed = last == "weight_packed"
        is_plain = last == "weight" and header.dtype in (*FP8, torch.int8)
        if not (is_packed or is_plain):
            continue
        name = f"{prefix}.weight"
        scale = f"{name}_scale"
        if is_packed and header.dtype == torch.uint8:
            found[name] = _packed_fp4(source, codes, name, schemes)
            continue
        zero_point = f"{name}_zero_point"
        needed = [scale, f"{name}_shape"] if is_packed else [scale]
        if has_zero_points:
            needed.append(zero_point)
        for part in needed:
            find_part(source, codes, [part])
        shape = _matrix_shape(codes, header)
        bits = None
        if is_packed:
            shape = _stored_shape(source, needed[1])
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


def find_modelopt(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights of a checkpoint of NVIDIA's ModelOpt, by name. Sources:
    https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor"""
    found = dict[str, PackedWeight]()
    for name, header in source.tensors.items():
        is_fp4 = header.dtype == torch.uint8
        is_weight = name.endswith(".weight") and (is_fp4 or header.dtype in FP8)
        if not is_weight:
            continue
        rows, columns = _matrix_shape(name, header)
        scale = find_part(source, name, [f"{name}_scale"])
        factor = None
        blocks = [(rows, columns)]
        if is_fp4:
            columns *= 2
            factor = _find_number(source, name, f"{name}_scale_2")
            blocks = [NVFP4_BLOCK]
        shape = (rows, columns)
        block = _block(source, name, scale, shape, blocks)
        found[name] = ScaledWeight(
            name, scale, shape, block, is_fp4, global_scale=factor, divides=False
        )
    return found


def _find_number(source: WeightSource, codes: str, name: str) -> str:
    """Return the name of a part that is one number. Raises UserError if it is missing or is not."""
    find_part(source, codes, [name])
    header = source.tensors[name]
    size = torch.Size(header.shape).numel()
    if size != 1:
        raise damaged(header.file, f"{name} has {size} values; expected one")
    return name


def _packed_fp4(
    source: WeightSource, codes: str, name: str, schemes: list[dict[str, Any]]
) -> ScaledWeight:
    """Return a weight in MXFP4, or in NVFP4, whose scales have a scale."""
    header = source.tensors[codes]
    rows, columns = _matrix_shape(codes, header)
    shape = (rows, columns * 2)
    scale = find_part(source, codes, [f"{name}_scale"])
    global_scale = None
    if source.tensors[scale].dtype != torch.uint8:
        global_scale = _find_number(source, codes, f"{name}_global_scale")
    block = _block(source, name, scale, shape, _blocks_of(schemes, shape))
    return ScaledWeight(codes, scale, shape, block, is_fp4=True, global_scale=global_scale)


def _stored_shape(source: WeightSource, name: str) -> tuple[int, ...]:
    """Return the shape of a packed matrix, which is itself a tensor."""
    header = source.tensors[name]
    if header.shape != (2,) or header.dtype not in (torch.int32, torch.int64):
        found = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {found}; expected two whole numbers")
    return tuple(source.read(name).tolist())


def _check_zero_point(
    source: WeightSource, scale: str, zero_point: str, shape: tuple[int, ...], bits: int | None
) -> None:
    """Raise a UserError if zero points do not fit the scales. They may be packed along the rows."""
    header = source.tensors[zero_point]
    expected = source.tensors[scale].shape
    if bits is not None and header.dtype == torch.int32:
        expected = (ceil(shape[0] * bits / 32), *expected[1:])
    if header.shape != expected:
        found = list(header.shape)
        problem = f"{zero_point} has the shape {found}; expected {list(expected)}"
        raise damaged(header.file, problem)


def _packed_bits(name: str, header: StoredTensor, shape: tuple[int, ...]) -> int:
    """Return the number of bits of integers that are packed into words."""
    for bits in (4, 8):
        words = (shape[0], ceil(shape[-1] * bits / 32))
        if header.dtype == torch.int32 and header.shape == words:
            return bits
    found = f"{header.dtype} {list(header.shape)}"
    problem = f"{name} is {found}, which does not hold {list(shape)} integers of 4 or 8 bits"
    raise damaged(header.file, problem)


def _blocks_of(schemes: list[dict[str, Any]], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the possible sizes of blocks with one scale, of all groups of modules."""
    rows, columns = shape[-2:]
    found = []
    for scheme in schemes:
        size = scheme.get("group_size")
        if scheme.get("strategy") == "block":
            block_rows, block_columns = scheme["block_structure"]
            found.append((block_rows, block_columns))
        elif is_positive(size):
            found.append((1, size))
        elif scheme.get("strategy") == "channel" or size == -1:
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
    return find_part(source, name, names)


def _matrix_shape(name: str, header: StoredTensor) -> tuple[int, ...]:
    if len(header.shape) not in (2, 3):
        found = list(header.shape)
        problem = f"{name} is quantized and has the shape {found}, which is not a matrix"
        raise damaged(header.file, problem)
    return header.shape


def _block(
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
    found = f"{scale} has the shape {list(header.shape)}"
    raise damaged(header.file, f"{found}; expected {shapes} for {name} {list(shape)}")


# by quant_method
READERS = {
    "fp8": find_fp8,
    "mxfp4": find_mxfp4,
    "compressed-tensors": find_compressed,
    "gptq": find_gptq,
    "awq": find_awq,
    "modelopt": find_modelopt,
}
