"""Which characters of a rendered chat are trained on: the answers, exactly."""

import re
from collections.abc import Iterator
from os.path import commonprefix
from typing import TYPE_CHECKING

from llama_ft.data.chat_template import PROBE, Span, Tools, own_template, render_chat
from llama_ft.data.formats import BadRow, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A template that asks for it writes a call of tools only where the content beside it is none (DeepSeek's).
NO_CONTENT = re.compile(r"content\W{0,2}\s+is\s+(?:not\s+)?none")

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # where servers put what models think before they answer


class ChatRenderer:
    """Renders messages with the tokenizer's template and knows which characters are trained on.

    With a `{% generation %}` block the template itself says what an answer is. Stock templates of Llama 3, Qwen and
    Gemma have none: there an answer is what a chat gains over the prompt for it, that is the same chat up to the turn
    before, rendered with `add_generation_prompt=True`. It reaches up to its end-of-turn token, without the line break
    that may follow. Where a template shows a turn otherwise once others follow (Qwen3 drops thoughts, Mistral moves
    the system prompt, Phi-3 and gpt-oss end the last turn otherwise), a probe in place of the answer tells where it
    stands.

    Args:
        tokenizer: with a chat template.
        labels: assistant, completion (the last assistant turn) or all. Turns of weight 0 are left out of each.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", labels: str = "assistant") -> None:
        self.template = own_template(tokenizer)
        self.labels = labels
        self.has_generation_block = bool(GENERATION_BLOCK.search(self.template))
        self._opens_answers = "add_generation_prompt" in self.template
        self._special_tokens = tokenizer.special_tokens_map
        self._tokens = tuple(tokenizer.get_added_vocab())
        self._token = re.compile("|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or "(?!)")

    def render(self, messages: list[Message], tools: Tools | None = None) -> tuple[str, list[Span]]:
        """Return the text of a chat and the spans of it that are trained on.

        Raises:
            BadRow: the template refuses these messages or loses tools, or it cannot be told where an answer stands.
        """
        calls = any(message.get("tool_calls") for message in messages)
        for used, name in ((tools, "tools"), (calls, "tool_calls")):
            if used and not re.search(rf"\b{name}\b", self.template):
                raise BadRow(f"the chat template leaves out {name}; expected one that has them (--chat_template).")
        if calls and NO_CONTENT.search(self.template):
            messages = [
                {**turn, "content": turn["content"] or None} if turn.get("tool_calls") else turn for turn in messages
            ]
        text, blocks = render_chat(self.template, self._special_tokens, messages, tools, self.has_generation_block)
        for what, content in _must_appear(messages):
            if content.strip() not in text:
                raise BadRow(f"the chat template leaves out {what}; expected one that has it (--chat_template).")
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        unweighted = [index for index, message in enumerate(messages) if message.get("weight") == 0]
        wanted = answers[-1:] if self.labels == "completion" else answers
        wanted = [index for index in wanted if (index in unweighted) == (self.labels == "all")]
        if not self.has_generation_block or not wanted:
            spans = [span for index in wanted for span in self._answer(messages, tools, index, text)]
        elif len(blocks) == len(answers):
            spans = [block for index, block in zip(answers, blocks, strict=True) if index in wanted]
        elif blocks and wanted == answers:
            spans = blocks
        else:
            count = f"{len(blocks)} {{% generation %}} blocks for {len(answers)} answers"
            raise BadRow(f"the chat template has {count}; expected one block per answer.")
        if self.labels != "all":
            return text, spans
        others = [self._content(messages, tools, index, text) for index in unweighted if index not in answers]
        edges = sorted([*((start, end) for start, _, end in others), *spans])
        bounds = [0, *(edge for span in edges for edge in span), len(text)]
        return text, [(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end]

    def _text(self, messages: list[Message], tools: Tools | None, open_answer: bool = False) -> str:
        return render_chat(self.template, self._special_tokens, messages, tools, open_answer=open_answer)[0]

    def _answer(self, messages: list[Message], tools: Tools | None, index: int, text: str) -> list[Span]:
        start = self._answer_start(messages, tools, index, text)
        if start is not None:
            so_far = messages[: index + 1]
            alone = text if len(so_far) == len(messages) else self._text(so_far, tools)
            if text.startswith(alone):
                return [(start, self._turn_end(alone, start, so_far, tools))]
        turn_start, content_start, content_end = self._content(messages, tools, index, text)
        start = turn_start if start is None else start
        probed = [*messages[:index], _with_probe(messages[index])]
        end = content_end
        for open_answer in (False, True):
            ending = _after_probe(self._text(probed, tools, open_answer), messages[index])
            common = commonprefix([ending, text[content_end:]])
            tokens = [match.end() for match in self._token.finditer(common)]
            if common == ending or tokens:
                # Left open it shows the next answer's heading too: of that the first token only is the turn's.
                length = tokens[0 if open_answer else -1] if tokens else len(common)
                end = content_end + length
                break
        if messages[index + 1 :] and messages[index + 1]["role"] == "tool":
            # Gemma 4's template writes what the tools return between the calls and the text of the same turn.
            calls = self._text([*messages[:index], {**messages[index], "content": ""}], tools)
            common = commonprefix([calls, text])
            called = max((match.end() for match in self._token.finditer(common, start)), default=len(common))
            if start < called < content_start:
                return [(start, called), (content_start, end)]
        return [(start, end)]

    def _answer_start(self, messages: list[Message], tools: Tools | None, index: int, text: str) -> int | None:
        """Where the prompt for an answer ends; None where the text does not begin with that prompt."""
        prompt = self._text(messages[:index], tools, open_answer=True)
        if not text.startswith(prompt):
            return None
        if self._opens_answers:
            return len(prompt)
        # The prompt lacks whatever heading the template puts before an answer: a probe tells.
        probe = {"role": "assistant", "content": PROBE}
        heading, found, _ = self._text([*messages[:index], probe], tools).partition(PROBE)
        if found and text.startswith(heading):
            return len(heading)
        return len(prompt) if messages[index].get("tool_calls") else None

    def _content(self, messages: list[Message], tools: Tools | None, index: int, text: str) -> tuple[int, int, int]:
        """Where a turn stands, which is what changes when it is another: the beginning of its thoughts, or else of its
        content; the beginning and the end of its content."""
        probed = _with_probe(messages[index])
        probed_text = self._text([*messages[:index], probed, *messages[index + 1 :]], tools)
        before, found, _ = probed_text.partition(PROBE)
        after = _after_probe(probed_text, messages[index])
        end = len(text) - len(after)
        if not (found and text.startswith(before) and text.endswith(after) and len(before) <= end):
            changed = f'"messages[{index}]": the chat template changes other turns with this one'
            raise BadRow(f"{changed}; expected a template with a {{% generation %}} block around answers.")
        bare = {key: value for key, value in probed.items() if key not in THOUGHTS} | {"content": PROBE}
        if bare == probed:
            return len(before), len(before), end
        bare_text = self._text([*messages[:index], bare, *messages[index + 1 :]], tools)
        return len(commonprefix([bare_text, text])), len(before), end

    def _turn_end(self, text: str, start: int, messages: list[Message], tools: Tools | None) -> int:
        """The end of an answer that ends the text: its end-of-turn token, without the line break after it."""
        trimmed = text.rstrip()
        last = next((token for token in self._tokens if trimmed.endswith(token)), None)
        if last is None or len(trimmed) <= start:
            return len(text)
        before = trimmed[: -len(last)].rstrip()
        if len(before) > start and before.endswith(self._tokens):
            # Two tokens: of Phi-3's <|end|> <|endoftext|> the second ends the chat, not the turn, and is not there
            # when the chat goes on; Qwen's </tool_call> <|im_end|> are.
            common = commonprefix([trimmed, self._text(messages, tools, open_answer=True)])
            ends = [match.end() for match in self._token.finditer(common, start)]
            return ends[-1] if ends else len(trimmed)
        return len(trimmed)


def _must_appear(messages: list[Message]) -> Iterator[tuple[str, str]]:
    """What templates are known to lose, and its text."""
    last = messages[-1]
    if messages[0]["role"] == "system":
        yield "the system message", messages[0]["content"]
    thought, ended, _ = (last["content"] or "").partition("</think>")
    if ended:
        yield "what the last answer has before </think>", thought.rpartition("<think>")[2]
    for key in THOUGHTS:
        if isinstance(last.get(key), str):
            yield f'the last answer\'s "{key}"', last[key]
    for message in messages:
        if message.get("tool_calls"):
            yield 'the text beside "tool_calls"', _thoughts_and_text(message)[1]


def _thoughts_and_text(message: Message) -> tuple[str, str]:
    """The content of a turn: thoughts up to and with </think>, if any, and the text after them."""
    thoughts, ended, said = (message["content"] or "").rpartition("</think>")
    return thoughts + ended, said


def _with_probe(message: Message) -> Message:
    return {**message, "content": _thoughts_and_text(message)[0] + PROBE}


def _after_probe(text: str, message: Message) -> str:
    """What follows the probe; where there was no content, calls of tools follow without the line break before them."""
    after = text.partition(PROBE)[2]
    return after if _thoughts_and_text(message)[1].strip() else after.lstrip()
