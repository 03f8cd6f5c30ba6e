"""What a row of data must look like: alpaca columns, chat messages, prompt and completion, text or tokens; and what is
wrong with one that does not. A further format is a function and an entry in FORMATS, see docs/adding-a-format.md."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from llama_ft.errors import UserError

RowFormat = str
Row = Mapping[str, Any]
Message = dict[str, Any]


class TokenRow(NamedTuple):
    """A row that is tokenized already; labels are -100 where not trained on, and not shifted."""

    input_ids: list[int]
    labels: list[int]


# Messages of a chat; a prompt and its completion, of plain text the prompt is empty; or tokens.
Content = list[Message] | tuple[str, str] | TokenRow


class Format(NamedTuple):
    """A format of rows.

    Attributes:
        required: columns by which it is recognised.
        optional: further columns that it reads.
        read: what a row holds; BadRow says what is wrong with one.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Row], Content]


ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool", "developer": "system",
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
ROLES_AFTER = {
    None: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}  # fmt: skip


class BadRow(Exception):
    """A row that cannot be trained on. The text says what is wrong in it; where it stands is the reader's to say."""

    @classmethod
    def of(cls, place: str, value: Any, expected: str) -> "BadRow":
        """Say that the field `place` of a row is `value`, and what was expected there."""
        shown = json.dumps(value, ensure_ascii=False, default=str)
        is_nothing = value is None or value in ("", [], {})
        shown = ("missing" if value is None else "empty") if is_nothing else shown[:60] + "..." * (len(shown) > 60)
        return cls(f'"{place}" is {shown}; expected {expected}.')


def find_format(dataset: str, columns: Collection[str], wanted: str) -> RowFormat:
    """Tell the format of a dataset from its columns, or check that the format asked for fits them.

    A column `text` decides only where nothing else fits: alpaca files often have the rendered row there too.

    Args:
        dataset: its name, for messages.
        columns: the column names found.
        wanted: `auto` or a format (`--dataset_format`).

    Raises:
        UserError: the columns fit no format, several, or not the one asked for.
    """
    fitting = [name for name, known in FORMATS.items() if set(known.required) <= set(columns)]
    if wanted in fitting:
        return wanted
    plainly = [name for name in fitting if name != "text"] or fitting
    if wanted == "auto" and len(plainly) == 1:
        return plainly[0]
    known = ", ".join(f"{name} ({' and '.join(one.required)})" for name, one in FORMATS.items())
    fits = f"which fit {' and '.join(plainly) or 'no format'}"
    raise UserError(
        f"{dataset}: its columns are {', '.join(sorted(columns))}, {fits}; --dataset_format is {wanted}.\n"
        f"Expected columns of one of these formats, or --dataset_format with its name: {known}."
    )


