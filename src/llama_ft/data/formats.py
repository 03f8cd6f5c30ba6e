"""What a row of data must look like: alpaca columns, chat messages, prompt and completion, text or tokens; and what is
wrong with one that does not."""

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


# Turns of a chat; a prompt and its completion, of plain text the prompt is empty; or tokens.
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


EXPECTED = (
    "Expected are instruction, output and optionally input, system and history (alpaca); messages, a list of turns of "
    "role\nand content; conversations, turns of from and value (sharegpt); prompt and completion; text; or input_ids "
    "and\noptionally labels (tokenized)."
)
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool", **{role: role for role in ROLES},
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
        UserError: the columns fit no format, several, or not the one asked for.
    """
    found = "its columns are " + ", ".join(sorted(columns)) if columns else "it has no columns"
    fitting = [name for name, known in FORMATS.items() if set(known.required) <= set(columns)]
    if wanted in fitting:
        return wanted
    if wanted != "auto":
        needed = " and ".join(FORMATS[wanted].required)
        raise UserError(f"{dataset}: --dataset_format {wanted} needs {needed}, but {found}.")
    if not fitting:
        raise UserError(f"{dataset}: {found}.\n{EXPECTED}")
    plainly = [name for name in fitting if name != "text"] or fitting
    if len(plainly) > 1:
        raise UserError(
            f"{dataset}: {found}, which fit {' and '.join(plainly)}.\n--dataset_format says which is meant."
        )
    return plainly[0]


def alpaca_messages(row: Row, *, input_heading: str = "") -> list[Message]:
    """Turn an alpaca row into a question and its answer, after its system turn and earlier questions and answers.

    Args:
        row: columns instruction, output and perhaps input, system and history (pairs of question and answer).
        input_heading: text put before the input, such as `### Input:` and a line break.

    Raises:
        BadRow: a field is missing, empty or no text.
    """
    instruction = _text(row, "instruction", "the question")
    answer = _text(row, "output", "the answer")
    context = row.get("input")
    if context is not None and not isinstance(context, str):
        raise BadRow(f'"input" is {_shown(context)}; expected text.')
    if context and context.strip():
        instruction += f"\n\n{input_heading}{context}"
    history = _parsed_if_text(row, "history", "pairs of question and answer") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow(f'"history" is {_shown(history)}; expected a list of pairs of question and answer.')
    turns: list[tuple[str, Any]] = []
    for number, (question, earlier) in enumerate(history):
        turns.append((f"history[{number}][0]", {"role": "user", "content": question}))
        turns.append((f"history[{number}][1]", {"role": "assistant", "content": earlier}))
    turns.append(("instruction", {"role": "user", "content": instruction}))
    turns.append(("output", {"role": "assistant", "content": answer}))
    return _checked_chat(_with_system(row, turns))


def chat_messages(row: Row) -> list[Message]:
    """Check the chat turns of a row and return them without their empty fields.

    Turns are an optional system turn, then user and assistant in alternation, with tool turns after an assistant; the
    last is an assistant's. Parquet gives every turn all keys, so those that are null are taken out. Contents that are
    lists of text parts become text, arguments of tool calls that are JSON text become objects, as templates have them.

    Raises:
        BadRow: naming the turn and the field.
    """
    turns = [(f"messages[{index}]", turn) for index, turn in enumerate(_turns(row, "messages"))]
    return _checked_chat(_with_system(row, turns))


def sharegpt_messages(row: Row) -> list[Message]:
    """Check the turns of `conversations` and return them as `chat_messages` does.

    Raises:
        BadRow: naming the turn and the field.
    """
    turns, keys = [], ("role", "content")
    for index, turn in enumerate(_turns(row, "conversations", "from and value")):
        place = f"conversations[{index}]"
        if isinstance(turn, dict) and "from" in turn:
            speaker = turn["from"]
            role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
            if role is None:
                raise BadRow(f'"{place}.from" is {_shown(speaker)}; expected system, human, gpt or tool.')
            others = {key: value for key, value in turn.items() if key not in ("from", "value")}
            turn, keys = {**others, "role": role, "content": turn.get("value")}, ("from", "value")
        turns.append((place, turn))
    return _checked_chat(_with_system(row, turns), keys)


def prompt_completion(row: Row) -> tuple[str, str] | list[Message]:
    """Check a prompt and its completion. A column system stands before a prompt of text, with a blank line between.

    Returns:
        Both texts; or, where both are lists of turns, one chat in which the assistant turns of the prompt have weight
        0, so that only the completion's are trained on.

    Raises:
        BadRow: a column is missing, empty, or not of the same kind as the other.
    """
    if not isinstance(row.get("prompt"), list):
        system = "" if _is_blank(row.get("system")) else _text(row, "system", "the system prompt") + "\n\n"
        return system + _text(row, "prompt", "the prompt"), _text(row, "completion", "the completion")
    turns = _with_system(row, [(f"prompt[{index}]", turn) for index, turn in enumerate(_turns(row, "prompt"))])
    asked = len(turns)
    turns += [(f"completion[{index}]", turn) for index, turn in enumerate(_turns(row, "completion"))]
    messages = _checked_chat(turns)
    if messages[asked]["role"] != "assistant":
        raise BadRow(f'"completion[0].role" is "{messages[asked]["role"]}"; expected assistant.')
    return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in messages[:asked]] + messages[
        asked:
    ]


def plain_text(row: Row) -> tuple[str, str]:
    """Return the text of a row for continued pre-training, after an empty prompt.

    Raises:
        BadRow: it is missing, empty or no text.
    """
    return "", _text(row, "text", "what is trained on")


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """Return the tools a chat may call, from the column `tools`: a list of objects, or its JSON text.

    Raises:
        BadRow: the column holds something else.
    """
    tools = _parsed_if_text(row, "tools", "a list of tools")
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f'"tools" is {_shown(tools)}; expected a list of objects, or one as JSON text.')
    return tools


def _parsed(text: str, place: str, wanted: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f'"{place}" is {_shown(text)}; expected {wanted} as JSON.') from None


def _parsed_if_text(row: Row, column: str, wanted: str) -> Any:
    """A column as it is, or what its JSON text says: a .csv has nothing but text."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    return _parsed(value, column, wanted) if value.strip() else None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _with_system(row: Row, turns: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Put the column `system` before the turns of a chat that has no system turn of its own."""
    system, first = row.get("system"), turns[0][1]
    if _is_blank(system) or (isinstance(first, dict) and first.get("role") in ("system", "developer")):
        return turns
    return [("system", {"role": "system", "content": system}), *turns]


