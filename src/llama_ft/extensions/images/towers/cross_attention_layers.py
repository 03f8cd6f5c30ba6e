"""Layers that see images by cross attention (Llama 3.2 Vision), in batches of several samples.

Transformers' code makes a sample's result depend on the other samples of its batch:

- a sample without images skips these layers if it is alone, and does not in a batch with images
- tokens before the first image see all tiles of the batch: also those of images that only other
  samples have

Hooks here make both as if each sample was alone.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.libraries.evidence import CROSS_ATTENTION, CROSS_ATTENTION_BIAS, SEES_IMAGES


def keep_cross_attention_apart(model: PreTrainedModel) -> None:
    """Let layers with cross attention compute each sample of a batch as if it was alone."""
    for layer in model.modules():
        if isinstance(getattr(layer, CROSS_ATTENTION, None), nn.Module):
            tower = model.config.vision_config
            patches = (tower.image_size // tower.patch_size) ** 2 + 1  # of a tile, and its class
            own_images = partial(_own_images, tower.max_num_tiles * patches)
            layer.register_forward_pre_hook(own_images, with_kwargs=True)
            layer.register_forward_hook(_skip_without_images, with_kwargs=True)


def _own_images(
    keys_per_image: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Let tokens that see no image attend to the images of their own sample only, and convert the
    mask to the dtype of the layer's input, which mixed precision may have changed."""
    bias, sees = kwargs.get(CROSS_ATTENTION_BIAS), kwargs.get(SEES_IMAGES)
    if bias is None or sees is None:
        return None
    hidden = args[0]
    lowest = torch.finfo(hidden.dtype).min
    bias = bias.clamp(min=lowest).to(hidden.dtype)
    sees = sees.to(hidden.dtype)
    seen = ((bias == 0) & (sees != 0)).any(dim=2, keepdim=True)  # [samples, 1, 1, keys]
    by_image = seen.unflatten(-1, (-1, keys_per_image))
    own = by_image.any(dim=-1, keepdim=True).expand_as(by_image).flatten(-2)
    # without any key the softmax would be of nothing; `_skip_without_images` drops the result
    own = own | ~own.any(dim=-1, keepdim=True)
    bias = bias.masked_fill((sees == 0) & ~own, lowest)
    return args, kwargs | {CROSS_ATTENTION_BIAS: bias, SEES_IMAGES: sees}


def _skip_without_images(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor | None:
    """Return the input of samples without images."""
    sees = kwargs.get(SEES_IMAGES)
    if sees is None:
        return None
    has_images = (sees != 0).any(dim=2)  # [samples, 1, 1]
    return torch.where(has_images, output, args[0])
