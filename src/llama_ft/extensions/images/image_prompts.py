"""Prompts with images: their tokens, the tensors for `generate`, and small pictures for the report."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from llama_ft.data.chat.loss_mask import RenderedChat
from llama_ft.data.media import MediaPrompt
from llama_ft.data.read.formats import Message
from llama_ft.data.read.media import media_paths, user_message
from llama_ft.extensions.images import cross_attention

if TYPE_CHECKING:
    from llama_ft.extensions.images.processor import Images

THUMBNAIL_SIDE = 240  # pixels of the longer side
THUMBNAIL_BYTES = 24_000
QUALITIES = (75, 40, 10)  # of JPEG; the first one that is small enough is taken


def image_prompt(images: "Images", text: str, messages: list[Message]) -> MediaPrompt:
    """Return the tokens of a chat with images.

    Args:
        images: runs the model's processor.
        text: what the chat template writes, up to the place of the answer.
        messages: of the chat, with their `MediaPart`s.

    Raises:
        BadSample: an image cannot be read, or the template does not write all of them.
    """
    # also of messages that were JSON
    as_parts = [user_message("", media_paths(messages))]
    expanded = images.expand(RenderedChat(text, [], []), as_parts)
    return MediaPrompt(expanded.input_ids, text, expanded.references)


def prompt_tensors(
    images: "Images", prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Return the tokens of prompts, and what the processor makes for them by its own names. Tensors
    with a number per token have padding on the left, as `generate` needs it.

    If no prompt has an image, there is one more at the end, with a gray image: all ranks must run
    the parts for images.
    """
    texts = [getattr(prompt, "text", None) for prompt in prompts]
    references = [getattr(prompt, "media", None) for prompt in prompts]
    places = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    samples = [torch.tensor(prompt) for prompt in prompts]
    samples, tensors = images.tensors(samples, texts, references, places, is_packed=False)
    arguments = dict(tensors.others)
    by_token = dict(tensors.per_token)
    if cross_attention.MASK in arguments:
        by_token[cross_attention.MASK] = arguments[cross_attention.MASK]
    for name, values in by_token.items():
        width = values.shape[1]
        moved = []
        for row, sample in zip(values, samples, strict=True):
            moved.append(row.roll(width - len(sample), dims=0))
        arguments[name] = torch.stack(moved)
    return [sample.tolist() for sample in samples], arguments


def thumbnail(path: str) -> str:
    """Return a small picture of an image as a data: URL of at most THUMBNAIL_BYTES characters; "" if
    its file is gone or broken."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image.draft("RGB", (THUMBNAIL_SIDE, THUMBNAIL_SIDE))  # decode large JPEGs smaller
            upright: Image.Image = ImageOps.exif_transpose(image)
            small = upright.convert("RGB")
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    # PIL raises many classes for broken files; the report lacks this picture then
    except Exception:
        return ""
    for quality in QUALITIES:
        written = io.BytesIO()
        small.save(written, "JPEG", quality=quality)
        url = "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
        if len(url) <= THUMBNAIL_BYTES:
            return url
    return ""
