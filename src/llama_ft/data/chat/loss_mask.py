"""Find the characters of a rendered chat that are in the loss: exactly those that the model must
write at inference, after exactly the prompt that it gets there."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_ft.data.chat.chat_template import (
    BUILT_IN,
    PROBE,
    Rendering,
    Span,
    Tools,
    render_chat,
    template_for,
    turn_ends,
)
from llama_ft.data.read.chats import REASONING
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.errors import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Reasoning content that a generation prompt opens, such as <think> and a line break. Group 1: it
# is also closed, so the model answers without reasoning.
OPENED_REASONING = re.compile(r"<think>\s*(</think>\s*)?\Z")
OPENED_IN_TEXT = re.compile(r"\s*<think>")
CLOSED_IN_TEXT = re.compile(r"\s*</think>")
EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")
# What closes reasoning content, as DeepSeek R1 and Qwen3 write it, before two line breaks.
END_OF_REASONING = "\n</think>"
PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)  # of a function, the same in JSON and elsewhere
ASCII_WORD = re.compile("[A-Za-z0-9]{2,}")
RESULT_START = 200  # characters of a result in which a word is searched for
EXCERPT = 40  # characters of a text in a message


class RenderedChat(NamedTuple):
    """A chat as text."""

    text: str
    spans: list[Span]  # characters in the loss
    prompts: list[int]  # for each response in the loss, where the prompt ends that inference has


class _RenderedResponse(NamedTuple):
    """A response with its prompt as at inference."""

    text: str
    spans: list[Span]  # characters in the loss
    start: int  # end of the prompt
    end: int  # end of the response


class ChatDiffers(Exception):
    """A template writes a response of this chat differently from how it does so at inference.

    Attributes:
        pieces: chats that have each response in the loss once; see `ChatRenderer._divided`.
        text: the whole chat.
        reason: the first difference.
    """

    def __init__(self, pieces: list[list[Message]], text: str, reason: str) -> None:
        super().__init__(reason)
        self.pieces = pieces
        self.text = text
        self.reason = reason


class ChatRenderer:
    """Renders messages with the tokenizer's template and finds the characters in the loss.

    At inference the model gets a prompt: the messages before the response, rendered with
    `add_generation_prompt=True`. It must write what the template adds for the response as the last
    message, up to its end-of-turn token, without the line break that may follow. If the template
    has `{% generation %}` blocks, they choose among these characters.

    Some templates render a message differently if others follow: Qwen3 drops its reasoning
    content, Mistral moves the system prompt, gpt-oss ends it with another token. `ChatDiffers` is
    raised if a chat does not begin with the prompt and text of each response in the loss.

    Args:
        tokenizer: with a chat template.
        labels: assistant, completion (the last assistant message) or all. Responses of weight 0 are
            never in the loss.
        template: one of the tokenizer's; None: the one for chats without tools.
        stop_ids: the model's, see `turn_ends`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        labels: str = "assistant",
        template: str | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.template = template or template_for(tokenizer, None)
        self.labels = labels
        names = [name for name, text in BUILT_IN.items() if self.template.endswith(text)]
        self._title = f" {names[0]}" if names else ""
        self.has_generation_block = bool(GENERATION_BLOCK.search(self.template))
        self._opens_responses = "add_generation_prompt" in self.template
        self._special_tokens = tokenizer.special_tokens_map
        # Blocks choose the end themselves.
        self._turn_ends = dict[str, str]()
        if not self.has_generation_block:
            self._turn_ends = turn_ends(tokenizer, self.template, stop_ids)
        self._tokens = tuple(tokenizer.get_added_vocab())
        # Of several alternatives re takes the first one that fits, so the longest come first.
        longest_first = sorted(self._tokens, key=len, reverse=True)
        any_token = "|".join(re.escape(token) for token in longest_first)
        matches_nothing = "(?!)"  # an empty pattern would match everywhere
        self._token = re.compile(any_token or matches_nothing)

    def render(self, messages: list[Message], tools: Tools | None = None) -> RenderedChat:
        """Return a chat as text, with what is in the loss.

        Raises:
            BadSample: the template rejects these messages or drops a part, or a response cannot be
                found in the text.
            ChatDiffers: the chat must be split into several samples.
        """
        text, blocks = self._with_end(messages, tools)
        for what in self._left_out(messages, tools, text):
            raise self._dropped(what)
        if self.labels == "all":
            for index, message in enumerate(messages):
                if message["role"] == "assistant":
                    self._refuse_dropped(messages[: index + 1], text, text)
            return RenderedChat(text, self._all_but(messages, tools, text), [])
        indices = self._messages_in_loss(messages)
        last = len(messages) - 1
        pieces = []
        for index in indices:
            # The last response ends the chat, which is rendered already.
            rendered = (text, blocks) if index == last else None
            pieces.append(self._piece(messages[: index + 1], tools, rendered))
        at_inference = {
            index: piece.text[: piece.end] for index, piece in zip(indices, pieces, strict=True)
        }
        for index, expected in at_inference.items():
            if text.startswith(expected):
                continue
            if indices == [last]:
                [piece] = pieces
                return RenderedChat(piece.text, piece.spans, [piece.start])
            reason = _difference(index, expected, text)
            raise ChatDiffers(self._divided(messages, tools, at_inference), text, reason)
        spans = [span for piece in pieces for span in piece.spans]
        if self.has_generation_block:
            # a block may hold more after the end of a chat than inside of it (Phi-3)
            spans = []
            for index, piece in zip(indices, pieces, strict=True):
                end = len(text) if index == last else piece.end
                spans += _clipped(blocks, piece.start, end)
        return RenderedChat(text, spans, [piece.start for piece in pieces])

    def _divided(
        self, messages: list[Message], tools: Tools | None, at_inference: dict[int, str]
    ) -> list[list[Message]]:
        """Return chats that have each response in the loss once, as at inference. Each ends with a
        response. Those before it stay in the loss if the template writes them there as at inference,
        such as the steps of an agent before the next question; the others have weight 0.

        Args:
            messages: the whole chat.
            tools: JSON schemas of functions.
            at_inference: by the index of a response in the loss, its prompt and itself.
        """
        remaining = list(at_inference)
        chats = []
        while remaining:
            last = remaining[-1]
            text, _ = self._with_end(messages[: last + 1], tools)
            inside = [index for index in remaining if text.startswith(at_inference[index])]
            if last not in inside:
                inside = [last]
            remaining = [index for index in remaining if index not in inside]
            chat = []
            for index, message in enumerate(messages[: last + 1]):
                if message["role"] == "assistant" and index not in inside:
                    message = {**message, "weight": 0}
                chat.append(message)
            chats.append(chat)
        return chats[::-1]

    def _messages_in_loss(self, messages: list[Message]) -> list[int]:
        """Return the indices of the responses in the loss."""
        roles = [message["role"] for message in messages]
        responses = [index for index, role in enumerate(roles) if role == "assistant"]
        if self.labels == "completion":
            responses = responses[-1:]
        return [index for index in responses if messages[index].get("weight") != 0]

    def _left_out(self, messages: list[Message], tools: Tools | None, text: str) -> Iterator[str]:
        """Yield the parts of a chat that this template drops, among those that some templates are
        known to drop. For reasoning content see `_dropped_of_response`."""
        has_calls = any(message.get("tool_calls") for message in messages)
        for name, is_used in {"tools": bool(tools), "tool_calls": has_calls}.items():
            # A template that writes them must name the variable.
            if is_used and not re.search(rf"\b{name}\b", self.template):
                yield name
        for tool in tools or ():
            name = _function_name(tool)
            if name and name not in text:
                yield f"the definition of the tool {name}"
        first = messages[0]
        if first["role"] == "system" and first["content"].strip() not in text:
            yield "the system message"

    def _with_end(self, messages: list[Message], tools: Tools | None) -> tuple[str, list[Span]]:
        """Return the text of a chat that ends with a response, after which comes the token that ends
        it, and the blocks."""
        rendering = Rendering(blocks=self.has_generation_block)
        text, blocks = render_chat(self.template, self._special_tokens, messages, tools, rendering)
        next_role = "tool" if messages[-1].get("tool_calls") else "user"
        return text + self._turn_ends.get(next_role, ""), blocks

    def _text(self, messages: list[Message], tools: Tools | None, open_answer: bool = False) -> str:
        rendering = Rendering(open_answer=open_answer)
        text, _ = render_chat(self.template, self._special_tokens, messages, tools, rendering)
        return text

    def _refuse_dropped(self, messages: list[Message], prompt: str, written: str) -> None:
        """Raise BadSample if a part of the last message, which is a response, is not in the text that
        the template writes for it, or the result of a tool not in its prompt."""
        last = len(messages) - 1
        for what in _dropped_of_response(messages[last], written):
            is_reasoning = what.startswith(('"', "what is before"))
            also = ", or remove it with --reasoning_content drop" if is_reasoning else ""
            raise self._dropped(f"{what} of messages[{last}]", also)
        for index in _dropped_results(messages, prompt):
            raise self._dropped(f"the result of a tool, messages[{index}]")

    def _dropped(self, what: str, also: str = "") -> BadSample:
        return BadSample(
            f"the chat template{self._title} drops {what}; use one that keeps it (--chat_template){also}."
        )

    def _piece(
        self,
        messages: list[Message],
        tools: Tools | None,
        rendered: tuple[str, list[Span]] | None = None,
    ) -> _RenderedResponse:
        """Return the prompt of the last message, which is a response, and the text that the
        template writes for it.

        Args:
            messages: up to the response.
            tools: JSON schemas of functions.
            rendered: the text of these messages and its blocks, if they are known.
        """
        prompt = self._text(messages[:-1], tools, open_answer=True)
        text, blocks = rendered or self._with_end(messages, tools)
        closing = ""
        if text.startswith(prompt):
            written_from = len(prompt)
        else:
            written_from, closing = self._written(prompt, messages, tools, text)
        start = len(prompt)
        # where a character of `text` stands behind the prompt
        moved = start + len(closing) - written_from
        end = self._message_end(text, written_from, messages, tools) + moved
        if self.has_generation_block:
            # Blocks of earlier responses are not behind the prompt, and do not move.
            shifted = []
            for first, last in blocks:
                if last > written_from:
                    shifted.append((first + moved, last + moved))
            spans = _clipped(shifted, start, start + len(closing) + len(text))
            if not spans:
                raise BadSample(
                    f'"messages[{len(messages) - 1}]": the chat template has no '
                    "{% generation %} block for this response."
                )
            if closing:
                spans[0] = (start, spans[0][1])
        elif self._opens_responses or closing:
            spans = [(start, end)]
        else:
            response_start = self._heading_end(messages, tools, text, start)
            spans = [(response_start, end)]
        written = closing + text[written_from:]
        self._refuse_dropped(messages, prompt, written)
        return _RenderedResponse(prompt + written, spans, start, end)

    def _heading_end(
        self, messages: list[Message], tools: Tools | None, text: str, prompt_end: int
    ) -> int:
        """Return where a response begins under a template without a generation prompt, which
        writes a heading, such as a space, before responses only."""
        probed = [*messages[:-1], {"role": "assistant", "content": PROBE}]
        heading, probe, _ = self._text(probed, tools).partition(PROBE)
        return len(heading) if probe and text.startswith(heading) else prompt_end

    def _written(
        self, prompt: str, messages: list[Message], tools: Tools | None, text: str
    ) -> tuple[int, str]:
        """Find what the template writes for the last message, in a text that does not begin with
        its prompt: the prompt opens reasoning content that the text lacks (DeepSeek R1, Nemotron),
        or other messages are written differently in it (LFM2.5).

        Returns:
            Where the text continues after the prompt; and the reasoning content with its end, if the
            prompt opens it and the template does not write it.
        """
        place = f'"messages[{len(messages) - 1}]"'
        before_heading = commonprefix([self._text(messages[:-1], tools), prompt])
        heading = prompt[len(before_heading) :]
        opened = OPENED_REASONING.search(heading)
        bare = heading[: opened.start()] if opened else heading
        probed = [*messages[:-1], {"role": "assistant", "content": PROBE}]
        before, probe, _ = self._text(probed, tools).partition(PROBE)
        at = before.rfind(bare) if bare else -1
        start = at + len(bare)
        if not probe or at < 0 or not text.startswith(before[:start]):
            raise BadSample(
                f"{place}: with this response, the chat template writes what is before it differently "
                "from the prompt that inference has; use another one (--chat_template)."
            )
        if opened is None:
            return start, ""
        reasoning = _reasoning(messages[-1])
        if opened[1] and reasoning:
            raise BadSample(
                f"{place}: the generation prompt of the chat template ends with empty reasoning "
                "content, so the model never writes this response's own. Use --reasoning_content "
                "drop, or a template whose generation prompt leaves it open (--chat_template)."
            )
        tag = OPENED_IN_TEXT.match(text, start)
        if opened[1]:
            empty = EMPTY_REASONING.match(text, start)
            return (empty.end() if empty else start), ""
        if tag is None and CLOSED_IN_TEXT.match(text, start):
            return start, ""
        if tag is None:
            closing = reasoning + END_OF_REASONING
            if not text.startswith("\n", start):
                closing += "\n\n"
            return start, closing
        # The white space that the prompt has after <think> is part of the prompt in the text, too.
        opening = opened[0].removeprefix("<think>")
        shared = commonprefix([opening, text[tag.end() :]])
        return tag.end() + len(shared), ""

    def _all_but(self, messages: list[Message], tools: Tools | None, text: str) -> list[Span]:
        """Return the characters of a text that do not belong to responses of weight 0."""
        bounds = [0]
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") != 0:
                continue
            piece = self._piece(messages[: index + 1], tools)
            start = piece.spans[0][0]
            end = piece.spans[-1][1]
            if not text.startswith(piece.text[:end]):
                # Written differently inside of the chat: search for it, without its reasoning
                # content and its last token.
                content = piece.text[start:end].rpartition("</think>")[2].lstrip()
                tokens_at = [match.start() for match in self._token.finditer(content)]
                if tokens_at:
                    content = content[: tokens_at[-1]]
                start = text.find(content, bounds[-1])
                end = start + len(content)
                ending = self._token.match(text, end)
                end = ending.end() if ending else end
            if start < 0:
                raise BadSample(
                    f'"messages[{index}]" has weight 0 and cannot be found in the rendered chat; '
                    "use another --chat_template, or --labels assistant."
                )
            bounds += [start, end]
        bounds.append(len(text))
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    def _message_end(
        self, text: str, start: int, messages: list[Message], tools: Tools | None
    ) -> int:
        """Return the end of a response at the end of the text: after its end-of-turn token, before
        a line break."""
        trimmed = text.rstrip()
        last = next((token for token in self._tokens if trimmed.endswith(token)), None)
        if last is None or len(trimmed) <= start:
            return len(text)
        if any(trimmed.endswith(end) for end in self._turn_ends.values()):
            return len(trimmed)
        before = trimmed[: -len(last)].rstrip()
        ends = []
        if len(before) > start and before.endswith(self._tokens):
            # Of two tokens, both may belong to the message (Qwen's </tool_call> <|im_end|>), or the
            # second one ends the chat and is missing if a message follows (Phi-3's <|end|>
            # <|endoftext|>).
            common = commonprefix([trimmed, self._text(messages, tools, open_answer=True)])
            ends = [match.end() for match in self._token.finditer(common, start)]
        return ends[-1] if ends else len(trimmed)


