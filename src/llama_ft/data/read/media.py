"""What samples hold in addition to text: today images, in parts of messages and in columns.

    {"type": "image", "image": "a.png"}           a part of a user message's content
    {"type": "image_url", "image_url": {...}}     the same in OpenAI's form
    {"type": "image"}                             takes the next image of the column images
    "<image>\\nWhat is this?"                      marks in a text take them, too (LLaVA)

Here it is only found. What reads it, and makes it a model's input, is `Media` in data/media.py.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import datasets

from llama_ft.config.objectives import PREFERENCE
from llama_ft.data.read.values import Sample, expect
from llama_ft.errors import plural

PART_TYPES = ("image", "image_url")
MARK = "<image>"
COLUMNS = ("images", "image")
# columns of messages in the formats whose samples may have media
MESSAGES = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    PREFERENCE: ("prompt", "chosen", "rejected"),
}
# columns that a sample of text leaves empty
ALL_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
FOLDER = "\0folder"  # key of a sample that is being read: the directory of its data file
# the file in a place such as `my.jsonl:381` or `my.parquet row 3`
FILE_OF_PLACE = re.compile(r"(.*?)(?::\d+| row \d+)(?:, .*)?")
EXPECTED = "text, or a list of text parts and image parts"
KIND = "images"  # in messages
# Part of the key of cached samples if the model takes media. It must not change: a checkpoint of a
# streaming run stores the key.
IN_KEY = "takes images"
PATHS = "images"  # key of answers: the paths of the files that the question is about


class MediaPart(dict[str, str]):
    """An image among the parts of a user message: its type, and the path of its file. Only the
    extension that reads images makes them of samples."""

    def __init__(self, path: str) -> None:
        super().__init__(type="image", image=path)


def has_media(content: Any) -> bool:
    """Return whether the content of a message has a `MediaPart`."""
    return isinstance(content, list) and any(isinstance(part, MediaPart) for part in content)


def check_role(role: str | None, place: str) -> None:
    """Raise BadSample if a message with images is not the user's."""
    expect(role == "user", place, "image", f"no image in a message of the {role}")


def is_media(part: Any) -> bool:
    """Return whether a part of a message, as a sample has it, is an image."""
    return isinstance(part, dict) and part.get("type") in PART_TYPES


def have_media(samples: Iterable[Sample]) -> bool:
    """Return whether one of the samples has an image in a column or a content part."""
    return any(_has_media(sample) for sample in samples)


def _has_media(sample: Sample) -> bool:
    if any(sample.get(column) for column in COLUMNS):
        return True
    for column in chain.from_iterable(MESSAGES.values()):
        messages = sample.get(column)
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and any(map(is_media, content)):
                return True
    return False


def located(sample: Sample, place: str) -> Sample:
    """Return a sample that knows the directory of its data file."""
    match = FILE_OF_PLACE.fullmatch(place)
    return {**sample, FOLDER: os.path.dirname(match[1]) if match else ""}


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose parts are plain dicts, as JSON has them."""
    changed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [dict(part) for part in content]}
        changed.append(message)
    return changed


def media_paths(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the paths of the images in a chat, in order."""
    paths = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "image":
                paths.append(str(part["image"]))
    return paths


def user_message(text: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return a message of the user with images, then a text."""
    return {"role": "user", "content": [*map(MediaPart, paths), {"type": "text", "text": text}]}


def with_marked_prompt(sample: Sample) -> Sample:
    """Return a sample whose prompt, if it is a text next to a column of images, is a message. The
    images come first, unless the text has marks."""
    prompt = sample.get("prompt")
    if not isinstance(prompt, str):
        return sample
    images = sample.get("images") or sample.get("image")
    count = len(images) if isinstance(images, list) else 1
    text = prompt if MARK in prompt else MARK * count + prompt
    others = {name: value for name, value in sample.items() if name != "prompt"}
    return {**others, "messages": [{"role": "user", "content": text}]}


def text_of(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def undecoded(feature: Any) -> Any:
    """Return the feature of a column whose images stay the bytes of their files until they are
    needed; None for other columns."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return datasets.List(datasets.Image(decode=False))
    return None


def notes_of_marks(sample: Sample, columns: Iterable[str]) -> Iterator[str]:
    """Yield what should be said about a sample without an image for a model that takes images.
    `columns`: of its texts and messages."""
    if not have_media([sample]) and any(_has_mark(sample.get(column)) for column in columns):
        yield (
            f"a text has {MARK}, and the sample has no image: the mark is trained on as text. If another "
            f"column has the images, name it: --columns {COLUMNS[0]}=NAME"
        )


def _has_mark(value: Any) -> bool:
    """Return whether a text in `value` has a mark for an image."""
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, dict):
        return any(map(_has_mark, value.values()))
    return isinstance(value, list) and any(map(_has_mark, value))


def describe_media(count: int, tokens: int, all_tokens: int, longest: int) -> str:
    """Return the counts of a split for the log.

    Args:
        count: images of the split.
        tokens: tokens that stand for them.
        all_tokens: of the split.
        longest: largest number of such tokens in a sample.
    """
    share = tokens / max(1, all_tokens)
    return (
        f"{plural(count, 'image')} in {tokens:,} tokens ({share:.0%} of all), at most "
        f"{longest:,} in a sample"
    )
