"""Samples with images that `check_packing` compares, packed and alone."""

from typing import TYPE_CHECKING, Any

import pyarrow.compute
import torch
from datasets import Dataset

from llama_ft.data import Batch, collate
from llama_ft.models import BuiltModel
from llama_ft.training.check_packing import COMPARED_SAMPLES, TOKENS, Segment, last_positions
from llama_ft.training.objectives.base import model_call

if TYPE_CHECKING:
    from llama_ft.extensions.images.processor import Images

SEARCHED_SAMPLES = 100  # for some with an image


class ImageSamples:
    """A few whole samples, some with images: what `check_packing` calls `ComparedSamples`.

    Args:
        built: the model.
        samples: tokenized samples.
        images: makes pixels.
        device: where the model computes.
    """

    def __init__(
        self, built: BuiltModel, samples: Dataset, images: "Images", device: torch.device
    ) -> None:
        self._built = built
        self._samples = samples
        self._images = images
        self._device = device
        first = samples.with_format("arrow")[: min(SEARCHED_SAMPLES, len(samples))]
        has_image = first["text"].is_valid().to_pylist()
        with_image = [number for number, has in enumerate(has_image) if has]
        others = [number for number, has in enumerate(has_image) if not has]
        # a text between images, if there is one
        self._chosen = sorted(
            [*with_image[:2], *others[: max(1, COMPARED_SAMPLES - len(with_image))]]
        )
        self._chosen = self._chosen[:COMPARED_SAMPLES]
        lengths = pyarrow.compute.list_value_length(first["input_ids"]).to_pylist()
        self.lengths: list[int] = [lengths[number] for number in self._chosen]
        self.segments: list[Segment] = []
        for number, length in enumerate(self.lengths):
            self.segments.append((number, last_positions(length)))
            of_images = self._of_images(number)
            if len(of_images):
                self.segments.append((number, of_images))

    def _of_images(self, number: int) -> torch.Tensor:
        """Return the first positions of a sample's images. In Gemma 3, tokens of an image see later
        ones of it, and packed attention is causal. The last tokens of the sample hardly show it."""
        batch = collate(self._samples, [self._chosen[number]], 0, False, self._images)
        tensors: Any = batch.media
        length = self.lengths[number]
        is_image = torch.zeros(length, dtype=torch.bool)
        for values in tensors.per_token.values():
            is_image |= values[0, :length] != 0
        return is_image.nonzero().flatten()[:TOKENS]

    def alone(self, number: int) -> dict[str, Any]:
        """Return the arguments for one sample."""
        batch = self._batch([self._chosen[number]], is_packed=False)
        return model_call(self._built, batch, self._device).inputs

    def packed(self) -> Batch:
        """Return all samples in one sequence."""
        return self._batch(self._chosen, is_packed=True)

    def _batch(self, chosen: list[int], is_packed: bool) -> Batch:
        return collate(self._samples, chosen, 0, is_packed, self._images)
