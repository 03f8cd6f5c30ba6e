"""Micro-batches of models that see images by cross attention (Llama 3.2 Vision).

Their processor leaves one token per image in the text, and its tensors have a row per sample:

    pixel_values          [samples, images, tiles, channels, height, width]
    cross_attention_mask  [samples, tokens, images, tiles]    which token sees which tile
"""

import re
from typing import Any

import torch

MASK = "cross_attention_mask"
TILES = "aspect_ratio_mask"  # [samples, images, tiles]: 1 for tiles with pixels


def image_marks(text: str, mark: str) -> list[dict[str, Any]]:
    """Return where a text has images, in the form of a processor's `text_replacement_offsets`: each
    mark stays as it is."""
    matches = re.finditer(re.escape(mark), text)
    return [{"span": each.span(), "replacement": mark} for each in matches]


def of_all_samples(
    tensors: dict[str, torch.Tensor], chosen: list[int], lengths: list[int]
) -> dict[str, torch.Tensor]:
    """Return a processor's tensors with a row for each sample of a micro-batch.

    Args:
        tensors: of the samples with images.
        chosen: numbers of these samples.
        lengths: tokens of all samples. The longest one is the length of the padded batch.
    """
    spread = {}
    for name, values in tensors.items():
        if name == MASK:
            values = _with_length(values, max(lengths))
        rows = values.new_zeros(len(lengths), *values.shape[1:])
        if name == TILES:
            rows[:, :, 0] = 1  # as of images that other samples of a batch lack
        rows[torch.tensor(chosen)] = values
        spread[name] = rows
    return spread


def _with_length(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return a mask for so many tokens. No token sees an image in what is added, which is padding."""
    missing = length - mask.shape[1]
    if missing <= 0:
        return mask[:, :length]
    added = mask.new_zeros(mask.shape[0], missing, *mask.shape[2:])
    return torch.cat([mask, added], dim=1)
