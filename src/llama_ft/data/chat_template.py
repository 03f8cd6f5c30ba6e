"""Chat templates: select the template of a run, check it, and render chats as text."""

import functools
import json
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from llama_ft.commands import RECIPES
from llama_ft.data.formats import BadSample, Message
from llama_ft.data.template_limits import exceeded_limit
from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --chat_template NAME. Their {% generation %} blocks mark the responses that --labels assistant has
# in the loss.
BUILT_IN = {
    file.stem: file.read_text()
    for file in sorted((RECIPES.parent / "configs/chat_templates").glob("*.jinja"))
}
ALPACA = BUILT_IN["alpaca"]
Span = tuple[int, int]  # characters [start, end)
Tools = list[Any]  # JSON schemas of functions

INPUT_HEADING = "### Input:\n"  # in the prompt of an alpaca sample, under the alpaca template
PROBE = "\ue5a1\ue5a2"  # private-use characters, which can be found again in a rendered chat
# Llama 3.2's template writes today's date by default. Samples must not depend on the day, so this
# is its fallback date.
DATE = "26 Jul 2024"
DAY = datetime(2024, 7, 26)  # the same date for templates that call strftime_now, such as gpt-oss's
TWO_MESSAGES: list[Message] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": PROBE},
]
LARGEST_FILE = 2**20  # bytes of a template
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
# Text that looks like a special token: <|im_end|>, <｜User｜>, <end_of_turn>; after a response also
# </s>, <eos>.
MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>|<[a-z]+(?:_[a-z]+)+>")
END_MARKER = re.compile(r"<[^<>\s]+>")


def ensure_chat_template(
    tokenizer: "PreTrainedTokenizerBase", wanted: str | None = None, add_tokens: bool = False
) -> str:
    """Set the tokenizer's chat template in place, so that it is saved with the final model.

    A template may write special tokens that the tokenizer does not have as single tokens. Only the
    one that ends a message must be a token. Then headings such as Zephyr's <|user|> or Mistral's
    [INST] are accepted as plain text.

    Args:
        tokenizer: the run's tokenizer.
        wanted: `--chat_template`, the name of a built-in template or a file. None: the tokenizer's
            own, else alpaca.
        add_tokens: add missing special tokens to the tokenizer, because the model's embeddings may
            grow. The token that ends a message becomes the EOS token.

    Returns:
        A line for the log; empty if the tokenizer keeps its own template.

    Raises:
        UserError: the template has an error, or it writes special tokens that the tokenizer does
            not have.
    """
    notes = []
    subject = "the tokenizer's chat template"
    if wanted is not None:
        subject = f"--chat_template {wanted}"
        # chatml is Qwen's template. Qwen has no BOS token, but a Llama needs it.
        bos = "{{ bos_token }}" if wanted == "chatml" and added_bos(tokenizer) else ""
        tokenizer.chat_template = bos + (BUILT_IN.get(wanted) or _read_template(wanted))
        notes.append(f"chat template: {wanted}, saved with the final model")
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ALPACA
        notes.append(
            "the tokenizer has no chat template: prompts are written with ### Instruction: and ### Response:"
        )
    before, after = _around_a_response(tokenizer, subject)
    special_tokens = tokenizer.get_added_vocab().keys() | tokenizer.all_special_tokens
    end_markers = END_MARKER.findall(after)
    missing_ends = [marker for marker in end_markers if marker not in special_tokens]
    if missing_ends:
        markers = [*MARKER.findall(before), *missing_ends]
        # a dict keeps the order, which decides the ids of new tokens and the EOS token
        unique = dict.fromkeys(markers)
        missing = [marker for marker in unique if marker not in special_tokens]
        if not add_tokens:
            raise UserError(
                f"{subject} writes {', '.join(missing)}: not in the tokenizer's vocabulary, so the model could not end "
                f"a message.\nUse another --chat_template ({', '.join(BUILT_IN)} or a file), or add the tokens with "
                "--resize_embeddings."
            )
        added = [AddedToken(token, special=True, normalized=False) for token in missing]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.eos_token = missing[-1]
        notes.append(f"new tokens: {', '.join(missing)}")
    if before and not any(token in after for token in tokenizer.get_added_vocab()):
        notes.append(
            f"{subject} does not end responses with a special token: the model will not learn when to stop"
        )
    return "; ".join(notes)


def _read_template(name: str) -> str:
    file = Path(name).expanduser()
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ValueError(f"larger than {LARGEST_FILE:,} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--chat_template {name}: not a template ({reason(error)}).") from error


