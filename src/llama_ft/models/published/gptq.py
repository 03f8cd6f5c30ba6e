"""GPTQ: integers of few bits in words of int32. They are stored as [in, out], with a scale and a zero
point per output and group of inputs.

    qweight [in / 8, out]    qzeros [groups, out / 8]    scales [groups, out]    g_idx [in]

    weight[o, i] = (code[i, o] - zero point[group, o]) * scale[group, o]

The group of input i is g_idx[i], or i // group_size. Shapes are those of 4 bits; there are also 8.
Zero points are stored minus 1, except in the second version.
Source: https://github.com/ModelCloud/GPTQModel
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch

from llama_ft.models.base.source import SafetensorsSource, WeightSource
from llama_ft.models.published.packed_weights import (
    PackedWeight,
    check_header,
    damaged,
    find_tensor,
    unpacked_codes,
)
from llama_ft.models.published.quantization_config import is_positive, unsupported, wrong_setting
from llama_ft.models.published.weight_format import WeightFormat

DEFAULT_GROUP = 128


@dataclass(frozen=True)
class ColumnWeight(PackedWeight):
    """A matrix of GPTQ or AWQ. Its rows are the columns of the stored tensors."""

    zero_point: str
    bits: int
    group_size: int  # of inputs with one scale, unless `group_index` says it
    group_index: str | None = None
    zero_offset: int = 0  # added to stored zero points

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """See `PackedWeight`."""
        names = (self.codes, self.scale, self.zero_point, self.group_index)
        return tuple(name for name in names if name is not None)

    def read(
        self, source: SafetensorsSource, expert: int | None, start: int, stop: int
    ) -> torch.Tensor:
        """See `PackedWeight`."""
        codes = self.read_codes(source, start, stop)
        zero_point = self.packed_outputs(source, self.zero_point, start, stop)
        zero_point = (zero_point.int() + self.zero_offset) % 2**self.bits
        scale = source.read_columns(self.scale, start, stop).float()
        group = self._groups(source)
        values = codes.int().sub_(zero_point[group]).float().mul_(scale[group])
        return values.T

    def read_codes(self, source: SafetensorsSource, start: int, stop: int) -> torch.Tensor:
        """Return the codes of outputs [start, stop), [in, outputs]."""
        words = source.read_columns(self.codes, start, stop)
        return unpacked_codes(words.T, self.bits).T[: self.shape[1]]

    def packed_outputs(
        self, source: SafetensorsSource, name: str, start: int, stop: int
    ) -> torch.Tensor:
        """Return the codes of outputs [start, stop) of a tensor that is packed along the outputs."""
        per_word = 32 // self.bits
        first = start // per_word
        words = source.read_columns(name, first, ceil(stop / per_word))
        codes = self.in_order(unpacked_codes(words, self.bits))
        offset = first * per_word
        return codes[:, start - offset : stop - offset]

    def in_order(self, codes: torch.Tensor) -> torch.Tensor:
        """Put the codes of each word into the order of the outputs."""
        return codes

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


class ColumnFormat(WeightFormat):
    """What GPTQ and AWQ have in common.

    Attributes:
        layouts: the layouts that can be read. The first one is the default.
        known_bits: the numbers of bits that can be read.
    """

    layouts: ClassVar[tuple[str, ...]]
    known_bits: ClassVar[tuple[int, ...]]

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        bits: int = self.quantization_config["bits"]
        return bits

    @property
    def layout(self) -> str:
        """The name of the checkpoint's layout."""
        settings = self.quantization_config
        if settings.get("is_marlin_format"):
            return "marlin"
        names = [settings.get(key) for key in ("checkpoint_format", "version", "format")]
        return next((str(name).lower() for name in names if name), self.layouts[0])

    def check(self) -> None:
        """See `WeightFormat`."""
        bits = self.quantization_config.get("bits")
        if not is_positive(bits):
            raise wrong_setting("bits", bits, "a whole number above 0")
        size = self.quantization_config.get("group_size")
        if size not in (None, -1) and not is_positive(size):
            raise wrong_setting("group_size", size, "a whole number above 0, or -1")
        problems = []
        if bits not in self.known_bits:
            problems.append(f"{bits} bits")
        if self.layout not in self.layouts:
            problems.append(f"layout {self.layout}")
        if problems:
            in_bits = " or ".join(map(str, self.known_bits))
            raise unsupported(self.method, problems, f"{', '.join(self.layouts)} in {in_bits} bits")

    def describe(self) -> str:
        """See `WeightFormat`."""
        return f"{self.method.upper()} in {self.bits} bits"

    def group_size(self, inputs: int) -> int:
        """Return the number of inputs with one scale, of a matrix with so many inputs."""
        size = self.quantization_config.get("group_size")
        if size is None:
            return DEFAULT_GROUP
        return inputs if size == -1 else int(size)

    def find(self, source: WeightSource) -> dict[str, PackedWeight]:
        """See `WeightFormat`."""
        weights = dict[str, PackedWeight]()
        for codes in names_of_codes(source):
            prefix = codes.removesuffix("qweight")
            weights[f"{prefix}weight"] = self.weight(source, codes)
        return weights

    def weight(self, source: WeightSource, codes: str) -> ColumnWeight:
        """Return the weight whose codes have this name. Raises UserError if its other tensors are
        missing or do not fit."""
        raise NotImplementedError


