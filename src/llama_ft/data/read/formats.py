"""The formats of samples: alpaca columns, chat messages, prompt and completion, pairs, text or
tokens; and messages about invalid samples. To add a format, see
docs/development/add-a-format.md."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import compress
from os.path import commonprefix
from typing import Any, NamedTuple

from llama_ft.config.objectives import PREFERENCE, PROMPTS, UNPAIRED, objectives_text
from llama_ft.data.read.chats import ROLES, Message, checked_chat
from llama_ft.data.read.traces.forms import in_openai_form, tool_in_openai_form
from llama_ft.data.read.traces.trace_form import PlacedMessage
from llama_ft.data.read.values import (
    MISSING,
    BadSample,
    Sample,
    check_numbers,
    expect,
    is_blank,
    list_of_objects,
    parsed_if_text,
    refuse_not_finite,
    response_text,
)
from llama_ft.errors import UserError

PROMPT_FORMS = (
    'expected a column "prompt", "instruction", "messages" or "conversations"; or a .txt file of '
    "prompts. --columns says which column is which."
)
SampleFormat = str


class TokenizedSample(NamedTuple):
    """A sample of tokens. Labels are -100 for tokens that are not in the loss; they are not
    shifted."""

    input_ids: list[int]
    labels: list[int]


# Messages of a chat; or a prompt and its completion (for plain text the prompt is empty); or
# tokens.
Content = list[Message] | tuple[str, str] | TokenizedSample


class Format(NamedTuple):
    """A format of samples.

    Attributes:
        required: columns by which it is recognized.
        optional: further columns that it reads.
        read: returns the content of a sample. Raises BadSample with what is wrong.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Sample], Content]


LOG_PROBABILITIES = "logprobs"  # vLLM's name; see training/objectives/teacher.py
RESPONSES = ("output", "completion", "chosen", "rejected")  # columns that may hold a class
# columns of tokens with which TRL and others say what is in the loss
TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks")


def find_format(dataset: str, columns: Collection[str], format_name: str) -> SampleFormat:
    """Find the format of a dataset by its columns, or check that the requested format fits them.

    A column `text` decides only if nothing else fits: alpaca files often have the rendered sample
    there too.

    Args:
        dataset: its name, for messages.
        columns: the column names found.
        format_name: `auto` or a format (`--dataset_format`).

    Raises:
        UserError: the columns fit no format, several, or not the one asked for.
    """
    column_names = set(columns)
    fitting = [
        name
        for name, one in FORMATS.items()
        if column_names.issuperset(one.required) and (name != PROMPTS or format_name == PROMPTS)
    ]
    if format_name in fitting:
        return format_name
    plainly = [name for name in fitting if name not in ("text", PREFERENCE)] or fitting
    if format_name == "auto" and plainly == [PREFERENCE]:
        names = objectives_text(lambda entry: PREFERENCE in entry.formats)
        raise UserError(
            f"{dataset}: it has pairs of a chosen and a rejected response.\nTrain on them with --objective {names}. "
            "Supervised fine-tuning takes --columns with messages=chosen or completion=chosen."
        )
    if format_name == "auto" and UNPAIRED in fitting:
        names = objectives_text(lambda entry: UNPAIRED in entry.formats)
        raise UserError(
            f"{dataset}: its completions have labels, desirable or not.\n--objective {names} is trained on them; with "
            "--dataset_format prompt_completion supervised fine-tuning is trained on all of them, whatever their label."
        )
    if format_name == "auto" and len(plainly) == 1:
        return plainly[0]
    named = {name: one for name, one in FORMATS.items() if name != PROMPTS}
    formats = [f"{name} ({' and '.join(one.required)})" for name, one in named.items()]
    fit = " and ".join(plainly) or "no format"
    raise UserError(
        f"{dataset}: its columns are {', '.join(sorted(columns))}, which fit {fit}; "
        f"--dataset_format is {format_name}.\n"
        f"Expected columns of one of these formats, or --dataset_format with its name: {', '.join(formats)}."
    )


def alpaca_messages(sample: Sample, *, input_heading: str = "") -> list[Message]:
    """Turn an alpaca sample into a prompt and its response, after its system message and earlier
    prompts and responses.

    Args:
        sample: columns instruction, output and perhaps input, system and history (pairs of prompt and
            response).
        input_heading: text put before the input, such as `### Input:` and a line break.

    Raises:
        BadSample: a field is missing, empty or no text.
    """
    instruction = _text(sample, "instruction")
    output = _text(sample, "output")
    if not is_blank(sample.get("input")):
        instruction += f"\n\n{input_heading}{_text(sample, 'input')}"
    messages: list[PlacedMessage] = []
    for number, (prompt, response) in enumerate(_history(sample)):
        messages.append((f"history[{number}][0]", {"role": "user", "content": prompt}))
        messages.append((f"history[{number}][1]", {"role": "assistant", "content": response}))
    messages.append(("instruction", {"role": "user", "content": instruction}))
    messages.append(("output", {"role": "assistant", "content": output}))
    return checked_chat(_with_system(sample, messages))


