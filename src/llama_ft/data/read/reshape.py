"""Change samples as the settings ask: rename columns, keep only the first samples, repair chats."""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from llama_ft.config.objectives import PROMPTS
from llama_ft.config.settings.settings import DataConfig
from llama_ft.data.read.files import Samples
from llama_ft.data.read.formats import (
    FORMATS,
    PREFERENCE,
    ROLES,
    UNPAIRED,
    BadSample,
    Sample,
    unpaired,
)
from llama_ft.data.read.media import COLUMNS as MEDIA_COLUMNS
from llama_ft.data.read.media import MESSAGES
from llama_ft.data.read.sources import Source
from llama_ft.data.read.values import LEARNED_IF_TRUE, LOSS_KEYS, RenamedSample, in_own_names
from llama_ft.errors import UserError

# Common column names for a prompt and its response, in datasets that follow no format.
COMMON = {
    "question": "instruction", "query": "instruction", "problem": "instruction", "prompt": "instruction",
    "context": "input", "answer": "output", "response": "output", "solution": "output",
}  # fmt: skip
CHATS = ("messages", "conversations")


def reshaped(source: Source, config: DataConfig, most: int = 0) -> Source:
    """Return the source with `--columns` and `--repair_chats` applied to its samples.

    A pair becomes two samples if completions with a label are trained on.

    Args:
        source: the original samples.
        config: the settings.
        most: maximum number of samples, per part of a dataset mixture; 0 = all.
    """
    if source.datasets:
        datasets = tuple(reshaped(dataset, config, most) for dataset in source.datasets)
        identity = " ".join(dataset.identity for dataset in datasets)
        return dataclasses.replace(source, datasets=datasets, identity=identity)
    names = _names(source, config)
    splits_pairs = config.dataset_format == UNPAIRED
    if not names and not most and not config.repair_chats and not splits_pairs:
        return source
    original_names = {ours: theirs for theirs, ours in names.items()}

    def read() -> Samples:
        for place, sample in itertools.islice(source.read(), most or None):
            if isinstance(sample, BadSample):
                yield place, sample
                continue
            try:
                changed = _samples(sample, names, config)
            except BadSample as problem:
                renamed = RenamedSample(sample, original_names)
                yield place, BadSample(in_own_names(problem, renamed))
                continue
            for one in changed:
                original = sample
                if len(changed) > 1:  # the completions of a pair may be in different splits
                    original = {original_names.get(name, name): one[name] for name in one}
                yield place, RenamedSample(one, original_names, original)

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
    if not isinstance(messages, list):
        return messages
    if not all(isinstance(message, dict) for message in messages):
        return messages
    chat = list[dict[str, Any]]()
    has_user = False
    for original in messages:
        message = _with_role(original)
        role = message["role"]
        if role == "assistant" and not has_user:
            continue
        if role == "user":
            has_user = True
        # A tool message is the result of one call, so it stays alone.
        can_merge = bool(chat) and chat[-1]["role"] == role and role != "tool"
        if can_merge and role == "assistant":  # one may be in the loss, and the other not
            can_merge = _loss_keys(chat[-1]) == _loss_keys(message)
        if can_merge and _is_text(chat[-1]) and _is_text(message):
            chat[-1]["content"] += "\n\n" + message["content"]
        else:
            chat.append(message)
    while chat and not _is_final_response(chat[-1]):
        chat.pop()
    return chat


def _with_role(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the keys role and content instead of ShareGPT's from and value, and a
    function_call as a tool call."""
    keys = ("from", "value") if "from" in message else ("role", "content")
    role_key, content_key = keys
    changed = {key: value for key, value in message.items() if key not in keys}
    changed["content"] = message.get(content_key)
    role = message.get(role_key)
    changed["role"] = ROLES.get(str(role), role)
    if changed["role"] == "function_call":
        changed["role"] = "assistant"
        changed["tool_calls"] = _calls(changed["content"])
        changed["content"] = ""
    return changed


def _loss_keys(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a message says about the loss, without what equals saying nothing."""
    said = {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}
    return {key: value for key, value in said.items() if value != (key in LEARNED_IF_TRUE)}


def _is_text(message: dict[str, Any]) -> bool:
    return isinstance(message["content"], str) and not message.get("tool_calls")


def _is_final_response(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _calls(text: Any) -> Any:
    """Return the tool calls in a function_call message, whose content is JSON text of one call or
    of a list."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return text
    if not isinstance(calls, list):
        calls = [calls]
    return [{"type": "function", "function": call} for call in calls]


def _samples(sample: Sample, names: Mapping[str, str], config: DataConfig) -> list[Sample]:
    renamed = {names.get(column, column): value for column, value in sample.items()}
    if config.repair_chats:
        for column in CHATS:
            if column in renamed:
                renamed[column] = repaired(renamed[column])
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
    renamed = {names.get(column, column) for column in columns}
    return names if _fit(renamed) else {}


def _pairs(columns: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield column in the data, column of a format, of each part of `--columns`."""
    supported = set[str](MEDIA_COLUMNS)
    for one in FORMATS.values():
        supported.update(one.required, one.optional)
    for pair in columns:
        left, equals, right = pair.partition("=")
        ours = left.strip()
        theirs = right.strip()
        if ours not in supported:
            ours = COMMON.get(ours, "")
        if not equals or not ours or not theirs:
            expected = f"such as question=Question,answer=Answer; left of = is one of {', '.join(sorted(supported))}"
            raise UserError(f"--columns {pair}: expected our name = yours, {expected}.")
        yield theirs, ours


def _fit(columns: Collection[str]) -> bool:
    """Return whether one of the formats that are recognized by their columns fits."""
    names = set(columns)
    fitting = [name for name, one in FORMATS.items() if names.issuperset(one.required)]
    # Pairs and prompts are not recognized: objective and format must ask for them.
    return any(name not in (PREFERENCE, PROMPTS) for name in fitting)


def describe_columns(dataset: Source, sample_format: str, with_media: bool) -> str:
    """Return the format of a dataset with the columns that it reads and those that it ignores."""
    columns = dataset.columns
    original_names = {ours: theirs for theirs, ours in dataset.renamed.items()}
    supported = [*FORMATS[sample_format].required, *FORMATS[sample_format].optional]
    if with_media and sample_format in MESSAGES:
        supported += MEDIA_COLUMNS
    used = []
    for column in supported:
        if column in columns and column in original_names:
            used.append(f"{column} ({original_names[column]})")
        elif column in columns:
            used.append(column)
    text = f"format {sample_format}, columns {', '.join(used)}"
    ignored = sorted(columns.difference(supported))
    if ignored and sample_format != PROMPTS:  # rewards get whole samples
        text += f"; ignored: {', '.join(ignored)}"
    return text


def look_at_formats(
    source: Source, format_name: str, with_media: bool
) -> tuple[set[type], list[str]]:
    """Return the types of the first samples' contents (list: a chat), and a line on format and
    columns per part."""
    kinds = set[type]()
    lines = list[str]()
    for dataset in source.datasets or (source,):
        sample_format = dataset.sample_format(format_name)
        read = FORMATS[sample_format].read
        for sample in dataset.first_samples:
            # Bad samples are reported later, when all samples are read.
            with suppress(BadSample, LookupError, TypeError, AttributeError, ValueError):
                kinds.add(type(read(sample)))
        lines.append(f"{dataset.name}: {describe_columns(dataset, sample_format, with_media)}")
    return kinds, lines
