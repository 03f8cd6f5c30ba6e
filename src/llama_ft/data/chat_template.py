"""Chat templates: a built-in one for tokenizers without, and which characters of a rendered chat the model answers."""

import re
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from llama_ft.data.formats import BadRow, Message
from llama_ft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, end)

# The wording of Stanford Alpaca's headings; special tokens the tokenizer lacks render as nothing.
ALPACA_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '### Input:\n' + message['content'] + '\n\n' }}"
    "{% else %}"
    "{{ message['content'] + '\n\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
INPUT_HEADING = "### Input:\n"

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def ensure_chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Give a tokenizer without a chat template the built-in one, so that it is used and saved with the result.

    Returns:
        A line about it for people; empty when the tokenizer has a template of its own.
    """
    if tokenizer.chat_template:
        return ""
    tokenizer.chat_template = ALPACA_TEMPLATE
    return "the tokenizer has no chat template: rows are written as ### Instruction: and ### Response:"


class ChatRenderer:
    """Renders messages with the tokenizer's template and knows which characters are the assistant's.

    With a `{% generation %}` block the template itself says so. Stock templates of Llama 3, Qwen and Gemma have none:
    there an answer is what a chat gains over the prompt for it, that is the same chat up to the turn before, rendered
    with `add_generation_prompt=True`. It reaches up to its end-of-turn token, without the line break that may follow.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates, and none is called default
            raise UserError(f"the tokenizer's chat template: {error}") from None
        self.has_generation_block = bool(GENERATION_BLOCK.search(self.template))
        self._opens_answers = "add_generation_prompt" in self.template
        self._special_tokens = tokenizer.special_tokens_map
        self._added_tokens = tuple(tokenizer.get_added_vocab())

    def render(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return the text of a chat and the spans of it that are trained on.

        Raises:
            BadRow: the template refuses these messages, or it cannot be told where an answer stands.
        """
        if self.has_generation_block:
            text, spans = self._render(messages)
            if not spans:
                raise BadRow("the {% generation %} block of the chat template marks no answer in this chat.")
            return text, spans
        text, _ = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._answer_start(messages, index, text)
                spans.append((start, self._answer_end(messages, index, text, start)))
        return text, spans

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
        options["return_assistant_tokens_mask"] = self.has_generation_block
        rendered: Any  # its annotation says str; it is a list of texts and a list of lists of spans
        try:
            rendered = render_jinja_template(conversations=[messages], chat_template=self.template, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRow(f"the chat template refuses this chat: {error}") from None
        texts, spans = rendered
        return texts[0], spans[0] if spans else []

    def _answer_start(self, messages: list[Message], index: int, text: str) -> int:
        prompt, _ = self._render(messages[:index], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise BadRow(_not_a_prefix(index))
        if self._opens_answers:
            return len(prompt)
        # The prompt lacks whatever heading the template puts before an answer: the answer's own text tells.
        start = text.find(messages[index]["content"].strip(), len(prompt))
        if start < 0:
            raise BadRow(_not_a_prefix(index))
        return start

    def _answer_end(self, messages: list[Message], index: int, text: str, start: int) -> int:
        chat, _ = self._render(messages[: index + 1])
        if text.startswith(chat):
            end = len(chat)
        else:
            # Some templates show a turn otherwise once others follow (Qwen3 puts an empty thought before the last
            # answer only): then the end is the answer's text with what follows it when it stands last.
            answer = messages[index]["content"].strip()
            at = text.find(answer, start)
            ending = chat[chat.rfind(answer) + len(answer) :]
            if not answer or at < 0 or answer not in chat or not text.startswith(ending, at + len(answer)):
                raise BadRow(_not_a_prefix(index))
            end = at + len(answer) + len(ending)
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(self._added_tokens) else end


def _not_a_prefix(index: int) -> str:
    return (
        f'"messages[{index}]": the chat template changes earlier turns when later ones follow, so where this answer\n'
        "stands cannot be told; expected a template with a {% generation %} block around answers."
    )
