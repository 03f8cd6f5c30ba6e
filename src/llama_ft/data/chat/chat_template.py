"""Chat templates: select the template of a run, check it, and render chats as text."""

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from llama_ft.config.home import expanded
from llama_ft.data.chat.template_limits import ExceededLimit, exceeded_limit, limited
from llama_ft.data.read.chats import REASONING
from llama_ft.data.read.formats import BadSample, Message
from llama_ft.errors import UserError, plural, reason
from llama_ft.packaged import PACKAGED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --chat_template NAME. Their {% generation %} blocks mark the responses that --labels assistant has
# in the loss.
BUILT_IN = {
    file.stem: file.read_text()
    for file in sorted((PACKAGED / "configs/chat_templates").glob("*.jinja"))
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
NEXT_PROBE = "\ue5a3\ue5a4"  # the content of a message after the one that is probed
ARGUMENTS = {"x": PROBE}
# The id has the form that Mistral's templates ask for.
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": ARGUMENTS},
}
OTHER_ID = "call_0123456789abcdef"  # as OpenAI's API writes them
RESULT: Message = {"role": "tool", "content": NEXT_PROBE, "tool_call_id": CALL["id"], "name": "f"}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "f",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "x"}},
            },
        },
    }
]
# Limits are tried with it, too: a template can do more for some roles, or for many messages.
LONG_CHAT: list[Message] = [
    {"role": "system", "content": "Hi"},
    *[*TWO_MESSAGES] * 40,
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": PROBE, "reasoning_content": "Hm"},
]
# Templates with this test (DeepSeek's) write a tool call only if the content of its message is
# none.
NO_CONTENT = re.compile(r"content\W{0,2}\s+is\s+(?:not\s+)?none")
LARGEST_FILE = 2**20  # bytes of a template
# characters; a tokenizer takes up to 200 bytes per character, and 20 s for all of them
LONGEST_TEXT = 10_000_000
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


class Rendering(NamedTuple):
    """How a chat is rendered.

    Attributes:
        blocks: also return the spans of `{% generation %}` blocks.
        open_answer: end with the heading of an assistant message (add_generation_prompt).
        is_today: the template writes today's date. In training it is always DATE.
    """

    blocks: bool = False
    open_answer: bool = False
    is_today: bool = False


IN_TRAINING = Rendering()


