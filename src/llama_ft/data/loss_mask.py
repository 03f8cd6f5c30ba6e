"""Find the characters of a rendered chat that are in the loss: exactly those of the assistant
responses."""

import re
from collections.abc import Iterator
from os.path import commonprefix
from typing import TYPE_CHECKING

from llama_ft.data.chat_template import PROBE, Span, Tools, render_chat
from llama_ft.data.formats import BadRow, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates with this test (DeepSeek's) write a tool call only if the content of its message is
# none.
NO_CONTENT = re.compile(r"content\W{0,2}\s+is\s+(?:not\s+)?none")

# keys in which servers return reasoning content
REASONING = ("reasoning_content", "reasoning", "thinking")


class ChatRenderer:
    """Renders messages with the tokenizer's template and finds the characters in the loss.

    If the template has `{% generation %}` blocks, they mark the responses. The original templates
    of Llama 3, Qwen and Gemma have none. Then a response is the difference between two texts: the
    chat, and its prompt, which is the same chat up to the message before, rendered with
    `add_generation_prompt=True`. The response ends with its end-of-turn token, without the line
    break that may follow.

    Some templates render a message differently if others follow: Qwen3 drops reasoning content,
    Mistral moves the system prompt, Phi-3 and gpt-oss end the last message differently. Then a
    probe replaces the response, and shows its position in the text.

    Args:
        tokenizer: with a chat template.
        labels: assistant, completion (the last assistant message) or all. Responses of weight 0 are
            never in the loss.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", labels: str = "assistant") -> None:
        self.template = tokenizer.get_chat_template()
        self.labels = labels
        self.has_generation_block = bool(GENERATION_BLOCK.search(self.template))
        self._opens_responses = "add_generation_prompt" in self.template
        self._special_tokens = tokenizer.special_tokens_map
        self._tokens = tuple(tokenizer.get_added_vocab())
        self._token = re.compile(
            "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or "(?!)"
        )

    def render(self, messages: list[Message], tools: Tools | None = None) -> tuple[str, list[Span]]:
        """Return the text of a chat and its spans [start, end) in the loss.

        Raises:
            BadRow: the template rejects these messages or drops a part, or a response cannot be
                found in the text.
        """
        if NO_CONTENT.search(self.template):
            messages = [
                {**message, "content": message["content"] or None}
                if message.get("tool_calls")
                else message
                for message in messages
            ]
        text, blocks = render_chat(
            self.template, self._special_tokens, messages, tools, self.has_generation_block
        )
        for what in self._left_out(messages, tools, text):
            raise BadRow(
                f"the chat template drops {what}; use one that keeps it (--chat_template)."
            )
        responses = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        wanted = responses[-1:] if self.labels == "completion" else responses
        wanted = [
            index
            for index in wanted
            if (messages[index].get("weight") == 0) == (self.labels == "all")
        ]
        if not self.has_generation_block or not wanted:
            spans = [
                span for index in wanted for span in self._response(messages, tools, index, text)
            ]
        elif len(blocks) == len(responses):
            spans = [
                block for index, block in zip(responses, blocks, strict=True) if index in wanted
            ]
        elif blocks and wanted == responses:
            spans = blocks
        else:
            raise BadRow(
                f"the chat template has {len(blocks)} {{% generation %}} blocks for {len(responses)} responses; "
                "expected one block per response."
            )
        if self.labels != "all":
            return text, spans
        bounds = [0, *(edge for span in spans for edge in span), len(text)]
        return text, [
            (start, end)
            for start, end in zip(bounds[::2], bounds[1::2], strict=True)
            if start < end
        ]

    def _left_out(self, messages: list[Message], tools: Tools | None, text: str) -> Iterator[str]:
        """Yield the parts of a chat that this template drops, among those that some templates are
        known to drop."""
        last = messages[-1]
        calling = [message for message in messages if message.get("tool_calls")]
        reasoning, ended, _ = (last["content"] or "").partition("</think>")
        expected = [
            (
                "the system message",
                messages[0]["content"] if messages[0]["role"] == "system" else "",
            ),
            (
                "what the last response has before </think>",
                reasoning.rpartition("<think>")[2] if ended else "",
            ),
            *(
                (f'the last response\'s "{key}"', last[key])
                for key in REASONING
                if isinstance(last.get(key), str)
            ),
            *(
                ('the text next to "tool_calls"', _reasoning_and_text(message)[1])
                for message in calling
            ),
        ]
        used = [name for name, is_used in (("tools", tools), ("tool_calls", calling)) if is_used]
        yield from (name for name in used if not re.search(rf"\b{name}\b", self.template))
        yield from (what for what, content in expected if content.strip() not in text)

    def _text(self, messages: list[Message], tools: Tools | None, open_answer: bool = False) -> str:
        return render_chat(
            self.template, self._special_tokens, messages, tools, open_answer=open_answer
        )[0]

    def _response(
        self, messages: list[Message], tools: Tools | None, index: int, text: str
    ) -> list[Span]:
        start = self._response_start(messages, tools, index, text)
        if start is not None:
            so_far = messages[: index + 1]
            alone = text if len(so_far) == len(messages) else self._text(so_far, tools)
            if text.startswith(alone):
                return [(start, self._message_end(alone, start, so_far, tools))]
        message_start, content_start, end = self._content(messages, tools, index, text)
        start = message_start if start is None else start
        rest = text[end:]
        probed = [*messages[:index], _with_probe(messages[index])]
        for open_answer in (False, True):
            ending = _after_probe(self._text(probed, tools, open_answer), messages[index])
            common = commonprefix([ending, rest])
            tokens = [match.end() for match in self._token.finditer(common)]
            if common == ending or tokens:
                # open_answer adds the heading of the next response, so only the first token belongs
                # to this message.
                end += tokens[0 if open_answer else -1] if tokens else len(common)
                break
        if messages[index + 1 :] and messages[index + 1]["role"] == "tool":
            # Gemma 4's template writes the tool results between the tool calls and the text of the
            # same message.
            calls = self._text([*messages[:index], {**messages[index], "content": ""}], tools)
            common = commonprefix([calls, text])
            called = max(
                (match.end() for match in self._token.finditer(common, start)), default=len(common)
            )
            if start < called < content_start:
                return [(start, called), (content_start, end)]
        return [(start, end)]

    def _response_start(
        self, messages: list[Message], tools: Tools | None, index: int, text: str
    ) -> int | None:
        """Return the end of a response's prompt; None if the text does not begin with that
        prompt."""
        prompt = self._text(messages[:index], tools, open_answer=True)
        if not text.startswith(prompt):
            return None
        if self._opens_responses:
            return len(prompt)
        # The generation prompt lacks the heading that the template writes before a response. A
        # probe finds its end.
        probed = [*messages[:index], {"role": "assistant", "content": PROBE}]
        heading, found, _ = self._text(probed, tools).partition(PROBE)
        if found and text.startswith(heading):
            return len(heading)
        return len(prompt) if messages[index].get("tool_calls") else None

    def _content(
        self, messages: list[Message], tools: Tools | None, index: int, text: str
    ) -> tuple[int, int, int]:
        """Find the characters that a message changes.

        Returns:
            Start of the message's reasoning content, or of its content if it has none; start of its
            content; end of it.

        Raises:
            BadRow: the message changes the text of other messages, too.
        """
        probed = _with_probe(messages[index])
        probed_text = self._text([*messages[:index], probed, *messages[index + 1 :]], tools)
        before, found, _ = probed_text.partition(PROBE)
        after = _after_probe(probed_text, messages[index])
        end = len(text) - len(after)
        if not (found and text.startswith(before) and text.endswith(after) and len(before) <= end):
            raise BadRow(
                f'"messages[{index}]": the chat template changes other messages with this one; '
                "use a template with a {% generation %} block around responses."
            )
        bare = {key: value for key, value in probed.items() if key not in REASONING} | {
            "content": PROBE
        }
        if bare != probed:
            probed_text = self._text([*messages[:index], bare, *messages[index + 1 :]], tools)
        return len(commonprefix([probed_text, text])), len(before), end

    def _message_end(
        self, text: str, start: int, messages: list[Message], tools: Tools | None
    ) -> int:
        """Return the end of a response at the end of the text: after its end-of-turn token, before
        a line break."""
        trimmed = text.rstrip()
        last = next((token for token in self._tokens if trimmed.endswith(token)), None)
        if last is None or len(trimmed) <= start:
            return len(text)
        before = trimmed[: -len(last)].rstrip()
        ends = []
        if len(before) > start and before.endswith(self._tokens):
            # Of two tokens, both may belong to the message (Qwen's </tool_call> <|im_end|>), or the
            # second one ends the chat and is missing if a message follows (Phi-3's <|end|>
            # <|endoftext|>).
            common = commonprefix([trimmed, self._text(messages, tools, open_answer=True)])
            ends = [match.end() for match in self._token.finditer(common, start)]
        return ends[-1] if ends else len(trimmed)


def _reasoning_and_text(message: Message) -> tuple[str, str]:
    """Split the content of a message: reasoning up to and including </think>, if any, and the text
    after it."""
    reasoning, ended, said = (message["content"] or "").rpartition("</think>")
    return reasoning + ended, said


def _with_probe(message: Message) -> Message:
    return {**message, "content": _reasoning_and_text(message)[0] + PROBE}


def _after_probe(text: str, message: Message) -> str:
    """Return the text after the probe. If the content is empty, the line break before tool calls is
    missing there."""
    after = text.partition(PROBE)[2]
    return after if _reasoning_and_text(message)[1].strip() else after.lstrip()
