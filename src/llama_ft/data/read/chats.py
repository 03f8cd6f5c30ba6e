"""Check the messages of a chat: their order, roles and contents."""

from typing import Any

from llama_ft.data.read.media import EXPECTED, MediaPart, check_role, has_media
from llama_ft.data.read.traces.results import check_results
from llama_ft.data.read.traces.trace_form import PlacedMessage
from llama_ft.data.read.values import (
    LOSS_KEYS,
    MISSING,
    expect,
    list_of_objects,
    loss_weight,
    parsed_if_text,
)

Message = dict[str, Any]
# keys in which servers return reasoning content
REASONING = ("reasoning_content", "reasoning", "thinking")
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool", "developer": "system",
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
# role of a message, None before the first one -> roles that may follow
ROLES_AFTER = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool", "user"),
}


def checked_chat(chat: list[PlacedMessage]) -> list[Message]:
    """Check messages one after another, and return them without their places."""
    messages = list[Message]()
    previous_role = None
    for place, message in chat:
        checked = _checked_message(message, place, previous_role)
        previous_role = checked["role"]
        messages.append(checked)
    last_place, _ = chat[-1]
    is_response = previous_role == "assistant"
    expect(is_response, last_place, previous_role, "an assistant's message as the last")
    places = [place for place, _ in chat]
    check_results(zip(places, messages, strict=True))
    return messages


def _checked_message(message: Any, place: str, previous_role: str | None) -> Message:
    """Check a message that follows one of `previous_role`; None: it is the first."""
    expect(isinstance(message, dict), place, message, "an object of role and content")
    # ShareGPT's keys
    keys = ("from", "value") if "from" in message else ("role", "content")
    role_key, content_key = keys
    role = ROLES.get(str(message.get(role_key)))
    roles = ROLES_AFTER[previous_role]
    expected_role = f"{' or '.join(roles)} here"
    expect(role in roles, f"{place}.{role_key}", message.get(role_key, MISSING), expected_role)
    content = message.get(content_key, MISSING)
    calls = message.get("tool_calls")
    if calls and content in (None, MISSING):
        content = ""
    text: Any
    if has_media(content):
        text = _text_and_media(content, role, f"{place}.{content_key}")
    else:
        text = content_text(content, f"{place}.{content_key}")
        may_be_empty = calls or role in ("system", "tool")
        expect(text.strip() or may_be_empty, f"{place}.{content_key}", "", f"what the {role} says")
    others = {}
    for key, value in message.items():
        if key not in keys and value is not None:
            others[key] = value
    if calls:
        objects = list_of_objects(calls, f"{place}.tool_calls")
        others["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(objects)
        ]
    for key in REASONING:
        if key in others:
            others[key] = content_text(
                others[key], f"{place}.{key}", "text, or a list of text parts"
            )
    if role == "assistant":
        weight = loss_weight(others, place)
        others = {key: value for key, value in others.items() if key not in LOSS_KEYS}
        if weight is not None:
            others["weight"] = weight
    return {"role": role, "content": text, **others}


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object.

    OpenAI's arguments are JSON text. Templates write objects as JSON, and would quote text a second
    time.
    """
    if "function" in call:
        function = call["function"]
        expect(isinstance(function, dict), f"{place}.function", function, "an object")
        return {**call, "function": _call(function, f"{place}.function")}
    if "arguments" not in call:
        _check_name(call, place)
        return call
    arguments = parsed_if_text(call, "arguments", f"{place}.")
    if isinstance(arguments, str):  # some servers and scripts encode them twice
        arguments = parsed_if_text({"arguments": arguments}, "arguments", f"{place}.")
    arguments = {} if arguments is None else arguments
    expect(isinstance(arguments, dict), f"{place}.arguments", call["arguments"], "an object")
    _check_name(call, place)
    return {**call, "arguments": arguments}


def _check_name(call: dict[str, Any], place: str) -> None:
    name = call.get("name", MISSING)
    expect(isinstance(name, str) and name, f"{place}.name", name, "the name of a function")


def content_text(content: Any, place: str, expected: str = EXPECTED) -> str:
    """Return a text, or the text of a list of parts.

    Raises:
        BadSample: it is something else.
    """
    if isinstance(content, list):
        for number, part in enumerate(content):
            expect(_is_text_part(part), f"{place}[{number}]", part, expected)
        return "".join(part["text"] for part in content)
    expect(isinstance(content, str), place, content, expected)
    return str(content)


def _text_and_media(content: list[Any], role: str | None, place: str) -> list[dict[str, str]]:
    """Return the parts of a message's content, which are not all text."""
    check_role(role, place)
    parts = list[dict[str, str]]()
    for number, part in enumerate(content):
        if isinstance(part, MediaPart):
            parts.append(part)
        else:
            parts.append({"type": "text", "text": content_text([part], f"{place}[{number}]")})
    return parts


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
