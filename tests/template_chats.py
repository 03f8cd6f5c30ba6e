"""Stock chat templates, and chats to render with them."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from llama_ft.data.read.formats import Message

STOCK = {
    file.stem: file.read_text()
    for file in sorted(
        Path(__file__).with_name("data").joinpath("chat", "chat_templates").glob("*.jinja")
    )
}
# Text in templates that a real tokenizer has as one token.
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]+[|｜]>|<[a-z]+(?:_[a-z]+)+>|</?think>|</?tool_call>|<\|?\w+\|?>(?<=\|>)|<\|\w+>"
)


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


system, user, assistant, tool = (
    partial(said, role) for role in ("system", "user", "assistant", "tool")
)
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"x": 11}}}]
NUMBER = {"type": "integer", "description": "a number"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": NUMBER}},
}
TOOLS = [{"type": "function", "function": ADD}]
CALLED = [user("Q1"), assistant("", tool_calls=CALL), tool("eleven"), assistant("first")]