def ensure_chat_template(
    tokenizer: "PreTrainedTokenizerBase", choice: str | None = None, add_tokens: bool = False
) -> str:
    """Set the tokenizer's chat template in place, so that it is saved with the final model.

    A template may write special tokens that the tokenizer does not have as single tokens. Only the
    one that ends a message must be a token. Then headings such as Zephyr's <|user|> or Mistral's
    [INST] are accepted as plain text.

    Args:
        tokenizer: the run's tokenizer.
        choice: `--chat_template`, the name of a built-in template or a file. None: the tokenizer's
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
    if choice is not None:
        subject = f"--chat_template {choice}"
        # chatml is Qwen's template. Qwen has no BOS token, but a Llama needs it.
        bos = "{{ bos_token }}" if choice == "chatml" and added_bos(tokenizer) else ""
        tokenizer.chat_template = bos + (BUILT_IN.get(choice) or _read_template(choice))
        notes.append(f"chat template: {choice}, saved with the final model")
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ALPACA
        notes.append(
            "the tokenizer has no chat template: prompts are written with ### Instruction: and ### Response:"
        )
    around = _around_responses(tokenizer, subject)
    special_tokens = tokenizer.get_added_vocab().keys() | tokenizer.all_special_tokens
    markers = list[str]()
    for before, after in around:
        missing_ends = [end for end in END_MARKER.findall(after) if end not in special_tokens]
        if missing_ends:
            markers += [*MARKER.findall(before), *missing_ends]
    # a dict keeps the order, which decides the ids of new tokens and the EOS token
    missing = [marker for marker in dict.fromkeys(markers) if marker not in special_tokens]
    if missing:
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
    return "; ".join(notes)


def missing_end(tokenizer: "PreTrainedTokenizerBase", stop_ids: Collection[int]) -> str | None:
    """Return a warning if the template ends responses with no special token, and no role begins with
    a stop token of the model, which then ends them (`turn_ends`)."""
    template_tokens = tokenizer.get_added_vocab()
    for template in templates_in_use(tokenizer):
        parts = _around_a_response(template, tokenizer.special_tokens_map)
        if parts is None or any(token in parts[1] for token in template_tokens):
            continue
        if turn_ends(tokenizer, template, stop_ids):
            continue
        return (
            "the chat template writes no special token after responses, so the model does not learn "
            "when to stop, and its answers go on until the token limit. Use a --chat_template that "
            "ends responses with a stop token of the model."
        )
    return None


def _read_template(name: str) -> str:
    file = expanded(name)
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


def template_for(tokenizer: "PreTrainedTokenizerBase", tools: Tools | None) -> str:
    """Return the template that Transformers chooses for a chat: of several ones with names tool_use
    if there are tools, else default.

    Raises:
        UserError: it chooses none of them.
    """
    try:
        return tokenizer.get_chat_template(tools=tools or None)
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        what = "chats with tools" if tools else "chats without tools"
        raise UserError(
            f"the tokenizer has the chat templates {names}, and Transformers chooses none of them for "
            f"{what}: it takes tool_use and default. Set --chat_template to a file with one of them, "
            f"or to {', '.join(BUILT_IN)}."
        ) from None


def templates_in_use(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the templates that `template_for` can return: one, or those called default and
    tool_use."""
    templates = list[str]()
    error: UserError | None = None
    for tools in (None, TOOLS):
        try:
            templates.append(template_for(tokenizer, tools))
        except UserError as problem:
            error = error or problem
    if not templates and error is not None:
        raise error
    return list(dict.fromkeys(templates))


def _around_responses(
    tokenizer: "PreTrainedTokenizerBase", subject: str = "the chat template"
) -> list[tuple[str, str]]:
    """Return what each template in use writes before and after a response.

    Raises:
        UserError: a template has an error, or exceeds a limit.
    """
    special_tokens = tokenizer.special_tokens_map
    surroundings = []
    for template in templates_in_use(tokenizer):
        problem = _exceeded_limit(template, json.dumps(special_tokens, default=str))
        if problem:
            raise UserError(f"{subject} cannot be used: {problem}")
        try:
            with limited():  # Jinja computes constants when it compiles
                _compile_jinja_template(template)
        except TemplateSyntaxError as error:
            raise UserError(f"{subject}, line {error.lineno}: {error.message}") from None
        except ExceededLimit as error:
            raise UserError(f"{subject} cannot be used: {error}") from None
        around = _around_a_response(template, special_tokens)
        if around is not None:
            surroundings.append(around)
    return surroundings


def _around_a_response(template: str, special_tokens: dict[str, Any]) -> tuple[str, str] | None:
    """Return what the template writes before and after a response; None if it rejects a chat of two
    messages, with and without tools."""
    for tools in (None, TOOLS):
        with suppress(BadSample):
            text, _ = render_chat(template, special_tokens, TWO_MESSAGES, tools)
            before, _, after = text.partition(PROBE)
            return before, after
    return None


@functools.cache
def _exceeded_limit(template: str, special_tokens: str) -> str | None:
    """Return the limit that a template exceeds, or None. `special_tokens` is JSON."""
    tokens = json.loads(special_tokens)
    for chat, tools in ((TWO_MESSAGES, None), (LONG_CHAT, TOOLS)):
        render = functools.partial(_render_in_its_form, template, tokens, chat, tools)
        problem = exceeded_limit(render)
        if problem:
            return f"for a chat of {len(chat)} messages, {problem}"
    return None


def _render_in_its_form(
    template: str, special_tokens: dict[str, Any], messages: list[Message], tools: Tools | None
) -> None:
    _rendered(template, special_tokens, in_its_form(template, messages), tools)


