"""Tool calls that are messages of their own, or the text of one.

role function_call, tool_call    the content is JSON of one call or a list (LLaMA-Factory, ms-swift)
function_call                    the call of a message, before OpenAI's API had tool_calls
"""

import json
from typing import Any

from llama_ft.data.read.traces.trace_form import PlacedMessage, TraceForm
from llama_ft.data.read.values import expect

ROLES = ("function_call", "tool_call")
OWN_KEYS = ("from", "value", "role", "content", "function_call")


def _is_used(message: Any) -> bool:
    return isinstance(message, dict) and (
        _role(message) in ROLES or isinstance(message.get("function_call"), dict)
    )


def _role(message: dict[str, Any]) -> Any:
    return message.get("from", message.get("role"))


def _convert(chat: list[PlacedMessage]) -> list[PlacedMessage]:
    """Neighboring messages of calls are one message of the assistant, and belong to its text if that
    stands before them."""
    converted = list[PlacedMessage]()
    for place, message in chat:
        if not _is_used(message):
            converted.append((place, message))
            continue
        calls = _calls(message, place)
        if _role(message) in ROLES:
            text = ""
        else:
            text = message.get("content") or ""
        others = {key: value for key, value in message.items() if key not in OWN_KEYS}
        response = {**others, "role": "assistant", "content": text, "tool_calls": calls}
        before = converted[-1][1] if converted else None
        is_call = isinstance(before, dict) and "tool_calls" in before and not text
        if is_call and converted[-1][1]["role"] == "assistant" and not others:
            first_place, first = converted.pop()
            response = {**first, "tool_calls": [*first["tool_calls"], *calls]}
            place = first_place
        converted.append((place, response))
    return converted


def _calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    if _role(message) not in ROLES:
        return [{"type": "function", "function": message["function_call"]}]
    key = "value" if "from" in message else "content"
    calls = message.get(key)
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            expect(False, f"{place}.{key}", calls, "JSON of a tool call")
    calls = calls if isinstance(calls, list) else [calls]
    is_valid = bool(calls) and all(isinstance(call, dict) for call in calls)
    expect(
        is_valid, f"{place}.{key}", message.get(key), "a tool call: an object of name and arguments"
    )
    return [
        call if "function" in call else {"type": "function", "function": call} for call in calls
    ]


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool


FUNCTION_CALL = TraceForm(_is_used, _convert, _convert_tool)