def _turns(row: Row, column: str, fields: str = "role and content") -> list[Any]:
    turns = row.get(column)
    if not isinstance(turns, list):
        what = "missing" if turns is None else _shown(turns)
        raise BadRow(f'"{column}" is {what}; expected a list of turns of {fields}.')
    if not turns:
        raise BadRow(f'"{column}" is empty; expected turns of {fields}.')
    return turns


def _checked_chat(turns: list[tuple[str, Any]], keys: tuple[str, str] = ("role", "content")) -> list[Message]:
    """Check (place, turn) one after another; keys are what the row calls role and content."""
    previous: str | None = None
    messages = []
    for place, turn in turns:
        message = _checked_turn(turn, place, previous, *keys)
        messages.append(message)
        previous = message["role"]
    if previous != "assistant":
        raise BadRow(f'"{turns[-1][0]}.{keys[0]}", the last, is "{previous}"; expected assistant.')
    return messages


def _checked_turn(turn: Any, place: str, previous: str | None, role_key: str, content_key: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f'"{place}" is {_shown(turn)}; expected an object of role and content.')
    message = {key: value for key, value in turn.items() if value is not None}
    if "role" not in message:
        raise BadRow(f'"{place}.{role_key}" is missing; expected system, user, assistant or tool.')
    role = message["role"] = "system" if message["role"] == "developer" else message["role"]  # as OpenAI calls it now
    if role not in ROLES:
        raise BadRow(f'"{place}.{role_key}" is {_shown(role)}; expected system, user, assistant or tool.')
    allowed = _roles_after(previous)
    if role not in allowed:
        where = "the first" if previous is None else f'after "{previous}"'
        raise BadRow(f'"{place}.{role_key}", {where}, is "{role}"; expected {" or ".join(allowed)}.')
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    if calls_tools:
        message.setdefault("content", "")
    if "content" not in message:
        raise BadRow(f'"{place}.{content_key}" is missing; expected text.')
    message["content"] = content_text(message["content"], f"{place}.{content_key}")
    if not message["content"].strip() and role in ("user", "assistant") and not calls_tools:
        raise BadRow(f'"{place}.{content_key}" is empty; expected what the {role} says.')
    if message.get("weight", 1) not in (0, 1):
        raise BadRow(f'"{place}.weight" is {_shown(message["weight"])}; expected 0 (not trained on) or 1.')
    return message


