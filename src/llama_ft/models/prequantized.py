"""Checkpoints that bitsandbytes has quantized already: their rows, without a round trip through floats.

transformers saves an 8-bit layer as `weight` int8 [out, in], `SCB` fp32 [out] and `weight_format`; a 4-bit one as
`weight` [out * in / 2, 1], `weight.absmax` and a few tensors about them. With double quantization `weight.absmax` is
itself in 8 bits, in blocks of 256 that cross rows; it is expanded to fp32, one scale a block, which is exact.
"""

import json
from typing import Any, Literal

import torch

from llama_ft.errors import UserError
from llama_ft.models.quantized import FourBit
from llama_ft.models.source import StoredTensor, WeightSource

FOUR_BIT_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.")


def stored_form(key: str, headers: dict[str, StoredTensor]) -> Literal["float", "8bit", "4bit"]:
    """How the checkpoint holds the weight called `key`."""
    if f"{key}.absmax" in headers:
        return "4bit"
    return "8bit" if key.endswith(".weight") and _beside(key, "SCB") in headers else "float"


def parts_of(key: str, headers: dict[str, StoredTensor]) -> list[str]:
    """The tensors that say how the weight called `key` is quantized."""
    form = stored_form(key, headers)
    if form == "8bit":
        return [_beside(key, "SCB"), _beside(key, "weight_format")]
    if form == "4bit":
        return [name for name in headers if name.startswith(tuple(f"{key}.{part}" for part in FOUR_BIT_PARTS))]
    return []


def stored_shape(key: str, headers: dict[str, StoredTensor], shape: tuple[int, ...]) -> tuple[int, ...]:
    """[out, in] of a stored weight; of a 4-bit one, whose tensor is flat, the model's own `shape` if its size fits."""
    stored = headers[key]
    if stored_form(key, headers) != "4bit":
        return stored.shape
    values = 2 * stored.dtype.itemsize * stored.shape[0]
    return shape if values == shape[0] * shape[1] else (values,)


def read_8bit(source: WeightSource, key: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, stop): weight int8 [n, in] and scale, the bits of fp32 [n]."""
    layout = _beside(key, "weight_format")
    if layout in source.tensors and source.read(layout).item() != 0:
        raise UserError(f"{source.tensors[key].file}: {key} is not stored by rows. Use the original model.")
    scale = source.read_rows(_beside(key, "SCB"), start, stop).float()
    return source.read_rows(key, start, stop), scale.view(torch.int32)


def read_4bit(
    source: WeightSource, key: str, in_features: int, scheme: FourBit, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, stop), which must be whole blocks: weight uint8 [n, in / 2] and scale, the bits of fp32
    [n, in / block size]."""
    itemsize = source.tensors[key].dtype.itemsize  # transformers can store the bytes as another dtype
    a_row = in_features // 2 // itemsize
    weight = source.read_rows(key, start * a_row, stop * a_row).contiguous().view(torch.uint8)
    note = next(name for name in source.tensors if name.startswith(f"{key}.quant_state."))
    state: dict[str, Any] = json.loads(bytes(source.read(note).tolist()))
    if (state["quant_type"], state["blocksize"]) != (scheme.quant_type, scheme.block_size):
        raise UserError(f"{source.tensors[key].file}: {key} is not stored in {scheme.name}, as config.json says.")
    blocks = in_features // scheme.block_size
    first, last = start * blocks, stop * blocks
    scale = source.read_rows(f"{key}.absmax", first, last)
    if "nested_blocksize" in state:
        outer = torch.arange(first, last) // state["nested_blocksize"]
        code, outer_scale = source.read(f"{key}.nested_quant_map"), source.read(f"{key}.nested_absmax")
        scale = code.float()[scale.long()] * outer_scale.float()[outer] + state["nested_offset"]
    return weight.view(stop - start, -1), scale.float().contiguous().view(torch.int32).view(stop - start, -1)


def _beside(key: str, part: str) -> str:
    return f"{key.removesuffix('weight')}{part}"