def _clipped(blocks: list[Span], start: int, end: int) -> list[Span]:
    """Return the blocks of the response at [start, end), without what its prompt has of them."""
    clipped = []
    for first, last in blocks:
        if last > start and first < end:
            clipped.append((max(first, start), last))
    return clipped


def drop_reasoning(messages: list[Message]) -> list[Message]:
    """Return a chat without the reasoning content of its responses: neither in a field nor in
    <think> tags.

    Raises:
        BadSample: nothing is left of a response.
    """
    shortened = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            message = {key: value for key, value in message.items() if key not in REASONING}
            content = message["content"] or ""
            if "</think>" in content:
                message["content"] = content.rpartition("</think>")[2].lstrip()
            if not (message["content"] or message.get("tool_calls")):
                raise BadSample(
                    f'"messages[{index}]" has nothing but reasoning content, and '
                    "--reasoning_content is drop."
                )
        shortened.append(message)
    return shortened


def _reasoning(message: Message) -> str:
    """Return the reasoning content of a response: that of a field, else that before </think>."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    before, ended, _ = (message["content"] or "").partition("</think>")
    return before.rpartition("<think>")[2].strip() if ended else ""


def _dropped_of_response(message: Message, written: str) -> Iterator[str]:
    """Yield the parts of a response that are not in the text that a template writes for it."""
    before, ended, answer = (message["content"] or "").rpartition("</think>")
    reasoning = {}
    for key in REASONING:
        if isinstance(message.get(key), str):
            reasoning[f'"{key}"'] = message[key]
    if ended:
        reasoning["what is before </think>"] = before.rpartition("<think>")[2]
    for what, content in reasoning.items():
        if content.strip() not in written:
            yield what
    names = Counter(map(_function_name, message.get("tool_calls") or ()))
    for name, count in names.items():
        rendered = written.count(name)
        if rendered < count:
            yield f"{count - rendered} of {plural(count, 'tool call')} ({name})"
    if message.get("tool_calls") and answer.strip() not in written:
        yield 'the text next to "tool_calls"'
    # Idefics 3's template writes lists of parts only. The first word suffices: templates may change
    # white space.
    words = answer.split()
    if words and words[0] not in written:
        yield "the content"


def _dropped_results(messages: list[Message], prompt: str) -> Iterator[int]:
    """Yield the indices of results of tools before the last message that are not in its prompt."""
    for index in range(len(messages) - 2, -1, -1):
        if messages[index]["role"] != "tool":
            return
        # A word suffices: templates write results as they are, or as JSON.
        words = ASCII_WORD.findall(str(messages[index]["content"])[:RESULT_START])
        if words and max(words, key=len) not in prompt:
            yield index


def _function_name(function: dict[str, Any]) -> str:
    """Return the name of a function that is defined or called; "" if templates may write it
    differently."""
    name = function.get("function", function).get("name")
    return name if isinstance(name, str) and PLAIN_NAME.fullmatch(name) else ""


def _difference(index: int, at_inference: str, text: str) -> str:
    """Describe the first difference between a response at inference and in the whole chat."""
    at = len(commonprefix([at_inference, text]))
    around = slice(max(0, at - EXCERPT // 2), at + EXCERPT // 2)
    expected = json.dumps(at_inference[around], ensure_ascii=False)
    actual = json.dumps(text[around], ensure_ascii=False)
    return f"messages[{index}] is {expected} at inference, and {actual} inside the chat"