def _roles_after(previous: str | None) -> tuple[str, ...]:
    if previous is None:
        return ("system", "user")
    return {"system": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}.get(
        previous, ("assistant", "tool")
    )


def content_text(content: Any, place: str) -> str:
    """Text, or the text of a list of parts.

    Raises:
        BadRow: it is something else.
    """
    if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        for index, part in enumerate(content):
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise BadRow(f'"{place}[{index}]" is of type {_shown(part["type"])}; expected text parts only.')
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f'"{place}" is {_shown(content)}; expected text.')
    return content


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
    return {**call, "arguments": _parsed(arguments, f"{place}.arguments", "the arguments") if arguments.strip() else {}}


def token_row(row: Row) -> TokenRow:
    """Check an already tokenized row; return input_ids and labels of the positions that the attention mask keeps.

    Args:
        row: input_ids, perhaps labels (every token where missing) and perhaps attention_mask, of one length.

    Raises:
        BadRow: naming the column and the position.
    """
    input_ids = _integers(row, "input_ids")
    labels = list(input_ids) if row.get("labels") is None else _integers(row, "labels")
    mask = [1] * len(input_ids) if row.get("attention_mask") is None else _integers(row, "attention_mask")
    if not input_ids:
        raise BadRow('"input_ids" is empty; expected tokens.')
    for column, values in (("labels", labels), ("attention_mask", mask)):
        if len(values) != len(input_ids):
            raise BadRow(f'"input_ids" has {len(input_ids)} entries and "{column}" {len(values)}; expected as many.')
    kept = [index for index, keep in enumerate(mask) if keep]
    return TokenRow([input_ids[index] for index in kept], [labels[index] for index in kept])


def _integers(row: Row, column: str) -> list[int]:
    values = row.get(column)
    if not isinstance(values, list):
        raise BadRow(f'"{column}" is {"missing" if values is None else _shown(values)}; expected a list of integers.')
    if not set(map(type, values)) <= {int}:  # not isinstance: True is an int
        index, value = next((index, value) for index, value in enumerate(values) if type(value) is not int)
        raise BadRow(f'"{column}[{index}]" is {_shown(value)}; expected an integer.')
    return values


def _text(row: Row, column: str, what: str) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow(f'"{column}" is missing; expected {what} as text.')
    if not isinstance(value, str):
        raise BadRow(f'"{column}" is {_shown(value)}; expected {what} as text.')
    if not value.strip():
        raise BadRow(f'"{column}" is empty; expected {what} as text.')
    return value


def _shown(value: Any) -> str:
    """A value as it fits into one line of a message."""
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 40 else f'"{value[:40]}..."'
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object of " + (", ".join(map(str, list(value)[:5])) or "nothing")
    return repr(value)


FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "tools"), alpaca_messages),
    "messages": Format(("messages",), ("system", "tools"), chat_messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), sharegpt_messages),
    "prompt_completion": Format(("prompt", "completion"), ("system", "tools"), prompt_completion),
    "text": Format(("text",), (), plain_text),
    "tokenized": Format(("input_ids",), ("labels", "attention_mask"), token_row),
}
