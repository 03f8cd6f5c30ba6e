"""A hash of what a sample says. It decides whether --validation 0.1 keeps the sample out of training.

It does not contain what training ignores (other columns, ids of messages and of tool calls, white
space), nor what depends on the tokenizer or the chat template. So exact duplicates are on one side,
also in other formats, and models with other tokenizers are compared on the same samples.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from llama_ft.data.read.chats import REASONING
from llama_ft.data.read.formats import (
    FORMATS,
    PREFERENCE,
    Content,
    Message,
    Sample,
    SampleFormat,
    TokenizedSample,
    pair_contents,
)

# Increase it with any change of `content_hash`: a resumed run would have other validation samples.
# 1 was a hash of all columns.
SPLIT_VERSION = 2


def contents_of(sample: Sample, sample_format: SampleFormat) -> list[Content]:
    """Return the content of a valid sample, whose media are parts of its messages; both contents of a
    pair."""
    if sample_format == PREFERENCE:
        return [*pair_contents(sample)]
    return [FORMATS[sample_format].read(sample)]


def tool_counts(contents: list[Content]) -> tuple[int, int]:
    """Return the number of tool calls, and of results of tools."""
    calls = 0
    results = 0
    for content in contents:
        for message in content if isinstance(content, list) else ():
            calls += len(message.get("tool_calls") or ())
            results += message["role"] == "tool"
    return calls, results


def content_hash(contents: list[Content], media: bytes = b"") -> int:
    """Return a 64-bit hash of what a sample says, a random number.

    Args:
        contents: of the sample, see `contents_of`.
        media: checksums of its files.
    """
    said = [list(_said(content)) for content in contents]
    text = json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)
    # surrogatepass: JSON allows half a surrogate pair, which UTF-8 cannot encode
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass") + media).digest()
    return int.from_bytes(digest[:8], "big")


def _said(content: Content) -> Iterator[Any]:
    """Yield the texts of a content in order, or its tokens."""
    if isinstance(content, TokenizedSample):
        yield content.input_ids
    elif isinstance(content, tuple):
        prompt, completion = content
        yield _words(prompt + completion)
    else:
        for message in content:
            text = _words(_text_of(message))
            if text or message.get("tool_calls"):  # else an empty system message, or only media
                yield message["role"]
                yield text
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                yield function.get("name")
                yield _without_nulls(function.get("arguments"))


def _text_of(message: Message) -> str:
    """Return the text of a message without its reasoning content: with --reasoning_content drop,
    samples that differ in nothing else are duplicates. It is all that some responses have."""
    content = message["content"] or ""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    text = str(content)
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2]
        if not text.strip() and not message.get("tool_calls"):
            return " ".join(str(message[key]) for key in REASONING if message.get(key)) + content
    return text


def _words(text: str) -> str:
    return " ".join(text.split())


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls that columnar data have for keys of other samples."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