def _history(sample: Sample) -> list[list[Any]]:
    """Return the earlier pairs of prompt and response of an alpaca sample."""
    history = parsed_if_text(sample, "history") or []
    is_list = isinstance(history, list)
    are_pairs = is_list and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    expect(are_pairs, "history", history, "a list of pairs of prompt and response")
    return list(history)


def chat_messages(sample: Sample, column: str = "messages") -> list[Message]:
    """Check the messages of a sample and return them without their empty fields.

    They are an optional system message, then user and assistant in alternation, with tool messages
    after an assistant; the last is an assistant's. ShareGPT's keys from and value count as role and
    content, and other forms of traces are read as well, see `in_openai_form`. Contents that are
    lists of text parts become text, arguments of tool calls that are JSON text become objects, as
    templates have them.

    Raises:
        BadSample: naming the message and the field.
    """
    return checked_chat(_with_system(sample, _messages(sample, column)))


def prompt_completion(sample: Sample, completion: str = "completion") -> Content:
    """Check a prompt and its completion, the column of that name. A column system stands before a
    prompt of text, with a blank line between.

    Returns:
        Both texts; or, if both are lists of token ids, the tokens, of which the completion's are in
        the loss; or, if both are lists of messages, one chat in which the assistant messages of
        the prompt have weight 0, so that only the completion's are in the loss.

    Raises:
        BadSample: a column is missing, empty, or not of the same kind as the other.
    """
    if _are_tokens(sample.get("prompt")):
        prompt_ids = _integers(sample, "prompt")
        token_ids = _integers(sample, completion)
        expect(token_ids, completion, token_ids, "at least one token")
        return TokenizedSample(prompt_ids + token_ids, [-100] * len(prompt_ids) + token_ids)
    if not isinstance(sample.get("prompt"), list):
        system = "" if is_blank(sample.get("system")) else _text(sample, "system") + "\n\n"
        return system + _text(sample, "prompt"), _text(sample, completion)
    prompt = _with_system(sample, _messages(sample, "prompt"))
    messages = checked_chat([*prompt, *_messages(sample, completion)])
    first_role = messages[len(prompt)]["role"]
    expect(first_role == "assistant", f"{completion}[0].role", first_role, "assistant")
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["weight"] = 0
    return messages


def preferred(sample: Sample) -> Content:
    """Return the prompt and the chosen response of a pair, see `pair_contents`."""
    return pair_contents(sample)[0]


