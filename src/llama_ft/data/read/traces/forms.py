"""The forms of traces that are read, see docs/development/add-a-format.md#forms-of-traces."""

from typing import Any

from llama_ft.data.read.traces.anthropic import ANTHROPIC
from llama_ft.data.read.traces.function_call import FUNCTION_CALL
from llama_ft.data.read.traces.trace_form import PlacedMessage, TraceForm

FORMS: tuple[TraceForm, ...] = (ANTHROPIC, FUNCTION_CALL)


def in_openai_form(chat: list[PlacedMessage]) -> list[PlacedMessage]:
    """Return the messages of a chat as OpenAI's API has them.

    Raises:
        BadSample: a message is in another form, but malformed.
    """
    for form in FORMS:
        if any(form.is_used(message) for _, message in chat):
            chat = form.convert(chat)
    return chat


def tool_in_openai_form(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a tool as OpenAI's API has it."""
    for form in FORMS:
        tool = form.convert_tool(tool)
    return tool
