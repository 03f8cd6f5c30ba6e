"""Weights of checkpoints that bitsandbytes has quantized to 4 bits. They stay so, for QLoRA.

Transformers saves such a layer as `weight` [out * in / 2, 1], `weight.absmax` and a few tensors that
describe them. With double quantization `weight.absmax` itself is in 8 bits, in blocks of 256 across
rows. It is converted to fp32, one scale per block, without a loss.
"""

import json
import re
from collections.abc import Container
from typing import Any

import torch

from llama_ft.errors import UserError
from llama_ft.models.base.source import WeightSource
from llama_ft.models.quantization.layers import FourBit

# Names of tensors that describe how another tensor is quantized.
PART = re.compile(r"(.*\.weight)\.((nested_)?(absmax|quant_map)|quant_state\..*)")


def belongs_to_4bit(name: str, keys: Container[str]) -> bool:
    """Return whether a stored tensor describes the quantization of one of the weights `keys`."""
    match = PART.fullmatch(name)
    return match is not None and match[1] in keys


def is_4bit(key: str, headers: Container[str]) -> bool:
    """Return whether the checkpoint holds the weight `key` in 4 bits."""
    return f"{key}.absmax" in headers


def read_4bit(
    source: WeightSource, key: str, in_features: int, scheme: FourBit, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read rows [start, stop), which must be whole blocks. Return weight, uint8 [n, in / 2], and
    scale [n, in / block size], fp32 bits as int32."""
    # Transformers can store the bytes as another dtype
    itemsize = source.tensors[key].dtype.itemsize
    a_row = in_features // 2 // itemsize
    stored = source.read_rows(key, start * a_row, stop * a_row)
    weight = stored.contiguous().view(torch.uint8)
    # bitsandbytes stores its settings as JSON in a uint8 tensor.
    state_name = next(name for name in source.tensors if name.startswith(f"{key}.quant_state."))
    state: dict[str, Any] = json.loads(bytes(source.read(state_name).tolist()))
    if (state["quant_type"], state["blocksize"]) != (scheme.quant_type, scheme.block_size):
        raise UserError(
            f"{source.tensors[key].file}: {key} is not stored in {scheme.name}, as config.json says."
        )
    blocks = in_features // scheme.block_size
    first = start * blocks
    last = stop * blocks
    scale = source.read_rows(f"{key}.absmax", first, last)
    if "nested_blocksize" in state:
        outer = torch.arange(first, last) // state["nested_blocksize"]
        code = source.read(f"{key}.nested_quant_map")
        outer_scale = source.read(f"{key}.nested_absmax")
        # Double quantization: the scales are codes of 8 bits, with scales of their own.
        inner_values = code.float()[scale.long()]
        outer_values = outer_scale.float()[outer]
        scale = inner_values * outer_values + state["nested_offset"]
    scale_bits = scale.float().contiguous().view(torch.int32)
    rows = stop - start
    return weight.view(rows, -1), scale_bits.view(rows, -1)
