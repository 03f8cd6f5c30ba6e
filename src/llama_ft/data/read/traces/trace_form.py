"""What a form of traces defines."""

from collections.abc import Callable
from typing import Any, NamedTuple

# A message as the sample has it, after its place for error messages, such as `messages[2]`.
PlacedMessage = tuple[str, Any]


class TraceForm(NamedTuple):
    """A form of messages.

    Attributes:
        is_used: whether a message is written in it. Called for each message of the data, so it is fast.
        convert: returns the messages of a chat in OpenAI's form. Messages that are in OpenAI's form
            already stay as they are. Raises BadSample.
        convert_tool: returns the definition of a tool in OpenAI's form.
    """

    is_used: Callable[[Any], bool]
    convert: Callable[[list[PlacedMessage]], list[PlacedMessage]]
    convert_tool: Callable[[dict[str, Any]], dict[str, Any]]
