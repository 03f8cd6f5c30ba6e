"""Tokenize prompts as training tokenizes them: chats with the chat template, or text without it."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from llama_ft.data.chat.chat_template import Rendering, Tools, added_bos, render_chat, template_for
from llama_ft.data.media import Media
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.data.read.media import media_paths

# How a fine-tuned model is asked: as it was trained. text: prompts to continue, without the chat
# template.
PromptFormat = Literal["chat", "text"]
AS_TEXT = "asked as text without the chat template, like the samples of the fine-tuning"


def check_unicode(text: str) -> None:
    """Raise BadSample for half of a surrogate pair, which JSON allows, but tokenizers reject."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(
            f"\\u{ord(text[error.start]):04x} is half of a character (a lone surrogate); expected Unicode text."
        ) from None


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text to continue: BOS if the tokenizer adds one, but never the EOS that
    some tokenizers append. Raises BadSample if the text is not Unicode."""
    check_unicode(text)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = added_bos(tokenizer)
    return ids if ids[: len(bos)] == bos else [*bos, *ids]


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Tools | None = None,
    media: Media | None = None,
    is_today: bool = False,
) -> list[int]:
    """Return the tokens of a chat up to the place of the answer; of one with media as a
    `MediaPrompt`.

    Args:
        tokenizer: with a chat template.
        messages: of the chat; media as their parts.
        tools: JSON schemas of functions.
        media: reads what is not text; None: only text is read.
        is_today: templates write today's date instead of that of training samples.

    Raises:
        BadSample: the template rejects the chat, a text is not Unicode, or a file cannot be read.
        UserError: the template exceeds a limit, or Transformers chooses none of several ones.
    """
    text, _ = render_chat(
        template_for(tokenizer, tools),
        tokenizer.special_tokens_map,
        messages,
        tools,
        Rendering(open_answer=True, is_today=is_today),
    )
    check_unicode(text)
    if media is not None and media_paths(messages):
        return media.prompt(text, messages)
    # the template has written BOS
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def response_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools | None = None
) -> str | None:
    """Return what the chat template writes for the last message, a response, without special tokens;
    None if it writes what is before it differently.

    Raises:
        BadSample: the template rejects the chat.
    """
    template = template_for(tokenizer, tools)
    names = tokenizer.special_tokens_map
    rendering = Rendering(open_answer=True)
    prompt, _ = render_chat(template, names, messages[:-1], tools, rendering)
    text, _ = render_chat(template, names, messages, tools)
    if not text.startswith(prompt):
        return None
    ids = tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
