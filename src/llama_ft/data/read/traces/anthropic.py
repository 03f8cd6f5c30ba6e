"""Traces of Anthropic's Messages API: contents are lists of blocks.

    assistant   thinking, text, tool_use            one message with reasoning content and tool calls
    user        tool_result, ..., text              a message of role tool per result, then the user's
    tools       name, description, input_schema     a function with parameters

Blocks of one response may be messages of their own, as agents log them: neighboring messages of the
assistant are one.
"""

from collections.abc import Iterator
from typing import Any

from llama_ft.data.read.traces.trace_form import PlacedMessage, TraceForm
from llama_ft.data.read.values import LOSS_KEYS, MISSING, BadSample, expect

# In the order in which chat templates write a response.
RESPONSE_BLOCKS = ("thinking", "text", "tool_use")
ENCRYPTED = "redacted_thinking"  # has no text
BLOCKS = {*RESPONSE_BLOCKS, ENCRYPTED, "tool_result"}
OWN_BLOCKS = BLOCKS - {"text"}  # which text of OpenAI's form does not have


def has_encrypted_reasoning(message: Any) -> bool:
    """Return whether a message has reasoning content whose text is encrypted, and so is left out."""
    return any(_type(block) == ENCRYPTED for block in _blocks(message))


def _blocks(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _is_used(message: Any) -> bool:
    return any(_type(block) in OWN_BLOCKS for block in _blocks(message))


def _convert(chat: list[PlacedMessage]) -> list[PlacedMessage]:
    converted = list[PlacedMessage]()
    response = list[PlacedMessage]()  # neighboring messages of the assistant
    for place, message in chat:
        is_assistant = isinstance(message, dict) and message.get("role") == "assistant"
        if response and not (is_assistant and _loss(message) == _loss(response[-1][1])):
            converted.append(_response(response))
            response = []
        if is_assistant:
            response.append((place, message))
        elif _is_used(message):
            converted += _results_and_text(place, message)
        else:
            converted.append((place, message))
    if response:
        converted.append(_response(response))
    return converted


def _loss(message: dict[str, Any]) -> dict[str, Any]:
    """Return what a message says about the loss."""
    return {key: message[key] for key in LOSS_KEYS if message.get(key) is not None}


def _response(messages: list[PlacedMessage]) -> PlacedMessage:
    """Return neighboring messages of the assistant as one."""
    first_place, first = messages[0]
    if len(messages) == 1 and not _is_used(first):
        return messages[0]
    thoughts = list[str]()
    texts = list[str]()
    calls = list[dict[str, Any]]()
    last = 0  # in RESPONSE_BLOCKS
    for place, block in _placed_blocks(messages):
        kind = _type(block)
        if kind == ENCRYPTED:
            continue
        known = f"a block of type {', '.join(RESPONSE_BLOCKS)}"
        expect(kind in RESPONSE_BLOCKS, place, block, f"{known} from the assistant")
        number = RESPONSE_BLOCKS.index(kind)
        if number < last:
            raise BadSample(
                f'"{place}" is a block of type {kind} after one of type {RESPONSE_BLOCKS[last]}; expected '
                f"{', '.join(RESPONSE_BLOCKS)} in this order, in which chat templates write them."
            )
        last = number
        if kind == "thinking":
            thoughts.append(_text(block, "thinking", place))
        elif kind == "text":
            texts.append(_text(block, "text", place))
        else:
            calls.append(_call(block, place))
    others = {key: value for key, value in first.items() if key not in ("role", "content")}
    message = {**others, "role": "assistant", "content": "".join(texts)}
    if any(thought.strip() for thought in thoughts):
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return first_place, message


def _placed_blocks(messages: list[PlacedMessage]) -> Iterator[PlacedMessage]:
    """Yield the blocks of messages, each with its place. A text is a block, too."""
    for place, message in messages:
        content = message.get("content", MISSING)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        expect(isinstance(content, list), f"{place}.content", content, "text, or a list of blocks")
        for number, block in enumerate(content):
            yield f"{place}.content[{number}]", block


def _text(block: dict[str, Any], key: str, place: str) -> str:
    text = block.get(key, MISSING)
    expect(isinstance(text, str), f"{place}.{key}", text, "text")
    return str(text)


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the tool call of a block of type tool_use."""
    for key in ("id", "name"):
        value = block.get(key, MISSING)
        expect(isinstance(value, str) and value, f"{place}.{key}", value, "text")
    arguments = block.get("input", MISSING)
    expect(isinstance(arguments, dict), f"{place}.input", arguments, "an object of arguments")
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _results_and_text(place: str, message: dict[str, Any]) -> list[PlacedMessage]:
    """Return a user message with results of tools as messages of role tool, and the user's own."""
    results = list[PlacedMessage]()
    own = list[Any]()
    for number, block in enumerate(message["content"]):
        block_place = f"{place}.content[{number}]"
        if _type(block) != "tool_result":
            is_response = _type(block) in OWN_BLOCKS
            expect(not is_response, block_place, block, "a tool_result or text from the user")
            own.append(block)
            continue
        is_user = message.get("role") == "user"
        expect(is_user, block_place, block, "a tool_result in a message of the user")
        if own:
            raise BadSample(
                f'"{block_place}" is a tool_result after a block of type {_type(own[0])}; expected the results first.'
            )
        call = block.get("tool_use_id", MISSING)
        expect(isinstance(call, str) and call, f"{block_place}.tool_use_id", call, "text")
        content = block.get("content") or ""  # a tool may return nothing
        result = {"role": "tool", "tool_call_id": call, "content": content}
        results.append((block_place, result))
    if own:
        results.append((place, {**message, "content": own}))
    return results


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool or "function" in tool:
        return tool
    function = dict[str, Any]()
    for key in ("name", "description"):
        if key in tool:
            function[key] = tool[key]
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


ANTHROPIC = TraceForm(_is_used, _convert, _convert_tool)
