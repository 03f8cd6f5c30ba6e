"""Chat templates: which one a run has, and the text it makes of a chat."""

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from llama_ft.commands import RECIPES
from llama_ft.data.formats import BadRow, Message
from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --chat_template NAME. Their {% generation %} blocks are what --labels assistant trains on.
BUILT_IN = {file.stem: file.read_text() for file in sorted((RECIPES.parent / "configs/chat_templates").glob("*.jinja"))}
ALPACA = BUILT_IN["alpaca"]
Span = tuple[int, int]  # characters [start, end)
Tools = list[Any]  # of JSON schemas

INPUT_HEADING = "### Input:\n"  # of an alpaca row under the alpaca template
PROBE = "\ue5a1\ue5a2"  # private-use characters: content that can be found again in what a template makes of it
# Llama 3.2's template writes today's date unless it is given one: rows must not depend on the day. Its own default.
DATE = "26 Jul 2024"
DAY = datetime(2024, 7, 26)  # the same for templates that ask for the time by strftime_now, as gpt-oss's does
# What looks like a special token: <|im_end|>, <｜User｜>, <end_of_turn>; after an answer also </s>, <eos>.
MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>|<[a-z]+(?:_[a-z]+)+>")
END_MARKER = re.compile(r"<[^<>\s]+>")


def ensure_chat_template(
    tokenizer: "PreTrainedTokenizerBase", wanted: str | None = None, add_tokens: bool = False
) -> str:
    """Give the tokenizer its chat template, in place, so that it is saved with the result.

    Args:
        tokenizer: of the run.
        wanted: `--chat_template`, a built-in template's name or a file. None: the tokenizer's own, else alpaca.
        add_tokens: the model's embeddings may grow: add special tokens that the tokenizer lacks.

    Returns:
        A line about it for people; empty if it is the tokenizer's own.

    Raises:
        UserError: there is no such template, it has a mistake, or it writes special tokens that are no tokens.
    """
    notes, subject = [], "the tokenizer's chat template"
    if wanted is not None:
        subject = f"--chat_template {wanted}"
        tokenizer.chat_template = _named_template(wanted, tokenizer)
        notes.append(f"chat template: {wanted}, saved with the result")
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ALPACA
        notes.append("the tokenizer has no chat template: rows are written as ### Instruction: and ### Response:")
    template = own_template(tokenizer)
    if missing := missing_tokens(template, tokenizer, subject):
        if not add_tokens:
            raise UserError(
                f"{subject} writes {', '.join(missing)}: no tokens of this tokenizer, so the model could not end a "
                f"message.\nExpected another --chat_template ({', '.join(BUILT_IN)} or a file), or "
                "--resize_embeddings, which adds them."
            )
        add_missing_tokens(tokenizer, template)
        notes.append(f"new tokens: {', '.join(missing)}")
    before, after = _around_an_answer(template, tokenizer, subject)
    if before and not any(token in after for token in tokenizer.get_added_vocab()):
        notes.append(f"{subject} ends answers with no token: the model does not learn where to stop")
    return "; ".join(notes)


def own_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the template a tokenizer has.

    Raises:
        UserError: it has several, and none is called default.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(f"the tokenizer's chat template: {error}") from None


def _named_template(wanted: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    if wanted in BUILT_IN:  # Qwen, whose template chatml is, has no BOS, but a Llama should not do without
        return ("{{ bos_token }}" if wanted == "chatml" and added_bos(tokenizer) else "") + BUILT_IN[wanted]
    try:
        return Path(wanted).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"expected one of {', '.join(BUILT_IN)} or a file"
        raise UserError(f"--chat_template {wanted}: {expected}, but it cannot be read: {reason(error)}.") from None


def added_bos(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The BOS that a tokenizer puts before a text by itself, if it does."""
    ids: Any = tokenizer("")["input_ids"]
    return [token for token in ids[:1] if token == tokenizer.bos_token_id]


def missing_tokens(
    template: str, tokenizer: "PreTrainedTokenizerBase", subject: str = "the chat template"
) -> list[str]:
    """Find special tokens that a template writes in a plain chat and that are no single tokens of the tokenizer.

    What counts is the end of a message: if it is a token, headings such as Zephyr's <|user|> or Mistral's [INST] are
    taken for the plain text they are meant as.

    Raises:
        UserError: the template has a mistake.
    """
    before, after = _around_an_answer(template, tokenizer, subject)
    known = tokenizer.get_added_vocab().keys() | tokenizer.all_special_tokens
    ends = [marker for marker in END_MARKER.findall(after) if marker not in known]
    markers = [*MARKER.findall(before), *ends] if ends else []
    return list(dict.fromkeys(marker for marker in markers if marker not in known))


def _around_an_answer(template: str, tokenizer: "PreTrainedTokenizerBase", subject: str) -> tuple[str, str]:
    """What a template writes before and after an answer; nothing if it wants other chats than a plain one."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}]
    try:
        before, _, after = render_chat(template, tokenizer.special_tokens_map, chat)[0].partition(PROBE)
    except TemplateSyntaxError as error:
        raise UserError(f"{subject}, line {error.lineno}: {error.message}") from None
    except BadRow:
        return "", ""
    return before, after


def add_missing_tokens(tokenizer: "PreTrainedTokenizerBase", template: str) -> list[str]:
    """Add what `missing_tokens` finds as special tokens; the end of a message becomes the tokenizer's EOS."""
    missing = missing_tokens(template, tokenizer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing], special_tokens=True)
    if missing:
        tokenizer.eos_token = missing[-1]
    return missing


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", known: int | list[int] | None) -> list[int]:
    """Where an answer ends: at what the model stops at already, and at the token that ends a message in the template.

    Args:
        tokenizer: with the chat template that was trained with, if any.
        known: the model's eos_token_id.
    """
    stops = known if isinstance(known, list) else [known] if known is not None else []
    if not tokenizer.chat_template:
        return stops
    _, after = _around_an_answer(own_template(tokenizer), tokenizer, "the chat template")
    ids = {token: id_ for token, id_ in tokenizer.get_added_vocab().items() if token in after}
    first = min(ids, key=after.index, default=None)
    return stops if first is None or ids[first] in stops else [*stops, ids[first]]


def render_chat(
    template: str,
    special_tokens: dict[str, Any],
    messages: list[Message],
    tools: Tools | None = None,
    blocks: bool = False,
    open_answer: bool = False,
) -> tuple[str, list[Span]]:
    """Return the text of a chat, and its `{% generation %}` blocks if wanted.

    Raises:
        BadRow: the template refuses it.
    """
    rendered: Any  # its annotation says str; it is a list of texts and a list of lists of spans
    try:
        _compile_jinja_template(template).globals["strftime_now"] = DAY.strftime  # it compiles once
        rendered = render_jinja_template(
            [messages], tools, chat_template=template, return_assistant_tokens_mask=blocks,
            add_generation_prompt=open_answer, date_string=DATE, **special_tokens,
        )  # fmt: skip
    except TemplateSyntaxError:
        raise
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise BadRow(f"the chat template refuses this chat: {error}") from None
    texts, spans = rendered
    return texts[0], spans[0] if spans else []
