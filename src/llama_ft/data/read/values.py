"""Check and convert single values of samples, and say what is wrong with them."""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

Sample = Mapping[str, Any]

TOO_DEEP = "it is nested too deeply."
SHOWN_CHARACTERS = 60  # of a field's value in a message
NAMED_COLUMN = re.compile(r'^"(\w+)')  # with which messages about a sample begin
# Keys of an assistant message with which several trainers say whether it is in the loss: OpenAI's
# and TRL's weight, axolotl's train and training, ms-swift's and LLaMA-Factory's loss.
LEARNED_IF_TRUE = ("weight", "train", "training", "trainable", "loss", "loss_mask")
LEARNED_IF_FALSE = ("masked",)
LOSS_KEYS = (*LEARNED_IF_TRUE, *LEARNED_IF_FALSE)


class BadSample(Exception):
    """A sample that cannot be used. The text says what is wrong; the reader adds the file and the
    line."""


class Missing:
    """The type of MISSING."""

    def __bool__(self) -> bool:
        return False


MISSING = Missing()  # value of a field that is not there; None is a null


class RenamedSample(dict[str, Any]):
    """A sample whose columns were renamed, or which was changed in another way.

    Attributes:
        original_names: name here -> name in the data.
        original: the sample as the data have it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        original_names: Mapping[str, str],
        original: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(values)
        self.original_names = original_names
        self.original = values if original is None else original


def in_own_names(problem: Exception, sample: Any) -> str:
    """Return what is wrong with a sample, with the column's name in the data."""
    text = str(problem)
    named = NAMED_COLUMN.match(text)
    if named is None or not isinstance(sample, RenamedSample):
        return text
    original = sample.original_names.get(named[1], named[1])
    return f'"{original}{text[named.end() :]}'


def expect(is_valid: object, place: str, value: Any, expected: str) -> None:
    """Raise BadSample if the field `place` of a sample is not valid.

    Args:
        is_valid: whether the field is valid.
        place: name of the field, such as `messages[2].role`.
        value: of the field, MISSING if it is not there.
        expected: what the field should be, for the message.
    """
    if is_valid:
        return
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > SHOWN_CHARACTERS:
        shown = shown[:SHOWN_CHARACTERS] + "..."
    if value is MISSING:
        shown = "missing"
    elif value in ("", [], {}):
        shown = "empty"
    raise BadSample(f'"{place}" is {shown}; expected {expected}.')


def check_numbers(sample: Sample, columns: Collection[str]) -> None:
    """Raise BadSample if a number in these columns, however nested, is NaN or infinite. pandas and
    numpy write them for missing values, and as text they would be learned as words."""
    for column in columns:
        refuse_not_finite(sample.get(column), column)


def refuse_not_finite(value: Any, place: str) -> None:
    """Raise BadSample if a number in `value`, however nested, is NaN or infinite."""
    entry = _not_finite(value)
    if entry is not None:
        inside, number = entry
        expected = "a value (pandas writes NaN for a missing one)"
        if math.isinf(number):
            expected = "a finite number"
        expect(False, place + inside, number, expected)


def _not_finite(value: Any) -> tuple[str, float] | None:
    """Return the place and value of the first number that is not finite, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", value)
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = ((f".{key}", each) for key, each in value.items() if not isinstance(each, str))
    elif isinstance(value, list | tuple):
        inner = ((f"[{at}]", each) for at, each in enumerate(value) if not isinstance(each, str))
    for name, each in inner:
        entry = _not_finite(each)
        if entry is not None:
            inside, number = entry
            return name + inside, number
    return None


def response_text(value: Any) -> str:
    """Return a response that may be a class as text: a number as Python writes it, a boolean as JSON
    does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def loss_weight(message: Mapping[str, Any], place: str) -> int | None:
    """Return whether an assistant message is in the loss, 1 or 0; None if none of LOSS_KEYS says so.

    Raises:
        BadSample: a key has another value, or two of them contradict each other.
    """
    given = {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}
    weights = set[bool]()
    for key, value in given.items():
        is_flag = isinstance(value, int | float) and value in (0, 1)
        expect(is_flag, f"{place}.{key}", value, "0 or false, 1 or true")
        weights.add(bool(value) == (key in LEARNED_IF_TRUE))
    if len(weights) > 1:
        shown = " and ".join(f'"{key}": {json.dumps(value)}' for key, value in given.items())
        raise BadSample(
            f'"{place}" has {shown}, which contradict each other; expected one of them.'
        )
    return int(weights.pop()) if weights else None


def parsed_if_text(sample: Sample, column: str, place: str = "") -> Any:
    """Return a column as it is, or the value of its JSON text: a .csv has nothing but text."""
    value = sample.get(column)
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value.strip() or "null")
    except (ValueError, RecursionError):
        expect(False, place + column, value, "JSON")
    refuse_not_finite(parsed, place + column)
    return parsed


def is_blank(value: Any) -> bool:
    """Return whether a value is missing or text without characters."""
    return value is None or (isinstance(value, str) and not value.strip())


def list_of_objects(values: Any, place: str) -> list[dict[str, Any]]:
    """Return a list of objects. Raises BadSample: it is something else."""
    is_valid = isinstance(values, list) and all(isinstance(value, dict) for value in values)
    expect(is_valid, place, values, "a list of objects")
    return list(values)