def added_bos(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the BOS token that the tokenizer puts before every text, as a list of one id; [] if it
    adds none."""
    # Tokenizers say in several ways that they add it (add_bos_token, a post-processor); trying
    # covers all of them.
    ids: Any = tokenizer("")["input_ids"]
    return [token for token in ids[:1] if token == tokenizer.bos_token_id]


def _around_a_response(
    tokenizer: "PreTrainedTokenizerBase", subject: str = "the chat template"
) -> tuple[str, str]:
    """Return what the template writes before and after a response; empty texts if it rejects a chat
    of two messages."""
    template = tokenizer.get_chat_template()
    special_tokens = tokenizer.special_tokens_map
    if problem := _exceeded_limit(template, json.dumps(special_tokens, default=str)):
        raise UserError(f"{subject} cannot be used: for a chat of two messages, {problem}")
    try:
        _compile_jinja_template(template)
        text, _ = render_chat(template, special_tokens, TWO_MESSAGES)
    except TemplateSyntaxError as error:
        raise UserError(f"{subject}, line {error.lineno}: {error.message}") from None
    except BadSample:
        return "", ""
    before, _, after = text.partition(PROBE)
    return before, after


@functools.cache
def _exceeded_limit(template: str, special_tokens: str) -> str | None:
    """Return the limit that a template exceeds, or None. `special_tokens` is JSON."""
    tokens = json.loads(special_tokens)
    return exceeded_limit(lambda: _rendered(template, tokens, in_its_form(template, TWO_MESSAGES)))


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", known: int | list[int] | None
) -> list[int]:
    """Return the ids of the tokens that end generation: the model's own, and the template's
    end-of-turn token.

    Args:
        tokenizer: with the chat template of the fine-tuning, if any.
        known: the model's eos_token_id.
    """
    stops = []
    if isinstance(known, list):
        stops = known
    elif known is not None:
        stops = [known]
    if not tokenizer.chat_template:
        return stops
    _, after = _around_a_response(tokenizer)
    ids = tokenizer.get_added_vocab()
    written = [token for token in ids if token in after]
    end_of_turn = min(written, key=after.index, default=None)
    if end_of_turn is None or ids[end_of_turn] in stops:
        return stops
    return [*stops, ids[end_of_turn]]


def render_chat(
    template: str,
    special_tokens: dict[str, Any],
    messages: list[Message],
    tools: Tools | None = None,
    blocks: bool = False,
    open_answer: bool = False,
) -> tuple[str, list[Span]]:
    """Render a chat.

    Args:
        template: Jinja, as in tokenizer.chat_template.
        special_tokens: name -> text, such as bos_token; templates use them as variables.
        messages: messages of all roles, in order.
        tools: JSON schemas of functions, for templates that support tools.
        blocks: also return the spans of `{% generation %}` blocks.
        open_answer: end with the heading of an assistant message (add_generation_prompt).

    Returns:
        The text, and the blocks as [start, end) of its characters.

    Raises:
        BadSample: the template rejects the chat.
    """
    try:
        written = in_its_form(template, messages)
        texts, spans = _rendered(template, special_tokens, written, tools, blocks, open_answer)
    except RENDER_ERRORS as error:
        raise BadSample(f"the chat template rejects this chat: {error}") from None
    return texts[0], spans[0] if spans else []


@functools.cache
def _takes_parts_only(template: str) -> bool:
    """Return whether a template writes contents that are lists of parts, but not texts (LLaVA,
    Idefics 3)."""
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    for messages in (TWO_MESSAGES, _with_parts(TWO_MESSAGES)):
        with suppress(*RENDER_ERRORS):
            texts, _ = _rendered(template, tokens, messages)
            if PROBE in texts[0]:
                return messages is not TWO_MESSAGES
    return False


def _with_parts(messages: list[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts."""
    changed = []
    for message in messages:
        if isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        changed.append(message)
    return changed


def in_its_form(template: str, messages: list[Message]) -> list[Message]:
    """Return messages whose contents have the form that the template writes."""
    return _with_parts(messages) if _takes_parts_only(template) else messages


def _rendered(
    template: str,
    special_tokens: dict[str, Any],
    messages: list[Message],
    tools: Tools | None = None,
    blocks: bool = False,
    open_answer: bool = False,
) -> tuple[list[str], list[list[Span]]]:
    # Transformers compiles a template once and caches it, with its global variables. Its own
    # strftime_now returns today's date.
    _compile_jinja_template(template).globals["strftime_now"] = DAY.strftime
    rendered = render_jinja_template(
        [messages],
        tools,
        chat_template=template,
        return_assistant_tokens_mask=blocks,
        add_generation_prompt=open_answer,
        date_string=DATE,
        **special_tokens,
    )
    # Transformers annotates it as str
    return cast(tuple[list[str], list[list[Span]]], rendered)
