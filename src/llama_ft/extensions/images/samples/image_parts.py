"""Images in samples: content parts and columns of several kinds become one form.

    {"type": "image", "image": "a.png"}           a part of a user message's content
    {"type": "image_url", "image_url": {...}}     the same in OpenAI's form, with a data: URL
    {"type": "image"}                             takes the next image of the column images
    "<image>\\nWhat is this?"                      marks in a text take them, too (LLaVA)

A preference pair has them in its prompt, or in each of two whole chats.

An image is a path, relative to the data file, or its bytes: base64, a data: URL, or `datasets`'
{"bytes", "path"}. Bytes are written into the cache once, so afterwards each image is a file, and a
tokenized sample only has its path.
"""

import base64
import binascii
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from llama_ft.data.read.formats import (
    PREFERENCE,
    ROLES,
    BadSample,
    Sample,
    SampleFormat,
    expect,
)
from llama_ft.data.read.media import (
    COLUMNS,
    FOLDER,
    MARK,
    MESSAGES,
    MediaPart,
    has_media,
    have_media,
    is_media,
)

# keys of a part that hold the image, as TRL, OpenAI and Transformers name them
KEYS = ("image", "image_url", "path", "url", "base64")
EXPECTED = 'a path, base64, a data: URL, or {"bytes", "path"}'


def have_marks(samples: Iterable[Sample]) -> bool:
    """Return whether one of the samples has a mark in a message of the user."""
    for sample in samples:
        for column in chain.from_iterable(MESSAGES.values()):
            messages = sample.get(column)
            if isinstance(messages, list) and any(map(_has_mark, messages)):
                return True
    return False


