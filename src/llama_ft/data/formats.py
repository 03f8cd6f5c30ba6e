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


def find_format(dataset: str, columns: Collection[str], wanted: str) -> RowFormat:
    """Tell the format of a dataset from its columns, or check that the format asked for fits them.

    A column `text` decides only where nothing else fits: alpaca files often have the rendered row there too.

    Args:
        dataset: its name, for messages.
        columns: the column names found.
        wanted: `auto` or a format (`--dataset_format`).

    Raises:
        UserError: there is no such format, or the columns fit no format, several, or not the one asked for.
    """
    expected = {name: " and ".join(known.required) for name, known in FORMATS.items()}
    fitting = [name for name, known in FORMATS.items() if set(known.required) <= set(columns)]
    if wanted in fitting:
        return wanted
    if wanted not in ("auto", *FORMATS):
        raise UserError(f"--dataset_format {wanted}: expected auto, {', '.join(FORMATS)}.")
    found = f"{dataset}: its columns are {', '.join(sorted(columns))}"
    if wanted != "auto":
        raise UserError(f"{found}. --dataset_format {wanted} needs {expected[wanted]}.")
    if not fitting:
        raise UserError(
            f"{found}.\nExpected {', or '.join(f'{needed} ({name})' for name, needed in expected.items())}."
        )
    plainly = [name for name in fitting if name != "text"] or fitting
    if len(plainly) > 1:
        raise UserError(f"{found}, which fit {' and '.join(plainly)}.\n--dataset_format says which is meant.")
    return plainly[0]


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
        raise BadRow(f'"history" is {_shown(history)}; expected a list of pairs of question and answer.')
    turns = list[tuple[str, Any]]()
    for number, pair in enumerate(history):
        for side, role in enumerate(("user", "assistant")):
            turns.append((f"history[{number}][{side}]", {"role": role, "content": pair[side]}))
    turns.append(("instruction", {"role": "user", "content": instruction}))
    turns.append(("output", {"role": "assistant", "content": output}))
    return _checked_chat(_with_system(row, turns))


def chat_messages(row: Row) -> list[Message]:
    """Check the messages of a row and return them without their empty fields.

    They are an optional system message, then user and assistant in alternation, with tool messages after an assistant;
    the last is an assistant's. Parquet gives every message all keys, so those that are null are taken out. Contents
    that are lists of text parts become text, arguments of tool calls that are JSON text become objects, as templates
    have them.

    Raises:
        BadRow: naming the message and the field.
    """
    return _checked_chat(_with_system(row, _turns(row, "messages")))


def sharegpt_messages(row: Row) -> list[Message]:
    """Check the turns of `conversations` and return them as `chat_messages` does.

    Raises:
        BadRow: naming the turn and the field.
    """
    turns = []
    for place, turn in _turns(row, "conversations"):
        if isinstance(turn, dict) and "from" in turn:
            others = {key: value for key, value in turn.items() if key not in ("from", "value")}
            turn = {**others, "role": turn["from"], "content": turn.get("value")}
        turns.append((place, turn))
    return _checked_chat(_with_system(row, turns), ("from", "value"))


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
        raise BadRow(f'"completion[0].role" is "{messages[len(prompt)]["role"]}"; expected assistant.')
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["weight"] = 0
    return messages


def plain_text(row: Row) -> tuple[str, str]:
    """Return the text of a row for continued pre-training, after an empty prompt.

    Raises:
        BadRow: it is missing, empty or no text.
    """
    return "", _text(row, "text")