def pair_contents(sample: Sample) -> list[Content]:
    """Check a pair: a prompt with a chosen and a rejected response to it.

    Responses are texts or lists of messages, or of token ids after a prompt of them. Without a
    column `prompt`, or if it is text, lists of messages may be whole chats: what both begin with is
    the prompt. Of two texts alone it is the text that both begin with.

    Returns:
        For each response what `prompt_completion` returns.

    Raises:
        BadSample: a column is missing or empty, both responses are equal, or their prompts differ.
    """
    prompt, chosen, rejected = _pair(sample)
    parts = {**sample, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    return [prompt_completion(parts, column) for column in ("chosen", "rejected")]


def unpaired(sample: Sample) -> list[Sample]:
    """Turn a pair into two samples of the format unpaired_preference; another sample stays as it
    is.

    Raises:
        BadSample: as `pair_contents`.
    """
    if "label" in sample or not sample.keys() >= {"chosen", "rejected"}:
        return [sample]
    prompt, chosen, rejected = _pair(sample)
    shared = {column: sample[column] for column in sample if column not in ("chosen", "rejected")}
    shared["prompt"] = prompt
    # A number stays one, so that a class that became a float is noticed.
    chosen = sample["chosen"] if isinstance(sample["chosen"], float) else chosen
    rejected = sample["rejected"] if isinstance(sample["rejected"], float) else rejected
    return [
        {**shared, "completion": chosen, "label": True},
        {**shared, "completion": rejected, "label": False},
    ]


def labelled(sample: Sample) -> Content:
    """Check a completion with a label; return what `prompt_completion` returns."""
    is_desirable(sample)
    return prompt_completion(sample)


def is_desirable(sample: Sample) -> bool:
    """Return the label of a completion: true or false, 1 or 0, or one of them as text, as in a
    .csv.

    Raises:
        BadSample: it is something else.
    """
    label = sample.get("label", MISSING)
    # pandas writes a column of integers as 1.0 and 0.0 if a value is missing
    text = str(label).strip().lower().removesuffix(".0")
    expect(text in ("true", "1", "false", "0"), "label", label, "true or false, 1 or 0")
    return text in ("true", "1")


def _pair(sample: Sample) -> tuple[Any, Any, Any]:
    """Return the prompt and both responses of a pair: of texts, of lists of messages, or of lists of
    token ids."""
    chosen = sample.get("chosen")
    rejected = sample.get("rejected")
    # If both are missing, the checks of the columns say so.
    differ = chosen != rejected or is_blank(chosen)
    expect(differ, "rejected", rejected, "another response than the chosen one")
    if _are_tokens(sample.get("prompt")):
        return sample["prompt"], chosen, rejected
    if isinstance(chosen, list) or isinstance(rejected, list):
        return _chat_pair(sample)
    return _text_pair(sample)


def _text_pair(sample: Sample) -> tuple[str, str, str]:
    """Return the prompt and both responses of a pair of texts."""
    chosen = _text(sample, "chosen")
    rejected = _text(sample, "rejected")
    if sample.get("prompt") is not None:
        return _text(sample, "prompt"), chosen, rejected
    prompt = commonprefix([chosen, rejected])
    expected_prompt = "the prompt that chosen begins with, or a column prompt"
    expect(prompt.strip(), "rejected", rejected, expected_prompt)
    chosen = chosen[len(prompt) :]
    rejected = rejected[len(prompt) :]
    are_responses = chosen.strip() and rejected.strip()
    expect(are_responses, "rejected", sample["rejected"], "another response than chosen")
    return prompt, chosen, rejected


def _chat_pair(sample: Sample) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages of the prompt and of both responses."""
    chosen = [message for _, message in _messages(sample, "chosen")]
    rejected = [message for _, message in _messages(sample, "rejected")]
    prompt = []
    if isinstance(sample.get("prompt"), list):
        prompt = [message for _, message in _messages(sample, "prompt")]
    if _role(chosen[0]) == _role(rejected[0]) == "assistant":
        prompt = prompt or [{"role": "user", "content": _text(sample, "prompt")}]
        return prompt, chosen, rejected
    # Both are whole chats. What they begin with is the prompt.
    for column in ("chosen", "rejected"):
        checked_chat(_messages(sample, column))
    shared = []
    for message, other in zip(chosen, rejected, strict=False):
        if message != other:
            break
        shared.append(message)
    at = len(shared)
    has_prompt = bool(shared) and shared[: len(prompt)] == prompt
    for column, chat in {"chosen": chosen, "rejected": rejected}.items():
        response = chat[at] if at < len(chat) else MISSING
        is_response = has_prompt and _role(response) == "assistant"
        expect(is_response, f"{column}[{at}]", response, "a response to a prompt that both share")
    return shared, chosen[at:], rejected[at:]


def prompt_of(sample: Sample) -> list[Message] | str:
    """Return the prompt of a sample in a training format. Its last response may be missing."""
    check_numbers(sample, ("tools", "prompt", "messages", "conversations"))
    tools_of(sample)
    if isinstance(sample.get("prompt"), str):
        if not sample["prompt"].strip():
            raise BadSample('"prompt" is empty; expected a text or a list of messages.')
        return str(prompt_completion({**sample, "completion": "."})[0])
    if "instruction" in sample:
        return alpaca_messages({**sample, "output": "."})[:-1]
    if "chosen" in sample and "prompt" not in sample:
        content = preferred(sample)
        return content[:-1] if isinstance(content, list) else str(content[0])
    column = next(
        (name for name in ("prompt", "messages", "conversations") if name in sample), None
    )
    if column is None:
        raise BadSample(PROMPT_FORMS)
    chat = sample[column]
    if isinstance(chat, list) and chat and isinstance(chat[-1], dict):
        last = chat[-1]
        named = last.get("from", last.get("role"))  # ShareGPT's name of the field, or the usual one
        if ROLES.get(str(named)) == "system":
            raise BadSample(f'"{column}" ends with a system message; expected one of the user.')
        if ROLES.get(str(named)) != "assistant":
            chat = [*chat, {"role": "assistant", "content": "."}]
    return chat_messages({**sample, column: chat}, column)[:-1]


def prompt_only(sample: Sample) -> Content:
    """Return the prompt of a sample, see `prompt_of`, and a full stop in place of its response."""
    prompt = prompt_of(sample)
    if isinstance(prompt, str):
        return prompt, "."
    return [*prompt, {"role": "assistant", "content": "."}]


def plain_text(sample: Sample) -> tuple[str, str]:
    """Return the text of a sample for continued pre-training, after an empty prompt."""
    return "", _text(sample, "text")


def tokenized_sample(sample: Sample) -> TokenizedSample:
    """Check a sample of tokens; return input_ids and labels of the positions that the attention
    mask keeps.

    Args:
        sample: input_ids, perhaps labels (every token if missing) and perhaps attention_mask, as a
            tokenizer returns them for one text. Tokens are in the loss if all of TOKEN_MASKS that are
            there have a 1.

    Raises:
        BadSample: naming the columns.
    """
    columns = {"input_ids": _integers(sample, "input_ids")}
    for name in ("labels", "attention_mask"):
        if sample.get(name) is not None:
            columns[name] = _integers(sample, name)
    masks = [name for name in TOKEN_MASKS if sample.get(name) is not None]
    for name in masks:
        columns[name] = _flags(sample, name)
    input_ids = columns["input_ids"]
    lengths = {len(values) for values in columns.values()}
    if not input_ids or len(lengths) > 1:
        counts = ", ".join(f'"{name}" has {len(values)}' for name, values in columns.items())
        raise BadSample(
            f"{counts} entries; expected at least one token, and one entry of each column per token."
        )
    labels = columns.get("labels", input_ids)
    for name in masks:
        pairs = zip(labels, columns[name], strict=True)
        labels = [label if is_in_loss else -100 for label, is_in_loss in pairs]
    mask = columns.get("attention_mask", [1] * len(input_ids))
    return TokenizedSample(list(compress(input_ids, mask)), list(compress(labels, mask)))


def tools_of(sample: Sample) -> list[dict[str, Any]] | None:
    """Return the tools a chat may call, from the column `tools`: a list of objects, or its JSON
    text."""
    tools = list_of_objects(parsed_if_text(sample, "tools") or [], "tools")
    return list(map(tool_in_openai_form, tools)) or None


def _messages(sample: Sample, column: str) -> list[PlacedMessage]:
    """Return the messages of a column, each with its place."""
    messages: Any = sample.get(column, MISSING)
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = parsed_if_text(sample, column)
    expect(isinstance(messages, list) and messages, column, messages, "a list of messages")
    chat = [(f"{column}[{index}]", message) for index, message in enumerate(messages)]
    return in_openai_form(chat)


def _with_system(sample: Sample, messages: list[PlacedMessage]) -> list[PlacedMessage]:
    """Put the column `system` before the messages of a chat that has no system message of its
    own."""
    system = sample.get("system")
    if is_blank(system):
        return messages
    _, first = messages[0]
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        return messages
    return [("system", {"role": "system", "content": system}), *messages]


def _role(message: Any) -> str | None:
    if not isinstance(message, dict):
        return None
    name = message.get("role", message.get("from"))
    return ROLES.get(str(name))


def _integers(sample: Sample, column: str) -> list[int]:
    values = sample.get(column, MISSING)
    # The types are compared because isinstance(True, int) is true.
    is_valid = isinstance(values, list) and set(map(type, values)) <= {int}
    expect(is_valid, column, values, "a list of integers")
    return list(values or [])


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def check_columns(sample: Sample, sample_format: SampleFormat) -> None:
    """Raise BadSample if a column that the format reads has NaN or an infinite number at any
    depth."""
    if sample_format != "tokenized":  # tokens are integers, and a logprob may be -Infinity
        one = FORMATS[sample_format]
        check_numbers(sample, (*one.required, *one.optional))


def _flags(sample: Sample, column: str) -> list[int]:
    values = sample.get(column)
    is_valid = isinstance(values, list) and all(
        type(value) in (int, bool) and value in (0, 1) for value in values
    )
    expect(is_valid, column, values, "a list of 0 and 1")
    return list(values or [])


def _text(sample: Sample, column: str) -> str:
    value = sample.get(column, MISSING)
    is_class = column in RESPONSES and isinstance(value, int | float)  # such as 0
    is_text = isinstance(value, str) and value.strip()
    expect(is_class or is_text, column, value, "text")
    refuse_not_finite(value, column)
    return response_text(value)


FORMATS: dict[str, Format] = {
    "alpaca": Format(
        ("instruction", "output"), ("input", "system", "history", "tools"), alpaca_messages
    ),
    "messages": Format(("messages",), ("system", "tools"), chat_messages),
    "sharegpt": Format(
        ("conversations",), ("system", "tools"), partial(chat_messages, column="conversations")
    ),
    "prompt_completion": Format(("prompt", "completion"), ("system", "tools"), prompt_completion),
    PREFERENCE: Format(("chosen", "rejected"), ("prompt", "system", "tools"), preferred),
    UNPAIRED: Format(("prompt", "completion", "label"), ("system", "tools"), labelled),
    "text": Format(("text",), (), plain_text),
    PROMPTS: Format(
        (),
        (
            "prompt",
            "messages",
            "conversations",
            "instruction",
            "input",
            "history",
            "chosen",
            "system",
            "tools",
        ),
        prompt_only,
    ),
    # logprobs: of a teacher
    "tokenized": Format(
        ("input_ids",),
        ("labels", "attention_mask", *TOKEN_MASKS, LOG_PROBABILITIES),
        tokenized_sample,
    ),
}