def _has_mark(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    text = message.get("value", message.get("content"))
    return _role(message) == "user" and isinstance(text, str) and MARK in text


def _role(message: dict[str, Any]) -> str | None:
    return ROLES.get(str(message.get("role", message.get("from"))))


def with_absolute_paths(sample: Sample, folder: str, columns: Iterable[str]) -> dict[str, Any]:
    """Return a sample whose images have absolute paths, for a data file in another directory.

    Args:
        sample: as it was read.
        folder: the directory of its data file.
        columns: names of the columns of images.
    """
    images = set(columns)
    return {
        name: _absolute(value, folder) if name in images else _absolute_in_parts(value, folder)
        for name, value in sample.items()
    }


def _absolute_in_parts(value: Any, folder: str) -> Any:
    """Return messages whose image parts have absolute paths."""
    if isinstance(value, list):
        return [_absolute_in_parts(one, folder) for one in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _absolute_in_parts(one, folder) for name, one in value.items()}
    if is_media(value):
        changed |= {name: _absolute(value[name], folder) for name in KEYS if name in value}
    return changed


def _absolute(value: Any, folder: str) -> Any:
    """Return an image, or a list of them, with an absolute path if it is a file."""
    if isinstance(value, list):
        return [_absolute(one, folder) for one in value]
    if isinstance(value, dict):
        return {name: _absolute(one, folder) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    path = _path_of(value, folder)
    return os.path.abspath(path) if os.path.isfile(path) else value


def _path_of(text: str, folder: str) -> str:
    """Return the path that a text in a data file of `folder` may mean."""
    return os.path.join(folder, os.path.expanduser(text.removeprefix("file://")))


class ImageStore:
    """Files of images whose bytes are in the data. Equal images are one file.

    Args:
        cache: the directory of cached data.
        is_full: it takes no further image. A stream may be larger than the disk, and the rank that
            reads a sample is not the one that trains on it.
    """

    def __init__(self, cache: Path, is_full: bool = False) -> None:
        self.cache = cache
        self._is_full = is_full
        self._folder = cache / "images"
        self._whole = set[str]()  # names of files that were compared or written

    def keep(self, content: bytes) -> str:
        """Return the path of a file with this content. A corrupted file in the cache is written again.

        Raises:
            BadSample: it takes no further image.
        """
        if self._is_full:
            raise BadSample(
                "its image is in the data itself, which --streaming does not support; write images "
                "to files and name their paths."
            )
        name = xxhash.xxh3_128_hexdigest(content)
        path = self._folder / name[:2] / name
        if name in self._whole:
            return str(path)
        if not _holds(path, content):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.rmtree(path)
            temporary = path.with_name(f".{name}-{uuid.uuid4().hex[:8]}")
            with temporary.open("wb") as file:
                file.write(content)
                # the tokens that name this file are synced, too
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        self._whole.add(name)
        return str(path)

    def is_corrupted(self, path: Path) -> bool:
        """Return whether a file that `keep` has written has changed since, or is missing. Other
        files are the user's."""
        if path.parent.parent != self._folder:
            return False
        try:
            return xxhash.xxh3_128_hexdigest(path.read_bytes()) != path.name
        except OSError:
            return True


def _holds(path: Path, content: bytes) -> bool:
    """Return whether a file has this content. It may be a directory or a pipe, or unreadable."""
    try:
        return path.is_file() and path.read_bytes() == content
    except OSError:
        return False


def with_image_parts(sample: Sample, sample_format: SampleFormat, store: ImageStore) -> Sample:
    """Return a sample whose images are `MediaPart`s of its messages, with absolute paths. A sample
    without images, or of another format, stays as it is. (An empty column counts if there are marks.)

    Raises:
        BadSample: an image is missing, or not as many as marks; it does not say what is in a file.
    """
    folder = str(sample.get(FOLDER, ""))
    values = {name: value for name, value in sample.items() if name != FOLDER}
    is_empty = not have_media([values])
    has_column = any(name in values for name in COLUMNS)
    if is_empty and not (has_column and have_marks([values])):
        return values
    if sample_format == PREFERENCE:
        values = dict(_with_messages(values))
    columns = MESSAGES.get(sample_format, ())
    chats = {name: values[name] for name in columns if isinstance(values.get(name), list)}
    if not chats:
        return values
    column, images = _column(values)
    values = {name: value for name, value in values.items() if name not in COLUMNS}
    for name, messages in chats.items():
        has_prompt = not _is_response(messages)
        reader = _Reader(folder, store, column, images if has_prompt else None)
        values[name] = [
            reader.message(message, f"{name}[{number}]") for number, message in enumerate(messages)
        ]
        if has_prompt:
            reader.check_all_used()
    return values


def _with_messages(pair: Sample) -> Sample:
    """Return a pair with images whose prompt is a list of messages.

    Raises:
        BadSample: a response is text. A pair of texts has no chat template, so it has no place for
            an image.
    """
    for name in ("chosen", "rejected"):
        is_list = isinstance(pair.get(name), list)
        expect(is_list, name, pair.get(name), "messages, because the pair has images")
    prompt = pair.get("prompt")
    if isinstance(prompt, str) and _is_response(pair["chosen"]):
        return {**pair, "prompt": [{"role": "user", "content": prompt}]}
    return pair


def _is_response(messages: list[Any]) -> bool:
    """Return whether messages are a response, without their prompt."""
    first = messages[0] if messages else None
    return isinstance(first, dict) and _role(first) == "assistant"


def _column(sample: Sample) -> tuple[str, list[Any] | None]:
    """Return the name of the column with images, and its images; None without such a column."""
    filled = [name for name in COLUMNS if sample.get(name)]
    if not filled:
        name = "image" if "image" in sample and "images" not in sample else "images"
        return name, None if have_media([sample]) else []
    if len(filled) > 1:
        raise BadSample('it has both columns "image" and "images"; expected one of them.')
    [name] = filled
    value = sample[name]
    return name, value if isinstance(value, list) else [value]


class _Reader:
    """Reads the messages of one sample."""

    def __init__(
        self, folder: str, store: ImageStore, column: str, images: list[Any] | None
    ) -> None:
        self._folder = folder
        self._store = store
        self._column = column
        self._images = images
        self._used = 0

    def message(self, message: Any, place: str) -> Any:
        """Return a message with its images as `MediaPart`s."""
        if not isinstance(message, dict):
            return message  # the format says what is wrong
        key = "value" if "from" in message else "content"
        content = message.get(key)
        if isinstance(content, list) and not has_media(content):
            content = list(self._parts(content, f"{place}.{key}"))
        elif isinstance(content, str) and self._images is not None and MARK in content:
            content = list(self._marked(content))
        return {**message, key: content}

    def check_all_used(self) -> None:
        """Raise BadSample if the column has more images, or fewer, than marks and parts."""
        count = len(self._images or ())
        if self._used != count:
            raise BadSample(
                f'"{self._column}" has {count} images, and the messages have {self._used} places for '
                f"them; expected as many {MARK} marks or image parts as images."
            )

    def _parts(self, content: list[Any], place: str) -> Iterator[Any]:
        for number, part in enumerate(content):
            if is_media(part):
                yield self._image(part, f"{place}[{number}]")
            elif isinstance(part, dict):
                # columnar data have the keys of all parts in each
                yield {key: value for key, value in part.items() if key not in KEYS}
            else:
                yield part

    def _marked(self, text: str) -> Iterator[Any]:
        """Yield the parts of a text with marks. The line break next to a mark belongs to it."""
        before, *pieces = text.split(MARK)
        if before.strip():
            yield _text(before.removesuffix("\n"))
        for piece in pieces:
            yield self._next()
            piece = piece.removeprefix("\n")
            if piece.strip():
                yield _text(piece)

    def _image(self, part: dict[str, Any], place: str) -> MediaPart:
        given = [name for name in KEYS if part.get(name) is not None]
        if not given:
            expect(self._images is not None, place, part, f"an image: {EXPECTED}")
            return self._next()
        name = given[0]
        value = part[name]
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        return MediaPart(self._path(value, f"{place}.{name}"))

    def _next(self) -> MediaPart:
        """Return the next image of the column; behind the last one an empty part, which
        `check_all_used` reports."""
        number = self._used
        self._used += 1
        if self._images is None or number >= len(self._images):
            return MediaPart("")
        return MediaPart(self._path(self._images[number], f"{self._column}[{number}]"))

    def _path(self, value: Any, place: str) -> str:
        """Return the path of an image's file."""
        if isinstance(value, dict):
            content = value.get("bytes")
            value = content if content is not None else value.get("path")
        if isinstance(value, bytes):
            return self._store.keep(value)
        expect(isinstance(value, str) and value, place, value, EXPECTED)
        text = str(value)
        if text[:5].lower() == "data:":
            header, _, content = text.partition(",")
            is_base64 = header.lower().endswith(";base64")
            expect(is_base64, place, header, "a data: URL with base64, data:image/png;base64,...")
            return self._store.keep(_decoded(content, place))
        if "://" in text and not text.startswith("file://"):
            raise BadSample(
                f'"{place}" is the URL {text[:80]}; expected a local file. Images are not downloaded.'
            )
        path = _path_of(text, self._folder)
        try:
            if os.path.isfile(path):
                return _utf8(os.path.abspath(path), place)
            if os.path.exists(path):  # opening a FIFO would wait for ever
                raise BadSample(f'"{place}": {path[:200]} is not a regular file.')
        except (OSError, ValueError):  # a path that is too long, or has a null byte
            pass
        if re.fullmatch(r"[A-Za-z0-9+/\s]{64,}=*\s*", text):
            return self._store.keep(_decoded(text, place))
        raise BadSample(f'"{place}": there is no file {path[:200]}.')


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _utf8(path: str, place: str) -> str:
    """Return a path. Raises BadSample if it is not UTF-8: the cache holds text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="replace")
        raise BadSample(f'"{place}": the name of {shown} is not UTF-8; rename it.') from None
    return path


def _decoded(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError) as error:
        raise BadSample(f'"{place}" is not valid base64 ({error}); expected {EXPECTED}.') from None
