"""Formats of compressed-tensors: integers of 4 or 8 bits in groups, INT8, FP8, MXFP4 and NVFP4.

int4    weight_packed int32 [out, in / 8]      weight_scale [out, in / group], weight_zero_point
fp4     weight_packed uint8 [out, in / 2]      weight_scale [out, in / group], weight_global_scale

value = (code - zero point) * scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from llama_ft.models.base.source import StoredTensor, WeightSource
from llama_ft.models.published.packed_weights import (
    FP8,
    BlockWeight,
    PackedWeight,
    ScaledWeight,
    damaged,
    find_number,
    find_tensor,
    fitting_block,
    matrix_shape,
    unpacked_codes,
)
from llama_ft.models.published.quantization_config import (
    is_block,
    is_positive,
    unsupported,
    wrong_setting,
)
from llama_ft.models.published.weight_format import WeightFormat

# name -> how the log calls it
LAYOUTS = {
    "pack-quantized": "integers of 4 or 8 bits in groups",
    "int-quantized": "INT8",
    "float-quantized": "FP8",
    "naive-quantized": "FP8 or INT8",
    "mxfp4-pack-quantized": "MXFP4",
    "nvfp4-pack-quantized": "NVFP4",
}
FP4_LAYOUTS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
# values of actorder: groups of columns in their order. The others need a g_idx tensor.
IN_ORDER = (None, False, "weight", "static")
Scheme = dict[str, Any]  # how a group of modules quantizes its weights


@dataclass(frozen=True)
class CompressedWeight(BlockWeight):
    """A matrix in FP8 or INT8, or of integers of 4 or 8 bits packed in int32."""

    bits: int | None = None  # of packed integers
    zero_point: str | None = None
    shape_name: str | None = None  # of the tensor that holds the shape of packed integers

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.zero_point, self.shape_name)
        return tuple(name for name in names if name is not None)

    def read(self, source: WeightSource, expert: int | None, start: int, stop: int) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = source.read_rows(self.codes, start, stop)
        columns = self.shape[-1]
        values = codes.float() if self.bits is None else _integers(codes, self.bits)[:, :columns]
        if self.zero_point is not None:
            values = values - self._zero_points(source, self.zero_point, start, stop)
        return values * self.read_grid(source, self.scale, None, start, stop)

    def _zero_points(self, source: WeightSource, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the zero points of rows [start, stop) for each column. Those of packed integers
        are packed along the rows."""
        if self.bits is None or source.tensors[name].dtype != torch.int32:
            return self.read_grid(source, name, None, start, stop)
        per_word = 32 // self.bits
        first = start // per_word
        words = source.read_rows(name, first, ceil(stop / per_word))
        by_row = _integers(words.T, self.bits).T
        offset = first * per_word
        stored = by_row[start - offset : stop - offset]
        column = torch.arange(self.shape[-1]) // self.block[1]
        return stored[:, column]


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers of 4 or 8 bits, packed into the words of a matrix's rows from the lowest bit
    on, as fp32. They are stored with half of their range added."""
    return unpacked_codes(words, bits).float() - 2 ** (bits - 1)


class CompressedTensors(WeightFormat):
    """Checkpoints of compressed-tensors."""

    tensor_suffixes = ("_packed", "_scale", "_zero_point")

    def check(self) -> None:
        """See `WeightFormat`."""
        settings = self.quantization_config
        groups = settings.get("config_groups")
        are_groups = isinstance(groups, dict) and all(
            isinstance(group, dict) for group in groups.values()
        )
        if not groups or not are_groups:
            raise wrong_setting("config_groups", groups, "groups by name")
        schemes = self._schemes()
        if not schemes:
            raise wrong_setting("config_groups", groups, "a group with weights")
        layouts = self._layouts()
        problems = [name for name in layouts if name not in LAYOUTS]
        has_fp4 = any(name in FP4_LAYOUTS for name in layouts)
        for scheme in schemes:
            problems += _problems_of(scheme, groups, has_fp4)
        if _section(settings, "sparsity_config").get("format", "dense") != "dense":
            problems.append("sparsity")
        if _section(settings, "transform_config").get("config_groups"):
            problems.append("transforms")
        if problems:
            raise unsupported(self.method, problems, ", ".join(LAYOUTS))

    def describe(self) -> str:
        """See `WeightFormat`."""
        return ", ".join(LAYOUTS[name] for name in self._layouts())

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """See `WeightFormat`."""
        schemes = self._schemes()
        symmetric = [scheme.get("symmetric", True) for scheme in schemes]
        has_zero_points = bool(symmetric) and not any(symmetric)
        weights = dict[str, PackedWeight]()
        for codes, header in source.tensors.items():
            prefix, _, last = codes.rpartition(".")
            is_packed = last == "weight_packed"
            is_plain = last == "weight" and header.dtype in (*FP8, torch.int8)
            if not (is_packed or is_plain):
                continue
            name = f"{prefix}.weight"
            scale = f"{name}_scale"
            if is_packed and header.dtype == torch.uint8:
                weights[name] = _packed_fp4(source, codes, name, schemes)
                continue
            zero_point = f"{name}_zero_point"
            needed = [scale, f"{name}_shape"] if is_packed else [scale]
            if has_zero_points:
                needed.append(zero_point)
            for stored_name in needed:
                find_tensor(source, codes, [stored_name])
            shape = matrix_shape(codes, header)
            bits = None
            if is_packed:
                shape = _stored_shape(source, needed[1])
                bits = _packed_bits(codes, header, shape)
            blocks = _blocks_of(schemes, shape)
            if zero_point in source.tensors:
                _check_zero_point(source, scale, zero_point, shape, bits)
            weights[name] = CompressedWeight(
                codes=codes,
                scale=scale,
                shape=shape,
                block=fitting_block(source, name, scale, shape, blocks),
                bits=bits,
                zero_point=zero_point if zero_point in source.tensors else None,
                shape_name=needed[1] if is_packed else None,
            )
        return weights

    def _layouts(self) -> list[str]:
        """Return the layouts of the groups of modules."""
        default = str(self.quantization_config.get("format"))
        groups = self.quantization_config["config_groups"].values()
        named = [str(group.get("format") or default) for group in groups]
        return list(dict.fromkeys(named))

    def _schemes(self) -> list[Scheme]:
        """Return how each group of modules quantizes its weights. Some quantize only
        activations."""
        groups = self.quantization_config["config_groups"].values()
        return [group["weights"] for group in groups if group.get("weights")]


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name) or {}
    if not isinstance(section, dict):
        raise wrong_setting(name, section, "settings by name")
    return section


def _problems_of(scheme: Any, groups: Any, has_fp4: bool) -> list[str]:
    """Return what cannot be read of how a group of modules is quantized. Raises UserError for a
    value that it cannot have."""
    if not isinstance(scheme, dict) or not is_positive(scheme.get("num_bits")):
        raise wrong_setting("config_groups", groups, "weights with num_bits in each group")
    size = scheme.get("group_size")
    strategy = scheme.get("strategy")
    if size not in (None, -1) and not is_positive(size):
        raise wrong_setting("group_size", size, "a whole number above 0, or null")
    if strategy == "group" and not is_positive(size):
        raise wrong_setting("group_size", size, "a whole number above 0")
    if strategy == "block" and not is_block(scheme.get("block_structure")):
        block = scheme.get("block_structure")
        raise wrong_setting("block_structure", block, "two whole numbers above 0")
    problems = []
    if scheme["num_bits"] not in (4, 8):
        problems.append(f"{scheme['num_bits']} bits")
    elif scheme["num_bits"] == 4 and scheme.get("type") == "float" and not has_fp4:
        problems.append("floating-point numbers of 4 bits")
    if scheme.get("actorder") not in IN_ORDER:
        problems.append(f"actorder {scheme['actorder']}")
    return problems


def _packed_fp4(source: WeightSource, codes: str, name: str, schemes: list[Scheme]) -> ScaledWeight:
    """Return a weight in MXFP4, or in NVFP4, whose scales have a scale."""
    header = source.tensors[codes]
    rows, columns = matrix_shape(codes, header)
    shape = (rows, columns * 2)
    scale = find_tensor(source, codes, [f"{name}_scale"])
    global_scale = None
    if source.tensors[scale].dtype != torch.uint8:
        global_scale = find_number(source, codes, f"{name}_global_scale")
    block = fitting_block(source, name, scale, shape, _blocks_of(schemes, shape))
    return ScaledWeight(codes, scale, shape, block, is_fp4=True, global_scale=global_scale)


def _stored_shape(source: WeightSource, name: str) -> tuple[int, ...]:
    """Return the shape of a packed matrix, which is itself a tensor."""
    header = source.tensors[name]
    if header.shape != (2,) or header.dtype not in (torch.int32, torch.int64):
        stored = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {stored}; expected two whole numbers")
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
        problem = f"{zero_point} has the shape {list(header.shape)}; expected {list(expected)}"
        raise damaged(header.file, problem)


def _packed_bits(name: str, header: StoredTensor, shape: tuple[int, ...]) -> int:
    """Return the number of bits of integers that are packed into words."""
    for bits in (4, 8):
        words = (shape[0], ceil(shape[-1] * bits / 32))
        if header.dtype == torch.int32 and header.shape == words:
            return bits
    stored = f"{header.dtype} {list(header.shape)}"
    problem = f"{name} is {stored}, which does not hold {list(shape)} integers of 4 or 8 bits"
    raise damaged(header.file, problem)


def _blocks_of(schemes: list[Scheme], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the possible sizes of blocks with one scale, of all groups of modules."""
    rows, columns = shape[-2:]
    blocks = []
    for scheme in schemes:
        size = scheme.get("group_size")
        if scheme.get("strategy") == "block":
            block_rows, block_columns = scheme["block_structure"]
            blocks.append((block_rows, block_columns))
        elif is_positive(size):
            blocks.append((1, size))
        elif scheme.get("strategy") == "channel" or size == -1:
            blocks.append((1, columns))
        else:
            blocks.append((rows, columns))
    return list(dict.fromkeys(blocks))