def token_row(row: Row) -> TokenRow:
    """Check an already tokenized row; return input_ids and labels of the positions that the attention mask keeps.

    Args:
        row: input_ids, perhaps labels (every token where missing) and perhaps attention_mask, of one length.

    Raises:
        BadRow: naming the column and the position.
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
    """Return the tools a chat may call, from the column `tools`: a list of objects, or its JSON text.

    Raises:
        BadRow: the column holds something else.
    """
    tools = _parsed_if_text(row, "tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f'"tools" is {_shown(tools)}; expected a list of objects, or one as JSON text.')
    return tools or None


def content_text(content: Any, place: str) -> str:
    """Text, or the text of a list of parts.

    Raises:
        BadRow: it is something else.
    """
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f'"{place}" is {_shown(content)}; expected text or text parts.')
    return content


def _turns(row: Row, column: str) -> list[tuple[str, Any]]:
    """The messages of a column, each with its place."""
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f'"{column}" is {_shown(turns)}; expected a list of messages.')
    return [(f"{column}[{index}]", turn) for index, turn in enumerate(turns)]


def _with_system(row: Row, turns: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Put the column `system` before the messages of a chat that has no system message of its own."""
    system, first = row.get("system"), turns[0][1]
    if _is_blank(system) or (isinstance(first, dict) and first.get("role") in ("system", "developer")):
        return turns
    return [("system", {"role": "system", "content": system}), *turns]


def _checked_chat(turns: list[tuple[str, Any]], keys: tuple[str, str] = ("role", "content")) -> list[Message]:
    """Check (place, message) one after another; keys are what the row calls role and content."""
    messages = list[Message]()
    for place, turn in turns:
        if not isinstance(turn, dict):
            raise BadRow(f'"{place}" is {_shown(turn)}; expected an object of {keys[0]} and {keys[1]}.')
        message = {key: value for key, value in turn.items() if value is not None}
        given = message.get("role")
        role = message["role"] = ROLES.get(given) if isinstance(given, str) else None
        allowed = ROLES_AFTER[messages[-1]["role"] if messages else None]
        if role not in allowed:
            raise BadRow(f'"{place}.{keys[0]}" is {_shown(given)}; expected {" or ".join(allowed)} here.')
        if message.get("tool_calls"):
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
        may_be_empty = role in ("system", "tool") or (role == "assistant" and message.get("tool_calls"))
        if role == "assistant" and may_be_empty:
            message.setdefault("content", "")
        message["content"] = content_text(message.get("content"), f"{place}.{keys[1]}")
        if not may_be_empty and not message["content"].strip():
            raise BadRow(f'"{place}.{keys[1]}" is empty; expected what the {role} says.')
        if message.get("weight", 1) not in (0, 1):
            raise BadRow(f'"{place}.weight" is {_shown(message["weight"])}; expected 0 (not trained on) or 1.')
        messages.append(message)
    if messages[-1]["role"] != "assistant":
        raise BadRow(f'"{turns[-1][0]}.{keys[0]}", the last, is "{messages[-1]["role"]}"; expected assistant.')
    return messages


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f'"{place}" is {_shown(calls)}; expected a list of objects.')
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """OpenAI's arguments are JSON text; templates write objects as JSON, and would quote text a second time."""
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, f"{place}.function")}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    return {**call, "arguments": _parsed(arguments, f"{place}.arguments") if arguments.strip() else {}}


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f'"{place}" is {_shown(text)}; expected JSON.') from None


def _parsed_if_text(row: Row, column: str) -> Any:
    """A column as it is, or what its JSON text says: a .csv has nothing but text."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    return _parsed(value, column) if value.strip() else None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _integers(row: Row, column: str) -> list[int]:
    values = row.get(column)
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:  # not isinstance: True is an int
        raise BadRow(f'"{column}" is {_shown(values)}; expected a list of integers.')
    return values


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f'"{column}" is {_shown(value)}; expected text.')
    return value


def _shown(value: Any) -> str:
    """A value as it fits into one line of a message."""
    if value is None or value in ("", [], {}):
        return "missing" if value is None else "empty"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "tools"), alpaca_messages),
    "messages": Format(("messages",), ("system", "tools"), chat_messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), sharegpt_messages),
    "prompt_completion": Format(("prompt", "completion"), ("system", "tools"), prompt_completion),
    "text": Format(("text",), (), plain_text),
    "tokenized": Format(("input_ids",), ("labels", "attention_mask"), token_row),
}
