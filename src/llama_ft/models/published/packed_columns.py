"""Weights of GPTQ and AWQ: integers of few bits in words of int32. They are stored as [in, out], with
a scale and a zero point per output and group of inputs.

    GPTQ    qweight [in / 8, out]    qzeros [groups, out / 8]    scales [groups, out]    g_idx [in]
    AWQ     qweight [in, out / 8]    qzeros [groups, out / 8]    scales [groups, out]

    weight[o, i] = (code[i, o] - zero point[group, o]) * scale[group, o]

The group of input i is g_idx[i], or i // group_size. Shapes are those of 4 bits; GPTQ also has 8. GPTQ
stores zero points minus 1, except in its second version. AWQ has another order of codes in a word.
Sources: https://github.com/ModelCloud/GPTQModel and https://github.com/casper-hansen/AutoAWQ
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from llama_ft.models.base.source import SafetensorsSource, WeightSource
from llama_ft.models.published.packed_weights import (
    PackedWeight,
    damaged,
    find_part,
    unpacked_codes,
)
from llama_ft.models.published.published_note import column_layout

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of 8 outputs in its word
DEFAULT_GROUP = 128


@dataclass(frozen=True)
class ColumnWeight:
    """A matrix of GPTQ or AWQ. Its rows are the columns of the stored tensors."""

    codes: str
    scale: str
    zero_point: str
    shape: tuple[int, ...]
    bits: int
    group_size: int  # of inputs with one scale, unless `group_index` says it
    group_index: str | None = None
    zero_offset: int = 0  # added to stored zero points
    is_awq: bool = False
    is_transposed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.zero_point, self.group_index)
        return tuple(name for name in names if name is not None)

    def read(
        self, source: SafetensorsSource, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        """See `PackedWeight`."""
        inputs = self.shape[1]
        if self.is_awq:
            codes = self._packed_outputs(source, self.codes, start, stop)
        else:
            words = source.read_columns(self.codes, start, stop)
            codes = unpacked_codes(words.T, self.bits).T[:inputs]
        zero_point = self._packed_outputs(source, self.zero_point, start, stop)
        zero_point = (zero_point.int() + self.zero_offset) % 2**self.bits
        scale = source.read_columns(self.scale, start, stop).float()
        group = self._groups(source)
        values = codes.int().sub_(zero_point[group]).float().mul_(scale[group])
        return values.T

    def _packed_outputs(
        self, source: SafetensorsSource, name: str, start: int, stop: int
    ) -> torch.Tensor:
        """Return the codes of outputs [start, stop) of a tensor that is packed along the outputs."""
        per_word = 32 // self.bits
        first = start // per_word
        words = source.read_columns(name, first, ceil(stop / per_word))
        codes = unpacked_codes(words, self.bits)
        if self.is_awq:
            places = torch.tensor(AWQ_ORDER)
            codes = codes.unflatten(1, (-1, per_word))[..., places].flatten(1)
        offset = first * per_word
        return codes[:, start - offset : stop - offset]

    def _groups(self, source: WeightSource) -> torch.Tensor:
        """Return the group of each input."""
        if self.group_index is None:
            return torch.arange(self.shape[1]) // self.group_size
        header = source.tensors[self.group_index]
        group = source.read(self.group_index).long()
        count = source.tensors[self.scale].shape[0]
        if group.min() < 0 or group.max() >= count:
            problem = f"{self.group_index} has values outside of 0 to {count - 1}"
            raise damaged(header.file, f"{problem}, the groups of {self.scale}")
        return group


def find_gptq(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights of a GPTQ checkpoint, by name."""
    bits = note["bits"]
    per_word = 32 // bits
    offset = 0 if column_layout(note) == "gptq_v2" else 1
    found = dict[str, PackedWeight]()
    for codes in _names_of_codes(source):
        prefix = codes.removesuffix("qweight")
        words, outputs = source.tensors[codes].shape
        inputs = words * per_word
        index = f"{prefix}g_idx"
        has_index = index in source.tensors
        group_size = _group_size(note, inputs)
        groups = None
        if has_index:
            _check(source, index, (inputs,), torch.int32)
        else:
            groups = ceil(inputs / group_size)
        scale, zero_point = _check_parts(source, codes, outputs, groups, per_word)
        found[f"{prefix}weight"] = ColumnWeight(
            codes=codes,
            scale=scale,
            zero_point=zero_point,
            shape=(outputs, inputs),
            bits=bits,
            group_size=group_size,
            group_index=index if has_index else None,
            zero_offset=offset,
        )
    return found


def find_awq(source: WeightSource, note: Mapping[str, Any]) -> dict[str, PackedWeight]:
    """Return the weights of an AWQ checkpoint, by name."""
    bits = note["bits"]
    per_word = 32 // bits
    found = dict[str, PackedWeight]()
    for codes in _names_of_codes(source):
        prefix = codes.removesuffix("qweight")
        inputs, words = source.tensors[codes].shape
        outputs = words * per_word
        group_size = _group_size(note, inputs)
        groups = ceil(inputs / group_size)
        scale, zero_point = _check_parts(source, codes, outputs, groups, per_word)
        found[f"{prefix}weight"] = ColumnWeight(
            codes=codes,
            scale=scale,
            zero_point=zero_point,
            shape=(outputs, inputs),
            bits=bits,
            group_size=group_size,
            is_awq=True,
        )
    return found


def _names_of_codes(source: WeightSource) -> list[str]:
    """Return the names of packed weights. Raises UserError for one that is not a matrix of words."""
    names = [name for name in source.tensors if name.endswith(".qweight")]
    for name in names:
        header = source.tensors[name]
        if header.dtype != torch.int32 or len(header.shape) != 2:
            found = f"{header.dtype} {list(header.shape)}"
            raise damaged(header.file, f"{name} is {found}; expected a matrix of torch.int32")
    return names


def _group_size(note: Mapping[str, Any], inputs: int) -> int:
    size = note.get("group_size")
    if size is None:
        return DEFAULT_GROUP
    return inputs if size == -1 else int(size)


def _check_parts(
    source: WeightSource, codes: str, outputs: int, groups: int | None, per_word: int
) -> tuple[str, str]:
    """Return the names of the scales and zero points. Raises UserError if one is missing, or its
    shape does not fit. `groups` is None if only g_idx tells their number."""
    prefix = codes.removesuffix("qweight")
    scale = find_part(source, codes, [f"{prefix}scales"])
    zero_point = find_part(source, codes, [f"{prefix}qzeros"])
    stored = source.tensors[scale]
    if groups is None:
        groups = stored.shape[0] if stored.shape else 0
    dtype = stored.dtype if stored.dtype.is_floating_point else torch.float16
    _check(source, scale, (groups, outputs), dtype)
    _check(source, zero_point, (groups, ceil(outputs / per_word)), torch.int32)
    return scale, zero_point


def _check(source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    header = source.tensors[name]
    if header.shape != shape or header.dtype != dtype:
        found = f"{header.dtype} {list(header.shape)}"
        raise damaged(header.file, f"{name} is {found}; expected {dtype} {list(shape)}")
