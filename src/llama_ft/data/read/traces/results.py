"""Check that results of tools have calls, whatever the form in which a trace was written."""

import re
from collections.abc import Iterable
from typing import Any

from llama_ft.data.read.values import BadSample

# Some traces write calls into the text of the assistant: <tool_call>{...}, Action: search[...], code.
CALL_IN_TEXT = re.compile(r"[<{\[(`]|\bAction\b")


def check_results(chat: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise BadSample if a message of role tool is not the result of a call in the assistant message before
    it. `chat`: checked messages, each after its place."""
    response: dict[str, Any] = {}
    for place, message in chat:
        if message["role"] == "assistant":
            response = message
        elif message["role"] == "tool":
            _check_result(place, message, response)


def _check_result(place: str, message: dict[str, Any], response: dict[str, Any]) -> None:
    calls = response.get("tool_calls") or ()
    if not calls and not CALL_IN_TEXT.search(response["content"]):
        raise BadSample(
            f'"{place}" is the result of a tool, and the assistant message before it has no tool call; '
            "expected the call before its result."
        )
    given = message.get("tool_call_id")
    ids = [call.get("id") for call in calls]
    if calls and given and all(ids) and given not in ids:
        known = ", ".join(map(str, ids))
        raise BadSample(
            f'"{place}" is the result of the tool call {given}, which the assistant message before it '
            f"does not have; expected {known}."
        )