def turn_ends(
    tokenizer: "PreTrainedTokenizerBase", template: str, stop_ids: Collection[int]
) -> dict[str, str]:
    """Return what ends a response that the template ends with no special token: the marker of the
    next role, if this is a stop token of the model (GLM-4.5's <|user|> and <|observation|>).

    Args:
        tokenizer: has the tokens.
        template: one of `templates_in_use`.
        stop_ids: the model's eos_token_id, in generation_config.json.

    Returns:
        The role of the next message -> what stands between a response and the content of that
        message, up to the stop token; without the roles whose marker is none.
    """
    special_tokens = tokenizer.special_tokens_map
    ids = tokenizer.get_added_vocab()
    stops = [token for token, index in ids.items() if index in stop_ids]
    around = _around_a_response(template, special_tokens)
    if not stops or around is None or any(token in around[1] for token in ids):
        return {}
    any_stop = re.compile(r"\s*(?:" + "|".join(map(re.escape, stops)) + ")")
    question: Message = {"role": "user", "content": "Hi"}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    probes = {
        "user": [*TWO_MESSAGES, {"role": "user", "content": NEXT_PROBE}],
        "tool": [question, call, RESULT],
    }
    ends = {}
    for role, chat in probes.items():
        with suppress(BadSample):
            response, _ = render_chat(template, special_tokens, chat[:2], TOOLS)
            text, _ = render_chat(template, special_tokens, chat, TOOLS)
            marker = any_stop.match(text, len(response))
            if text.startswith(response) and marker is not None:
                ends[role] = marker[0]
    return ends


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", known: int | list[int] | None
) -> list[int]:
    """Return the ids of the tokens that end generation: the model's own, and the templates'
    end-of-turn tokens.

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
    ids = tokenizer.get_added_vocab()
    for _, after in _around_responses(tokenizer):
        written = [token for token in ids if token in after]
        end_of_turn = min(written, key=after.index, default=None)
        if end_of_turn is not None and ids[end_of_turn] not in stops:
            stops = [*stops, ids[end_of_turn]]
    return stops


def render_chat(
    template: str,
    special_tokens: dict[str, Any],
    messages: list[Message],
    tools: Tools | None = None,
    rendering: Rendering = IN_TRAINING,
) -> tuple[str, list[Span]]:
    """Render a chat.

    Args:
        template: Jinja, as in tokenizer.chat_template.
        special_tokens: name -> text, such as bos_token; templates use them as variables.
        messages: messages of all roles, in order.
        tools: JSON schemas of functions, for templates that support tools.
        rendering: with or without blocks, generation prompt and today's date.

    Returns:
        The text, and the blocks as [start, end) of its characters.

    Raises:
        BadSample: the template rejects the chat, or its text is too long.
        UserError: the template takes too much time or memory.
    """
    try:
        with limited():
            written = in_its_form(template, messages)
            texts, spans = _rendered(template, special_tokens, written, tools, rendering)
    except ExceededLimit as error:
        count = plural(len(messages), "message")
        raise UserError(
            f"the chat template cannot be used: for a chat of {count}, {error}"
        ) from None
    except RENDER_ERRORS as error:
        raise BadSample(f"the chat template rejects this chat: {error}") from None
    if len(texts[0]) > LONGEST_TEXT:
        raise BadSample(
            f"its text has {len(texts[0]):,} characters; expected at most {LONGEST_TEXT:,}."
        )
    return texts[0], spans[0] if spans else []


class _Form(NamedTuple):
    """How a template takes messages.

    Attributes:
        parts: contents as lists of parts, not as texts (LLaVA, Idefics 3).
        none: the content None for a message with tool calls and without text.
        json_arguments: the arguments of tool calls as JSON text, not as objects (DeepSeek V3 and R1
            put texts together).
        nine_letters: ids of tool calls that have nine letters and digits (Mistral).
        reasoning: the keys of reasoning content that the template reads.
    """

    parts: bool
    none: bool
    json_arguments: bool
    nine_letters: bool = False
    reasoning: tuple[str, ...] = ()


@functools.cache
def _form_of(template: str) -> _Form:
    form = _form_of_contents(template)
    keys = [key for key in REASONING if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)]
    call: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    other: Message = {**call, "tool_calls": [{**CALL, "id": OTHER_ID}]}
    takes, takes_other = (
        bool(_try(template, form, [*TWO_MESSAGES[:1], each])) for each in (call, other)
    )
    return form._replace(nine_letters=takes and not takes_other, reasoning=tuple(keys))


def _form_of_contents(template: str) -> _Form:
    none = bool(NO_CONTENT.search(template))
    texts = _Form(parts=False, none=none, json_arguments=False)
    lists = texts._replace(parts=True)
    form = texts
    for tried in (texts, lists):
        if PROBE in _try(template, tried, TWO_MESSAGES):
            form = tried
            break
    with_json = form._replace(json_arguments=True)
    call: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for chat in ([*TWO_MESSAGES[:1], call], [*TWO_MESSAGES[:1], call, RESULT]):
        if _try(template, form, chat):
            return form
        if json.dumps(ARGUMENTS, ensure_ascii=False) in _try(template, with_json, chat):
            return with_json
    return form


def _try(template: str, form: _Form, messages: list[Message]) -> str:
    """Return a chat as text; "" if the template rejects it, with and without tools."""
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    written = list(_formed(messages, form))
    for tools in (None, TOOLS):
        with suppress(*RENDER_ERRORS):
            texts, _ = _rendered(template, tokens, written, tools)
            return texts[0]
    return ""


def _formed(messages: list[Message], form: _Form) -> Iterator[Message]:
    for message in _with_nine_letters(messages) if form.nine_letters else messages:
        keys = [key for key in REASONING if key in message]
        if keys and form.reasoning and keys[0] not in form.reasoning:
            message = {
                form.reasoning[0] if key == keys[0] else key: message[key] for key in message
            }
        calls = message.get("tool_calls")
        if form.none and calls:
            message = {**message, "content": message["content"] or None}
        if form.json_arguments and calls:
            message = {**message, "tool_calls": [_with_json_arguments(call) for call in calls]}
        if form.parts and isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        yield message


def _with_nine_letters(messages: list[Message]) -> Iterator[Message]:
    """Yield messages in which ids of tool calls have nine letters and digits. A call without an id gets
    one, and so does its result."""
    ids = list[str]()  # of the last calls
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = []
            for number, call in enumerate(message["tool_calls"]):
                calls.append({**call, "id": _nine_letters(call.get("id") or f"{index}.{number}")})
            ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            first = ids.pop(0) if ids else ""
            given = message.get("tool_call_id")
            message = {**message, "tool_call_id": _nine_letters(given) if given else first}
        yield message


def _nine_letters(name: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", name):
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_json_arguments(call["function"])}
    if "arguments" not in call or isinstance(call["arguments"], str):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def in_its_form(template: str, messages: list[Message]) -> list[Message]:
    """Return messages in the form that the template takes, see `_Form`."""
    return list(_formed(messages, _form_of(template)))


def _rendered(
    template: str,
    special_tokens: dict[str, Any],
    messages: list[Message],
    tools: Tools | None = None,
    rendering: Rendering = IN_TRAINING,
) -> tuple[list[str], list[list[Span]]]:
    # Transformers compiles a template once and caches it, with its global variables. Its own
    # strftime_now returns today's date.
    day = datetime.now() if rendering.is_today else DAY
    _compile_jinja_template(template).globals["strftime_now"] = day.strftime
    variables = special_tokens if rendering.is_today else {"date_string": DATE, **special_tokens}
    rendered = render_jinja_template(
        [messages],
        tools,
        chat_template=template,
        return_assistant_tokens_mask=rendering.blocks,
        add_generation_prompt=rendering.open_answer,
        **variables,
    )
    # Transformers annotates it as str
    return cast(tuple[list[str], list[list[Span]]], rendered)
