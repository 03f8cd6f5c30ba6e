"""Find what is valid in a sample but probably not meant, so that a run warns of it once."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from llama_ft.config.data_names import data_suffix
from llama_ft.data.read.chats import REASONING
from llama_ft.data.read.formats import (
    FORMATS,
    PREFERENCE,
    RESPONSES,
    ROLES,
    UNPAIRED,
    Sample,
    SampleFormat,
)
from llama_ft.data.read.media import FILE_OF_PLACE, notes_of_marks
from llama_ft.data.read.traces.anthropic import has_encrypted_reasoning
from llama_ft.data.read.values import LEARNED_IF_TRUE, LOSS_KEYS

# columns that may hold messages, by format
CHATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    PREFERENCE: ("prompt", "chosen", "rejected"),
    UNPAIRED: ("prompt", "completion"),
}
USED_KEYS = {
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function_call",
    *LOSS_KEYS,
    *REASONING,
}
# keys of a JSON schema whose value may be null
NULLABLE = {"default", "const", "example", "examples", "enum"}
# as which pandas writes a missing value into text
MISSING_VALUES = {"nan", "<na>", "nat"}
AS_MISSING = "as which pandas writes a missing value"
WAY_OUT = "Write the samples as Parquet, or give the column datasets' type Json."


def notes_of(
    sample: Sample, sample_format: SampleFormat, place: str, template: Any, takes_media: bool
) -> set[str]:
    """Return what should be said about a valid sample. Equal texts are counted together.

    Args:
        sample: as it was read.
        sample_format: its format.
        place: where it was read, such as `my.jsonl:381`.
        template: the tokenizer's chat template, or several by name; None: there is none.
        takes_media: whether the model does.
    """
    if sample_format == "tokenized":
        return set()
    notes = set(_of_responses(sample))
    chats = [_parsed(sample.get(column)) for column in CHATS.get(sample_format, ())]
    messages = [message for chat in chats if isinstance(chat, list) for message in chat]
    for message in messages:
        if isinstance(message, dict):
            notes.update(_of_message(message, str(template)))
    match = FILE_OF_PLACE.fullmatch(place)
    if match and data_suffix(match[1]) in (".json", ".jsonl"):
        # Columnar files have such nulls, too, but there they are removed.
        notes.update(_of_nulls(sample.get("tools"), messages))
    if takes_media:
        one = FORMATS[sample_format]
        notes.update(notes_of_marks(sample, (*one.required, *one.optional)))
    return notes


def _of_responses(sample: Sample) -> Iterator[str]:
    """Yield what is odd about responses that are classes or texts."""
    original_names = getattr(sample, "original_names", {})
    for column in (*RESPONSES, "text"):
        value = sample.get(column)
        name = original_names.get(column, column)
        if isinstance(value, float) and value.is_integer():
            yield (
                f'"{name}" is a whole number with .0, which is trained on as text. Integers become such '
                "numbers in a column with a missing value. Write integers or texts"
            )
        if _is_missing_value(value):
            yield f'"{name}" is the text {value.strip()}, {AS_MISSING}'


def _is_missing_value(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.strip().lower() in MISSING_VALUES


def _of_message(message: Mapping[str, Any], template: str) -> Iterator[str]:
    """Yield what is odd about a message."""
    role = ROLES.get(str(message.get("role", message.get("from"))))
    if role != "assistant":
        for key in LEARNED_IF_TRUE[1:]:  # OpenAI's weight may be 1 in all messages
            if message.get(key) in (True, 1):
                yield f'"{key}" is true in a message of role {role}. Only assistant messages are trained on'
        return
    content = message.get("value", message.get("content"))
    if _is_missing_value(content):
        yield f"an assistant message is the text {content.strip()}, {AS_MISSING}"
    if has_encrypted_reasoning(message):
        yield "redacted_thinking is left out: its text is encrypted"
    for key, value in message.items():
        if value is None or key in USED_KEYS:
            continue
        if not _uses(template, key):
            yield f'the key "{key}" of assistant messages is ignored: the chat template does not use it'


@functools.lru_cache(maxsize=256)
def _uses(template: str, key: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def _of_nulls(tools: Any, messages: list[Any]) -> Iterator[str]:
    """Yield what is odd about nulls in tools and tool calls: `datasets` gives each object the keys of
    all objects of its column, and writes null for the missing ones."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict) and _has_null(arguments):
                yield (
                    "the arguments of a tool call have nulls, which are trained on. `datasets` writes them "
                    f"into JSON for arguments of other calls. {WAY_OUT}"
                )
    if isinstance(tools, list) and _has_null(tools):
        yield (
            "the column tools has nulls, which the chat template may write. `datasets` writes them into JSON "
            f"for keys of other tools. {WAY_OUT}"
        )


def _has_null(value: Any) -> bool:
    """Return whether an object in `value` has a null."""
    if isinstance(value, dict):
        fields = [inner for key, inner in value.items() if key not in NULLABLE]
        return None in fields or any(map(_has_null, fields))
    return isinstance(value, list) and any(map(_has_null, value))


def _parsed(value: Any) -> Any:
    """Return a column of messages, which may be JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:  # a text that begins with [
            return None
    return value
