"""Quantize the fp32 scales of 4-bit blocks to 8 bits: double quantization
(https://arxiv.org/abs/2305.14314), for each row of a weight by itself.

bitsandbytes subtracts the mean of all scales of a weight and gives every 256 scales a scale of their
own, also across rows. Here the mean and the groups of 256 are those of one row, so rows can be
sharded. A row is quantized as bitsandbytes quantizes a weight of that row alone.

    scale fp32 [rows, blocks]  ->  int32 [rows, words]
    words of a row             codes, four per word | a scale per 256 codes | mean
"""

from functools import cache
from math import ceil

import torch
from bitsandbytes.functional import create_dynamic_map
from torch.nn import functional

GROUP = 256  # scales with the same scale, as in bitsandbytes
# Of bitsandbytes' dynamic data type, by code. Not made on request: a plan would keep fake tensors.
CODE_VALUES = create_dynamic_map()


def words_per_row(blocks: int) -> int:
    """Return the number of int32 words for the scales of a row with so many blocks."""
    return ceil(blocks / 4) + ceil(blocks / GROUP) + 1


def quantize_scales(scale: torch.Tensor) -> torch.Tensor:
    """Quantize scales, fp32 [rows, blocks], to int32 [rows, words]."""
    rows, blocks = scale.shape
    mean = scale.mean(dim=1, keepdim=True)
    padding = -blocks % GROUP  # of zeros, which do not change a group's scale
    centered = functional.pad(scale - mean, (0, padding))
    codes, group_scale = torch.ops.bitsandbytes.quantize_blockwise(
        centered, _code_values(scale.device), GROUP
    )
    code_bytes = codes.view(rows, -1)[:, : 4 * ceil(blocks / 4)].contiguous()
    columns = [code_bytes, group_scale.view(rows, -1), mean]
    return torch.cat([stored.view(torch.int32) for stored in columns], dim=1)


def dequantize_scales(stored: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the scales, fp32 [rows, blocks], of int32 [rows, words]."""
    code_words = ceil(blocks / 4)
    codes = stored[:, :code_words].contiguous().view(torch.uint8)[:, :blocks]
    group_scale = stored[:, code_words:-1].contiguous().view(torch.float32)
    mean = stored[:, -1:].contiguous().view(torch.float32)
    values = _code_values(stored.device)[codes.int()]
    by_block = group_scale.repeat_interleave(GROUP, dim=1)[:, :blocks]
    return values * by_block + mean


@cache
def _code_values(device: torch.device) -> torch.Tensor:
    return CODE_VALUES.to(device)
