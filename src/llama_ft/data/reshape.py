"""Change samples as the settings ask: rename columns, keep only the first samples, repair chats."""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llama_ft.config.settings import DataConfig
from llama_ft.data.files import Samples
from llama_ft.data.formats import FORMATS, PREFERENCE, ROLES, UNPAIRED, BadSample, Sample, unpaired
from llama_ft.data.sources import Source
from llama_ft.errors import UserError

# Common column names for a prompt and its response, in datasets that follow no format.
COMMON = {
    "question": "instruction", "query": "instruction", "problem": "instruction", "prompt": "instruction",
    "context": "input", "answer": "output", "response": "output", "solution": "output",
}  # fmt: skip
CHATS = ("messages", "conversations")


def reshaped(source: Source, config: DataConfig, most: int = 0) -> Source:
    """Return the source with `--columns` and `--repair_chats` applied to its samples. KTO makes two
    of a pair.

    Args:
        source: the original samples.
        config: the settings.
        most: maximum number of samples, per part of a dataset mixture; 0 = all.
    """
    if source.parts:
        parts = tuple(reshaped(part, config, most) for part in source.parts)
        return dataclasses.replace(
            source, parts=parts, identity=" ".join(part.identity for part in parts)
        )
    names = _names(source, config)
    if not names and not most and not config.repair_chats and config.dataset_format != UNPAIRED:
        return source

    def read() -> Samples:
        for place, sample in itertools.islice(source.read(), most or None):
            try:
                samples: list[Sample | BadSample] = (
                    [sample]
                    if isinstance(sample, BadSample)
                    else [*_samples(sample, names, config)]
                )
            except BadSample as problem:
                samples = [problem]
            yield from ((place, it) for it in samples)

    options = json.dumps([names, most, config.repair_chats])
    return dataclasses.replace(
        source, read=read, identity=f"{source.identity} {options}", renamed=names
    )


def repaired(messages: Any) -> Any:
    """Return a chat in which user and assistant messages alternate.

    Assistant messages before the first user message and messages after the last response are
    removed. Neighboring messages of one role are merged. LLaMA-Factory's function_call becomes a
    tool call of the assistant. Any value that is not a list of messages is returned unchanged.
    """
    if not isinstance(messages, list) or not all(isinstance(it, dict) for it in messages):
        return messages
    chat = list[dict[str, Any]]()
    for given in messages:
        role, text = ("from", "value") if "from" in given else ("role", "content")
        said = {
            **{key: value for key, value in given.items() if key not in (role, text)},
            "content": given.get(text),
        }
        said["role"] = ROLES.get(str(given.get(role)), given.get(role))
        if said["role"] == "function_call":
            said |= {"role": "assistant", "content": "", "tool_calls": _calls(said["content"])}
        if said["role"] == "assistant" and not any(it["role"] == "user" for it in chat):
            continue
        are_texts = chat and all(
            isinstance(it["content"], str) and not it.get("tool_calls") for it in (chat[-1], said)
        )
        if are_texts and said["role"] == chat[-1]["role"] != "tool":
            chat[-1]["content"] += "\n\n" + said["content"]
        else:
            chat.append(said)
    while chat and (chat[-1]["role"] != "assistant" or chat[-1].get("tool_calls")):
        chat.pop()
    return chat


def _calls(text: Any) -> Any:
    """Return the tool calls in a function_call message, whose content is JSON text of one call or
    of a list."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return text
    return [
        {"type": "function", "function": call}
        for call in (calls if isinstance(calls, list) else [calls])
    ]


def _samples(sample: Sample, names: Mapping[str, str], config: DataConfig) -> list[Sample]:
    renamed = {names.get(column, column): value for column, value in sample.items()}
    if config.repair_chats:
        renamed |= {column: repaired(renamed[column]) for column in CHATS if column in renamed}
    return unpaired(renamed) if config.dataset_format == UNPAIRED else [renamed]


def _names(source: Source, config: DataConfig) -> dict[str, str]:
    """Return column in the data -> column of a format: from `--columns`, else by COMMON if no
    format fits."""
    columns = source.columns
    names = dict(_pairs(config.columns))
    if missing := [theirs for theirs in names if theirs not in columns]:
        raise UserError(
            f"--columns: {source.name} has no column {missing[0]}. It has {', '.join(sorted(columns))}."
        )
    if names or config.dataset_format != "auto" or _fit(columns):
        return names
    names = {}
    for column in sorted(columns):
        ours = COMMON.get(column.lower())
        if ours and ours not in names.values():
            names[column] = ours
    return names if _fit({names.get(column, column) for column in columns}) else {}


def _pairs(columns: Collection[str]) -> Iterator[tuple[str, str]]:
    known = {name for each in FORMATS.values() for name in (*each.required, *each.optional)}
    for pair in columns:
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        ours = ours if ours in known else COMMON.get(ours, "")
        if not equals or not ours or not theirs:
            expected = f"such as question=Question,answer=Answer; left of = is one of {', '.join(sorted(known))}"
            raise UserError(f"--columns {pair}: expected our name = yours, {expected}.")
        yield theirs, ours


def _fit(columns: Collection[str]) -> bool:
    """Return whether one of the formats that are recognized by their columns fits."""
    return any(
        set(known.required) <= set(columns) for name, known in FORMATS.items() if name != PREFERENCE
    )
