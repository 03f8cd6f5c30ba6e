"""Images in a planned micro-batch. The model's own processor says how many tokens and which tensors
they take. Pixels have no storage in a plan."""

import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from llama_ft import data, models
from llama_ft.config import Config
from llama_ft.data import Batch
from llama_ft.data.batches.prefetch import STEPS_AHEAD
from llama_ft.data.images.image_parts import ImageStore
from llama_ft.data.images.processor import ImageTensors
from llama_ft.errors import UserError
from llama_ft.plan.types import PlannedImages, PlanRequest

ASSUMED_PIXELS = 1_000_000  # of an image, if neither its tokens nor max_pixels are known
SMALLEST_SIDE = 16  # pixels
CLOSE = 0.03  # a difference of an image's tokens that is small enough


@dataclass
class PlannedExample:
    """What an example of a micro-batch begins with: a message with square images."""

    images: data.Images
    side: int  # pixels
    count: int

    def batch(self, plain: Batch) -> Batch:
        """Return a micro-batch in which each example begins with this message."""
        examples = len(plain.example_lengths)
        rows, made = self.images.assumed(self.side, self.count, examples)
        input_ids = plain.input_ids.clone()
        lengths = plain.example_lengths
        starts = [0] * examples
        if plain.is_packed:
            starts = [sum(lengths[:number]) for number in range(examples)]
        per_token = {name: torch.zeros_like(input_ids) for name in made.per_token}
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            place = 0 if plain.is_packed else number
            end = start + len(row)
            input_ids[place, start:end] = torch.tensor(row)
            for name, values in made.per_token.items():
                per_token[name][place, start:end] = values[number, : len(row)]
        return Batch(
            input_ids,
            plain.labels,
            lengths,
            plain.is_packed,
            plain.locations,
            plain.desirable,
            ImageTensors(per_token, made.others),
        )


def plan_example(
    request: PlanRequest, model_config: PretrainedConfig, length: int
) -> PlannedExample | None:
    """Return what examples of `length` tokens begin with; None if samples have no images.

    Raises:
        UserError: the model has no processor, or an image takes more tokens than a sample has.
    """
    wanted = request.images
    if wanted is None and models.trains_images(request.config.model):
        wanted = PlannedImages()
    if wanted is None:
        return None
    model = request.config.model
    problem = models.why_no_images(model_config, request.config.preference.objective)
    if problem:
        raise UserError(f"--images: {problem}.")
    folder = request.folder
    if model.tokenizer_name is not None:
        folder = models.local_folder(model.tokenizer_name, "--tokenizer_name", weights=False)
    tokenizer = models.load_tokenizer(folder, model.trust_remote_code)
    processor = data.load_processor(
        request.folder, model_config, tokenizer, model.trust_remote_code
    )
    store = ImageStore(data.cache_dir(), is_full=True)
    images = data.Images(processor, store, request.config.data.max_pixels)
    if not tokenizer.chat_template:
        tokenizer.chat_template = images.chat_template
    template = request.config.data.chat_template
    data.ensure_chat_template(tokenizer, template, model.resize_embeddings)
    images.check()
    pixels = request.config.data.max_pixels or ASSUMED_PIXELS
    side = math.isqrt(pixels)
    if wanted.tokens is not None:
        side = _side_for(images, side, wanted.tokens)
    count = max(1, wanted.per_example, round(wanted.per_token * length))
    example = PlannedExample(images, side, count)
    while _tokens(example) > length:
        if example.count > 1:
            example.count -= 1
        elif example.side > SMALLEST_SIDE:
            example.side = max(SMALLEST_SIDE, example.side * 4 // 5)
        else:
            raise UserError(f"--context_length {length}: shorter than one image.")
    return example


def _tokens(example: PlannedExample) -> int:
    [row], _ = example.images.assumed(example.side, example.count, 1)
    return len(row)


def _side_for(images: data.Images, side: int, tokens: int) -> int:
    """Return the side of a square image with about this number of tokens, beginning with `side`. Some
    processors make the same number for all images."""
    for _ in range(4):
        one = _tokens(PlannedExample(images, side, 1))
        two = _tokens(PlannedExample(images, side, 2))
        found = two - one
        if abs(found - tokens) <= CLOSE * tokens:
            break
        side = max(SMALLEST_SIDE, round(side * math.sqrt(tokens / max(found, 1))))
    return side


def fake_pixels(batch: Batch, config: Config, device: str) -> list[torch.Tensor]:
    """Replace the pixels of a micro-batch by tensors without storage, which count as memory. Return
    those of further micro-batches that wait in host memory, if that is the device's."""
    if batch.images is None:
        return []
    waiting = []
    steps = STEPS_AHEAD + 1 if device == "cpu" else 0
    others = batch.images.others
    for name, values in others.items():
        if not values.is_floating_point():
            continue  # numbers of patches are read by the model's code
        others[name] = torch.empty(values.shape, dtype=values.dtype)
        for _ in range(steps * config.train.gradient_accumulation_steps):
            waiting.append(torch.empty(values.shape, dtype=values.dtype))
    return waiting