class Gptq(ColumnFormat):
    """Checkpoints of GPTQ."""

    tensor_suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")
    layouts = ("gptq", "gptq_v2")
    known_bits = (4, 8)

    def weight(self, source: WeightSource, codes: str) -> ColumnWeight:
        """See `ColumnFormat`."""
        per_word = 32 // self.bits
        words, outputs = source.tensors[codes].shape
        inputs = words * per_word
        index = f"{codes.removesuffix('qweight')}g_idx"
        has_index = index in source.tensors
        group_size = self.group_size(inputs)
        groups = None
        if has_index:
            check_header(source, index, (inputs,), torch.int32)
        else:
            groups = ceil(inputs / group_size)
        scale, zero_point = find_scales(source, codes, outputs, groups, per_word)
        return ColumnWeight(
            codes=codes,
            scale=scale,
            shape=(outputs, inputs),
            zero_point=zero_point,
            bits=self.bits,
            group_size=group_size,
            group_index=index if has_index else None,
            zero_offset=0 if self.layout == "gptq_v2" else 1,
        )


def names_of_codes(source: WeightSource) -> list[str]:
    """Return the names of packed weights. Raises UserError for one that is not a matrix of words."""
    names = [name for name in source.tensors if name.endswith(".qweight")]
    for name in names:
        header = source.tensors[name]
        if header.dtype != torch.int32 or len(header.shape) != 2:
            stored = f"{header.dtype} {list(header.shape)}"
            raise damaged(header.file, f"{name} is {stored}; expected a matrix of torch.int32")
    return names


def find_scales(
    source: WeightSource, codes: str, outputs: int, groups: int | None, per_word: int
) -> tuple[str, str]:
    """Return the names of the scales and zero points. Raises UserError if one is missing, or its
    shape does not fit. `groups` is None if only g_idx tells their number."""
    prefix = codes.removesuffix("qweight")
    scale = find_tensor(source, codes, [f"{prefix}scales"])
    zero_point = find_tensor(source, codes, [f"{prefix}qzeros"])
    stored = source.tensors[scale]
    if groups is None:
        groups = stored.shape[0] if stored.shape else 0
    dtype = stored.dtype if stored.dtype.is_floating_point else torch.float16
    check_header(source, scale, (groups, outputs), dtype)
    check_header(source, zero_point, (groups, ceil(outputs / per_word)), torch.int32)
    return scale, zero_point
