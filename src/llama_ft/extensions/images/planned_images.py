"""Images in a planned micro-batch. The model's own processor says how many tokens and which tensors
they take. Pixels have no storage in a plan."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from transformers import PretrainedConfig

from llama_ft import data, models
from llama_ft.data import Batch
from llama_ft.data.tokenize.statistics import SplitStatistics
from llama_ft.errors import UserError
from llama_ft.extensions.images.image_inputs import ImageTensors
from llama_ft.plan.types import PlanRequest

if TYPE_CHECKING:
    from llama_ft.extensions.images.processor import Images

ASSUMED_PIXELS = 1_000_000  # of an image, if neither its tokens nor max_pixels are known
SMALLEST_SIDE = 16  # pixels
CLOSE = 0.03  # a difference of an image's tokens that is small enough


@dataclass(frozen=True)
class PlannedImages:
    """The images of a planned micro-batch."""

    per_example: int = 1  # in each packed sequence, or in each padded sample
    tokens: int | None = None  # of one; None: of an image of --max_pixels, or of 1 megapixel
    per_token: float = 0.0  # of a packed sequence, if that is more than `per_example`

    @classmethod
    def of(cls, train: SplitStatistics, is_packed: bool) -> "PlannedImages":
        """Return the images to plan for samples: of a packed sequence as many as in the mean, but at
        least those of the sample with the most; of a padded sample those of that sample."""
        if not train.media:  # streamed samples are not counted
            return cls()
        tokens = -(-train.media_tokens // train.media)
        count = -(-train.longest_media // tokens)
        return cls(count, tokens, train.media / train.tokens if is_packed else 0.0)

    def example(
        self, request: PlanRequest, model_config: PretrainedConfig, length: int
    ) -> "PlannedImageExample":
        """Return what examples of `length` tokens begin with.

        Raises:
            UserError: the model has no processor, or an image takes more tokens than a sample has.
        """
        images = _images_of(request, model_config)
        pixels = request.config.data.max_pixels or ASSUMED_PIXELS
        side = math.isqrt(pixels)
        if self.tokens is not None:
            side = _side_for(images, side, self.tokens)
        count = max(1, self.per_example, round(self.per_token * length))
        example = PlannedImageExample(images, side, count)
        while _tokens(example) > length:
            if example.count > 1:
                example.count -= 1
            elif example.side > SMALLEST_SIDE:
                example.side = max(SMALLEST_SIDE, example.side * 4 // 5)
            else:
                raise UserError(f"--context_length {length}: shorter than one image.")
        return example


@dataclass
class PlannedImageExample:
    """What an example of a micro-batch begins with: a message with square images."""

    images: "Images"
    side: int  # pixels
    count: int

    def batch(self, plain: Batch) -> Batch:
        """Return a micro-batch in which each example begins with this message."""
        examples = len(plain.example_lengths)
        rows, tensors = self.images.assumed(self.side, self.count, examples)
        input_ids = plain.input_ids.clone()
        lengths = plain.example_lengths
        starts = [0] * examples
        if plain.is_packed:
            starts = [sum(lengths[:number]) for number in range(examples)]
        per_token = {name: torch.zeros_like(input_ids) for name in tensors.per_token}
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            place = 0 if plain.is_packed else number
            end = start + len(row)
            input_ids[place, start:end] = torch.tensor(row)
            for name, values in tensors.per_token.items():
                per_token[name][place, start:end] = values[number, : len(row)]
        return Batch(
            input_ids,
            plain.labels,
            lengths,
            plain.is_packed,
            plain.locations,
            plain.desirable,
            ImageTensors(per_token, tensors.others),
        )


def _images_of(request: PlanRequest, model_config: PretrainedConfig) -> "Images":
    """Return the model's reader of images, checked. Raises UserError if it has none."""
    config = request.config
    model = config.model
    problem = models.why_text_only(model_config, config.preference.objective)
    if problem:
        raise UserError(f"--images: {problem}.")
    folder = request.folder
    if model.tokenizer_name is not None:
        folder = models.local_folder(model.tokenizer_name, "--tokenizer_name", weights=False)
    tokenizer = models.load_tokenizer(folder, model.trust_remote_code)
    media_model = data.MediaModel(request.folder, model_config, tokenizer, model.trust_remote_code)
    media = data.media_reader().load(media_model, config.data, data.cache_dir())
    data.ensure_chat_template(tokenizer, config.data.chat_template, model.resize_embeddings)
    media.check()
    return cast("Images", media)


def _tokens(example: PlannedImageExample) -> int:
    [row], _ = example.images.assumed(example.side, example.count, 1)
    return len(row)


def _side_for(images: "Images", side: int, tokens: int) -> int:
    """Return the side of a square image with about this number of tokens, beginning with `side`. Some
    processors make the same number for all images."""
    for _ in range(4):
        one = _tokens(PlannedImageExample(images, side, 1))
        two = _tokens(PlannedImageExample(images, side, 2))
        added = two - one
        if abs(added - tokens) <= CLOSE * tokens:
            break
        side = max(SMALLEST_SIDE, round(side * math.sqrt(tokens / max(added, 1))))
    return side
