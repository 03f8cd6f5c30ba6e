"""Checkpoints that bitsandbytes has quantized already: their rows, without a round trip through floats.

transformers saves an 8-bit layer as `weight` int8 [out, in], `SCB` fp32 [out] and `weight_format`; a 4-bit one as
`weight` [out * in / 2, 1], `weight.absmax` and a few tensors about them. With double quantization `weight.absmax` is
itself in 8 bits, in blocks of 256 that cross rows; it is expanded to fp32, one scale a block, which is exact.
"""

import json
from typing import Any, Literal

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit

from llama_ft.errors import UserError
from llama_ft.models.quantized import FourBit, Int8
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


def problems(
    key: str, headers: dict[str, StoredTensor], shape: tuple[int, ...], scheme: Int8 | FourBit | None
) -> list[str]:
    """What is wrong with how the weight called `key`, of `shape`, is stored.

    Args:
        key: its name.
        headers: of the whole checkpoint.
        shape: [out, in] in the model.
        scheme: as config.json says that it is quantized; None where the layer is to be read as floats, whatever it is.
    """
    form = stored_form(key, headers)
    if scheme is not None and form != ("8bit" if isinstance(scheme, Int8) else "4bit"):
        return [f"{key} is stored in {form}, config.json says {scheme.name}"]
    present = {name.removeprefix(f"{key}."): headers[name].shape for name in parts_of(key, headers) if name in headers}
    if form == "8bit":
        scales = headers[_beside(key, "SCB")].shape
        return [] if scales == shape[:1] else [f"{_beside(key, 'SCB')} is {list(scales)}, expected {list(shape[:1])}"]
    if form == "4bit":
        needed = ["absmax", "quant_map", "quant_state"]
        if headers[f"{key}.absmax"].dtype == torch.uint8:
            needed += ["nested_absmax", "nested_quant_map"]
        missing = [f"{key}.{part} is missing" for part in needed if not any(name.startswith(part) for name in present)]
        blocks = [-(-shape[0] * shape[1] // 64)]
        wrong = isinstance(scheme, FourBit) and list(present["absmax"]) != blocks
        return [*missing, *([f"{key}.absmax is {list(present['absmax'])}, expected {blocks}"] if wrong else [])]
    return []


def read_8bit(source: WeightSource, key: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, stop): weight int8 [n, in] and scale, the bits of fp32 [n]."""
    layout = _beside(key, "weight_format")
    if layout in source.tensors and source.read(layout).item() != 0:
        raise UserError(
            f"{source.tensors[key].file}: {key} is stored for one kind of GPU (by a bitsandbytes older than 0.45), and "
            "not by rows.\nSave the model again with a current one, or use the original model."
        )
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
    state = _state(source, key)
    if (state["quant_type"], state["blocksize"]) != (scheme.quant_type, scheme.block_size):
        raise UserError(
            f"{source.tensors[key].file}: {key} is stored in {state['quant_type']}, blocks of {state['blocksize']}; "
            f"config.json says\n{scheme.name}. Use the original model, with --quantization 4bit."
        )
    blocks = in_features // scheme.block_size
    first, last = start * blocks, stop * blocks
    scale = source.read_rows(f"{key}.absmax", first, last)
    if "nested_blocksize" in state:
        outer = torch.arange(first, last) // state["nested_blocksize"]
        code, outer_scale = source.read(f"{key}.nested_quant_map"), source.read(f"{key}.nested_absmax")
        scale = code.float()[scale.long()] * outer_scale.float()[outer] + state["nested_offset"]
    return weight.view(stop - start, -1), scale.float().contiguous().view(torch.int32).view(stop - start, -1)


def read_dequantized(source: WeightSource, key: str, dtype: torch.dtype) -> torch.Tensor:
    """A whole weight [out, in] as floats, for a layer that stays as it is."""
    if stored_form(key, source.tensors) == "8bit":
        weight, scale = read_8bit(source, key, 0, source.tensors[key].shape[0])
        return (weight.float() * scale.view(torch.float32).unsqueeze(1) / 127).to(dtype)
    parts = {name.removeprefix(f"{key}."): source.read(name) for name in parts_of(key, source.tensors)}
    state = QuantState.from_dict(parts, device=torch.device("cpu"))
    return dequantize_4bit(source.read(key), state).to(dtype)


def _state(source: WeightSource, key: str) -> dict[str, Any]:
    name = next(name for name in source.tensors if name.startswith(f"{key}.quant_state."))
    try:
        state: dict[str, Any] = json.loads(bytes(source.read(name).tolist()))
        state["quant_type"], state["blocksize"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{source.tensors[name].file}: {name} cannot be read; the file is damaged.") from error
    return state


def _beside(key: str, part: str) -> str:
    return f"{key.removesuffix('weight')}{part}"
