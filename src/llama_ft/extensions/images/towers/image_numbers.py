"""What a model must know of the images of a micro-batch: computed on the host, ahead of time.

Transformers' code reads the sizes of images from the GPU: to number patches, to keep images apart in
attention, to divide features by image, and to find images that are padding. Each time the host waits
for the GPU, in Qwen-VL's towers three times per layer. Here the host computes all of it from its own
copy of the sizes, in the thread that makes batches, by Transformers' own functions.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from transformers import vision_utils

from llama_ft.libraries.evidence import (
    GRID_OF_IMAGES,
    GRID_TOWERS,
    INTERPOLATION,
    PADDED_IMAGES,
    PATCH_MASK,
    PIXEL_MASK,
    PIXELS,
    SIZES_OF_IMAGES,
    TAKES_SIZES,
    WINDOW,
)
from llama_ft.models.base.layers import architecture_of
from llama_ft.runtime.devices import sent

NUMBERS = "image_numbers"  # the model's argument for it
# Models that take the argument, without their LM heads: `encode_without_waits` has changed them.
taking_numbers = WeakSet[nn.Module]()
Tensors = dict[str, torch.Tensor]


class ImageNumbers(Protocol):
    """What a model must know of the images of a micro-batch."""

    @property
    def replaced(self) -> set[str]:
        """The model's arguments that are not passed because the numbers are."""

    def sent(self, device: torch.device) -> "ImageNumbers":
        """Return the same numbers with those for the model's device on it."""

    def features(self, inner: Any, arguments: Tensors) -> Any:
        """Return what the model's `get_image_features` returns.

        Args:
            inner: the model without its LM head.
            arguments: for `get_image_features`, without those of `replaced`.
        """


@dataclass(frozen=True)
class Segments:
    """Images, or windows of images, each of which attention computes alone."""

    lengths: tuple[int, ...]  # patches of each
    offsets: torch.Tensor  # int32 [segments + 1], on the device: 0 and the end of each


@dataclass(frozen=True)
class SizesOnHost:
    """Images whose sizes the model's code gets on the host.

    Attributes:
        sizes: arguments of `get_image_features`, on the host.
        for_tower: what the tower would compute from them, by the names that Transformers accepts.
        segments: `for_tower` that are offsets -> the lengths between them.
    """

    sizes: Tensors
    for_tower: dict[str, Any] = field(default_factory=dict)
    segments: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def replaced(self) -> set[str]:
        """See `ImageNumbers`."""
        return set(self.sizes)

    def sent(self, device: torch.device) -> "SizesOnHost":
        """See `ImageNumbers`."""
        for_tower = dict(self.for_tower)
        for name, value in self.for_tower.items():
            if isinstance(value, torch.Tensor):
                for_tower[name] = sent(value, device)
        if self.segments:
            parts = [Segments(lengths, for_tower[name]) for name, lengths in self.segments.items()]
            for_tower["image_segments"] = tuple(parts)
        return replace(self, for_tower=for_tower)

    def features(self, inner: Any, arguments: Tensors) -> Any:
        """See `ImageNumbers`."""
        further = self.sizes | self.for_tower
        return inner.get_image_features(**arguments, **further, return_dict=True)


@dataclass(frozen=True)
class RealImages:
    """Images among which some are padding (Idefics 3, SmolVLM). The features are computed here as in
    the model's own `get_image_features`, which looks for padding on the GPU.

    Attributes:
        places: int64 [images], which images of all samples are none; None: all of them.
        patches: bool [images, rows, columns], which patches have pixels.
    """

    places: torch.Tensor | None
    patches: torch.Tensor

    @property
    def replaced(self) -> set[str]:
        """See `ImageNumbers`."""
        return {PIXEL_MASK}

    def sent(self, device: torch.device) -> "RealImages":
        """See `ImageNumbers`."""
        places = None if self.places is None else sent(self.places, device)
        return RealImages(places, sent(self.patches, device))

    def features(self, inner: Any, arguments: Tensors) -> Any:
        """See `ImageNumbers`."""
        pixels = arguments[PIXELS].to(dtype=inner.dtype).flatten(0, 1)
        if self.places is not None:
            pixels = pixels.index_select(0, self.places)
        masks = {PATCH_MASK: self.patches}
        output = inner.vision_model(pixel_values=pixels, return_dict=True, **masks)
        features = inner.connector(output.last_hidden_state)
        output.pooler_output = [features.flatten(0, 1)]
        return output


def numbers_of(model: Any, tensors: Tensors) -> ImageNumbers | None:
    """Return the numbers of images, still on the host; None if the model does not take them.

    Args:
        model: with its towers.
        tensors: arguments of the model, on the host.
    """
    inner = model.base_model
    if inner not in taking_numbers:
        return None
    name = architecture_of(inner)
    sizes = {each: tensors[each] for each in SIZES_OF_IMAGES if each in tensors}
    if name in GRID_TOWERS and GRID_OF_IMAGES in sizes:
        return _of_grid(inner.visual, sizes)
    if name in TAKES_SIZES and sizes:
        return SizesOnHost(sizes)
    if name in PADDED_IMAGES and PIXELS in tensors:
        return _real_images(inner, tensors)
    return None


def _of_grid(tower: Any, sizes: Tensors) -> SizesOnHost:
    """Return what a tower of Qwen-VL's kind would compute from the grid of images: int64 [images, 3],
    frames, and rows and columns of patches."""
    grid = sizes[GRID_OF_IMAGES]
    merge = tower.spatial_merge_size
    for_tower: dict[str, Any] = {
        "image_position_ids": vision_utils.get_vision_position_ids(grid, merge)
    }
    offsets = {"image_cu_seqlens": vision_utils.get_vision_cu_seqlens(grid)}
    longest = {"image_cu_seqlens": "image_max_seqlen"}
    if hasattr(tower, INTERPOLATION):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        for_tower |= {"image_interp_indices": indices, "image_interp_weights": weights}
    if hasattr(tower, WINDOW):
        for_tower["image_window_index"], offsets["image_cu_window_seqlens"] = (
            vision_utils.get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        )
        longest["image_cu_window_seqlens"] = "image_max_window_seqlen"
    lengths = {name: tuple(ends.diff().tolist()) for name, ends in offsets.items()}
    for name, of_segments in lengths.items():
        for_tower[longest[name]] = max(of_segments)
    return SizesOnHost(sizes, for_tower | offsets, lengths)


def _real_images(inner: Any, tensors: Tensors) -> RealImages:
    """Return which images [samples, images, channels, height, width] are not padding, which is 0, and
    which of their patches have pixels."""
    pixels = tensors[PIXELS].flatten(0, 1)
    is_real = ~(pixels == 0).flatten(1).all(dim=1)
    mask = tensors.get(PIXEL_MASK)
    mask = torch.ones_like(pixels[:, 0]) if mask is None else mask.flatten(0, 1)
    if not is_real.any():  # SmolVLM computes one image in any case
        is_real[0] = True
    side = inner.config.vision_config.patch_size
    patches = mask.unfold(1, side, side).unfold(2, side, side).sum(dim=(-1, -2)) > 0
    places = is_real.nonzero().flatten()
    if len(places) == len(pixels):
        return RealImages(None, patches)
    return RealImages(places, patches[places])
