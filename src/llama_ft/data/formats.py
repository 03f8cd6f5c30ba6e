"""What a row of data must look like: alpaca columns, chat messages, or tokens; and what is wrong with one that does
not."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

from llama_ft.errors import UserError

RowFormat = Literal["alpaca", "messages", "tokenized"]
Row = Mapping[str, Any]
Message = dict[str, Any]

REQUIRED_COLUMNS: dict[RowFormat, tuple[str, ...]] = {
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "tokenized": ("input_ids", "labels"),
}
EXPECTED = (
    "Expected are instruction, output and optionally input (alpaca), or messages, a list of turns of role and content,"
    "\nor input_ids and labels (tokenized)."
)
ROLES = ("system", "user", "assistant", "tool")


class BadRow(Exception):
    """A row that cannot be trained on. The text says what is wrong in it; where it stands is the reader's to say."""


def find_format(dataset: str, columns: Collection[str], wanted: str) -> RowFormat:
    """Tell the format of a dataset from its columns, or check that the format asked for fits them.

    Args:
        dataset: its name, for messages.
        columns: the column names found.
        wanted: `auto`, `alpaca`, `messages` or `tokenized` (`--dataset_format`).

    Raises:
        UserError: the columns fit no format, several, or not the one asked for.
    """
    found = "its columns are " + ", ".join(sorted(columns)) if columns else "it has no columns"
    fitting = [name for name, required in REQUIRED_COLUMNS.items() if set(required) <= set(columns)]
    if wanted != "auto":
        row_format = cast(RowFormat, wanted)
        if row_format not in fitting:
            needed = " and ".join(REQUIRED_COLUMNS[row_format])
            raise UserError(f"{dataset}: --dataset_format {wanted} needs {needed}, but {found}.")
        return row_format
    if not fitting:
        raise UserError(f"{dataset}: {found}.\n{EXPECTED}")
    if len(fitting) > 1:
        raise UserError(
            f"{dataset}: {found}, which fit {' and '.join(fitting)}.\n--dataset_format says which is meant."
        )
    return fitting[0]


def alpaca_messages(row: Row, *, input_heading: str = "") -> list[Message]:
    """Turn an alpaca row into a question and its answer.

    Args:
        row: columns instruction, output and perhaps input.
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
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": answer}]


def chat_messages(row: Row) -> list[Message]:
    """Check the chat turns of a row and return them without their empty fields.

    Turns are an optional system turn, then user and assistant in alternation, with tool turns after an assistant; the
    last is an assistant's. Parquet gives every turn all keys, so those that are null are taken out.

    Raises:
        BadRow: naming the turn and the field.
    """
    turns = row.get("messages")
    if not isinstance(turns, list):
        what = "missing" if turns is None else _shown(turns)
        raise BadRow(f'"messages" is {what}; expected a list of turns of role and content.')
    if not turns:
        raise BadRow('"messages" is empty; expected turns of role and content.')
    previous: str | None = None
    messages = []
    for index, turn in enumerate(turns):
        message = _checked_turn(turn, f"messages[{index}]", previous)
        messages.append(message)
        previous = message["role"]
    if previous != "assistant":
        raise BadRow(f'"messages[{len(turns) - 1}].role", the last, is "{previous}"; expected assistant.')
    return messages


def _checked_turn(turn: Any, place: str, previous: str | None) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f'"{place}" is {_shown(turn)}; expected an object of role and content.')
    message = {key: value for key, value in turn.items() if value is not None}
    if "role" not in message:
        raise BadRow(f'"{place}.role" is missing; expected system, user, assistant or tool.')
    role = message["role"]
    if role not in ROLES:
        raise BadRow(f'"{place}.role" is {_shown(role)}; expected system, user, assistant or tool.')
    allowed = _roles_after(previous)
    if role not in allowed:
        where = "the first" if previous is None else f'after "{previous}"'
        raise BadRow(f'"{place}.role", {where}, is "{role}"; expected {" or ".join(allowed)}.')
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    if calls_tools:
        message.setdefault("content", "")
    if "content" not in message:
        raise BadRow(f'"{place}.content" is missing; expected text.')
    if not isinstance(message["content"], str):
        raise BadRow(f'"{place}.content" is {_shown(message["content"])}; expected text.')
    if not message["content"].strip() and role in ("user", "assistant") and not calls_tools:
        raise BadRow(f'"{place}.content" is empty; expected what the {role} says.')
    return message


def _roles_after(previous: str | None) -> tuple[str, ...]:
    if previous is None:
        return ("system", "user")
    return {"system": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}.get(
        previous, ("assistant", "tool")
    )


def token_row(row: Row, vocabulary_size: int) -> tuple[list[int], list[int]]:
    """Check an already tokenized row; return input_ids and labels of the positions that the attention mask keeps.

    Args:
        row: input_ids, labels (-100 where not trained; not shifted) and perhaps attention_mask, of one length.
        vocabulary_size: ids must be below it.

    Raises:
        BadRow: naming the column and the position.
    """
    input_ids, labels = _integers(row, "input_ids"), _integers(row, "labels")
    if len(input_ids) != len(labels):
        raise BadRow(f'"input_ids" has {len(input_ids)} entries and "labels" {len(labels)}; expected as many.')
    for index, token in enumerate(input_ids):
        if not 0 <= token < vocabulary_size:
            raise BadRow(f'"input_ids[{index}]" is {token}; expected 0 to {vocabulary_size - 1}, the tokenizer\'s ids.')
    for index, label in enumerate(labels):
        if label != -100 and not 0 <= label < vocabulary_size:
            raise BadRow(f'"labels[{index}]" is {label}; expected -100 or 0 to {vocabulary_size - 1}.')
    if row.get("attention_mask") is None:
        return input_ids, labels
    mask = _integers(row, "attention_mask")
    if len(mask) != len(input_ids):
        raise BadRow(f'"input_ids" has {len(input_ids)} entries and "attention_mask" {len(mask)}; expected as many.')
    kept = [index for index, keep in enumerate(mask) if keep]
    return [input_ids[index] for index in kept], [labels[index] for index in kept]


def _integers(row: Row, column: str) -> list[int]:
    values = row.get(column)
    if not isinstance(values, list):
        raise BadRow(f'"{column}" is {"missing" if values is None else _shown(values)}; expected a list of integers.')
    for index, value in enumerate(values):
        if type(value) is not int:  # not isinstance: True is an int
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