def alpaca_messages(row: Row, *, input_heading: str = "") -> list[Message]:
    """Turn an alpaca row into a prompt and its response, after its system message and earlier prompts and responses.

    Args:
        row: columns instruction, output and perhaps input, system and history (pairs of prompt and response).
        input_heading: text put before the input, such as `### Input:` and a line break.

    Raises:
        BadRow: a field is missing, empty or no text.
    """
    instruction, output = _text(row, "instruction"), _text(row, "output")
    if not _is_blank(row.get("input")):
        instruction += f"\n\n{input_heading}{_text(row, 'input')}"
    history = _parsed_if_text(row, "history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow.of("history", history, "a list of pairs of question and answer")
    turns = list[tuple[str, Any]]()
    for number, pair in enumerate(history):
        for side, role in enumerate(("user", "assistant")):
            turns.append((f"history[{number}][{side}]", {"role": role, "content": pair[side]}))
    turns.append(("instruction", {"role": "user", "content": instruction}))
    turns.append(("output", {"role": "assistant", "content": output}))
    return _checked_chat(_with_system(row, turns))


def chat_messages(row: Row, column: str = "messages") -> list[Message]:
    """Check the messages of a row and return them without their empty fields.

    They are an optional system message, then user and assistant in alternation, with tool messages after an assistant;
    the last is an assistant's. ShareGPT's keys from and value count as role and content. Contents that are lists of
    text parts become text, arguments of tool calls that are JSON text become objects, as templates have them.

    Raises:
        BadRow: naming the message and the field.
    """
    return _checked_chat(_with_system(row, _turns(row, column)))


def sharegpt_messages(row: Row) -> list[Message]:
    """Check the turns of `conversations` and return them as `chat_messages` does."""
    return chat_messages(row, "conversations")


def prompt_completion(row: Row) -> tuple[str, str] | list[Message]:
    """Check a prompt and its completion. A column system stands before a prompt of text, with a blank line between.

    Returns:
        Both texts; or, if both are lists of messages, one chat in which the assistant messages of the prompt have
        weight 0, so that only the completion's are trained on.

    Raises:
        BadRow: a column is missing, empty, or not of the same kind as the other.
    """
    if not isinstance(row.get("prompt"), list):
        system = "" if _is_blank(row.get("system")) else _text(row, "system") + "\n\n"
        return system + _text(row, "prompt"), _text(row, "completion")
    prompt = _with_system(row, _turns(row, "prompt"))
    messages = _checked_chat([*prompt, *_turns(row, "completion")])
    if messages[len(prompt)]["role"] != "assistant":
        raise BadRow.of("completion[0].role", messages[len(prompt)]["role"], "assistant")
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["weight"] = 0
    return messages


def plain_text(row: Row) -> tuple[str, str]:
    """Return the text of a row for continued pre-training, after an empty prompt."""
    return "", _text(row, "text")


def token_row(row: Row) -> TokenRow:
    """Check an already tokenized row; return input_ids and labels of the positions that the attention mask keeps.

    Args:
        row: input_ids, perhaps labels (every token where missing) and perhaps attention_mask, of one length.

    Raises:
        BadRow: naming the column.
    """
    input_ids = _integers(row, "input_ids")
    labels = input_ids if row.get("labels") is None else _integers(row, "labels")
    mask = [1] * len(input_ids) if row.get("attention_mask") is None else _integers(row, "attention_mask")
    if not input_ids or not len(input_ids) == len(labels) == len(mask):
        lengths = f"input_ids {len(input_ids)}, labels {len(labels)}, attention_mask {len(mask)}"
        raise BadRow(f"its columns have {lengths} entries; expected as many in each, and at least one.")
    kept = [index for index, keep in enumerate(mask) if keep]
    return TokenRow([input_ids[index] for index in kept], [labels[index] for index in kept])


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """Return the tools a chat may call, from the column `tools`: a list of objects, or its JSON text."""
    return _objects(_parsed_if_text(row, "tools") or [], "tools") or None


def content_text(content: Any, place: str) -> str:
    """Text, or the text of a list of parts.

    Raises:
        BadRow: it is something else.
    """
    if isinstance(content, list) and all(isinstance(it, dict) and isinstance(it.get("text"), str) for it in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow.of(place, content, "text or text parts")
    return content


def _turns(row: Row, column: str) -> list[tuple[str, Any]]:
    """The messages of a column, each with its place."""
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise BadRow.of(column, turns, "a list of messages")
    return [(f"{column}[{index}]", turn) for index, turn in enumerate(turns)]


def _with_system(row: Row, turns: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Put the column `system` before the messages of a chat that has no system message of its own."""
    system, first = row.get("system"), turns[0][1]
    if _is_blank(system) or (isinstance(first, dict) and first.get("role") in ("system", "developer")):
        return turns
    return [("system", {"role": "system", "content": system}), *turns]


def _checked_chat(turns: list[tuple[str, Any]]) -> list[Message]:
    """Check (place, message) one after another."""
    messages = list[Message]()
    for place, turn in turns:
        if not isinstance(turn, dict):
            raise BadRow.of(place, turn, "an object of role and content")
        keys = ("from", "value") if "from" in turn else ("role", "content")
        message: Message = {"role": turn.get(keys[0]), "content": turn.get(keys[1])}
        message |= {key: value for key, value in turn.items() if key not in keys and value is not None}
        role = message["role"] = ROLES.get(str(message["role"]))
        allowed = ROLES_AFTER[messages[-1]["role"] if messages else None]
        if role not in allowed:
            raise BadRow.of(f"{place}.{keys[0]}", turn.get(keys[0]), f"{' or '.join(allowed)} here")
        if calls := message.get("tool_calls"):
            calls = _objects(calls, f"{place}.tool_calls")
            message["tool_calls"] = [_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(calls)]
        may_be_empty = role in ("system", "tool") or (role == "assistant" and calls)
        if message["content"] is None and role == "assistant" and calls:
            message["content"] = ""
        message["content"] = content_text(message["content"], f"{place}.{keys[1]}")
        if not may_be_empty and not message["content"].strip():
            raise BadRow.of(f"{place}.{keys[1]}", "", f"what the {role} says")
        if message.get("weight", 1) not in (0, 1):
            raise BadRow.of(f"{place}.weight", message["weight"], "0 (not trained on) or 1")
        messages.append(message)
    if messages[-1]["role"] != "assistant":
        raise BadRow.of(turns[-1][0], messages[-1]["role"], "an assistant's message as the last")
    return messages


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """OpenAI's arguments are JSON text; templates write objects as JSON, and would quote text a second time."""
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, f"{place}.function")}
    if not isinstance(call.get("arguments"), str):
        return call
    return {**call, "arguments": _parsed_if_text(call, "arguments", f"{place}.") or {}}


def _parsed_if_text(row: Row, column: str, place: str = "") -> Any:
    """A column as it is, or what its JSON text says: a .csv has nothing but text."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise BadRow.of(place + column, value, "JSON") from None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _objects(values: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise BadRow.of(place, values, "a list of objects")
    return values


def _integers(row: Row, column: str) -> list[int]:
    values = row.get(column)
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:  # not isinstance: True is an int
        raise BadRow.of(column, values, "a list of integers")
    return values


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise BadRow.of(column, value, "text")
    return value


FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "tools"), alpaca_messages),
    "messages": Format(("messages",), ("system", "tools"), chat_messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), sharegpt_messages),
    "prompt_completion": Format(("prompt", "completion"), ("system", "tools"), prompt_completion),
    "text": Format(("text",), (), plain_text),
    "tokenized": Format(("input_ids",), ("labels", "attention_mask"), token_row),
}
