"""A file of prompts: read, turned into tokens, and answered by all ranks."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from llama_ft.data import own_template
from llama_ft.data.formats import BadRow, content_text
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.inference.generate import Answer, Answerer, Sampling
from llama_ft.runtime import Runtime, log

Messages = list[dict[str, Any]]
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
NAMED_AT_MOST = 10
BATCHES_SORTED = 8  # prompts of so many batches are sorted by length, for less padding; a kill loses no more


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        number: of the prompt in the file, from 0.
        line: of the file, from 1.
        asked: a conversation without its answer, or plain text.
        row: the sample that gets the answer.
    """

    number: int
    line: int
    asked: Messages | str
    row: dict[str, Any]


@dataclass(frozen=True)
class Encoding:
    """How prompts become tokens.

    Attributes:
        tokenizer: with or without a chat template.
        is_chat: prompts are messages of a conversation, written by the chat template; else text to continue.
        system: the first message of conversations that do not bring their own.
    """

    tokenizer: PreTrainedTokenizerBase
    is_chat: bool
    system: str | None

    def tokens(self, asked: Messages | str) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            UserError: the chat template rejects it, there is none for a conversation, or it has no tokens.
        """
        if not self.is_chat:
            if not isinstance(asked, str):
                raise UserError("a conversation, for which a chat template is needed; expected text.")
            ids: Any = self.tokenizer(asked, verbose=False)["input_ids"]  # its length is checked here
        else:
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            if self.system and messages[0]["role"] not in SYSTEM_ROLES:
                messages = [{"role": "system", "content": self.system}, *messages]
            # Training writes the same date into every sample; an answer's date is today's.
            template = _compile_jinja_template(own_template(self.tokenizer))
            template.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
            try:
                ids = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False, tokenizer_kwargs={"verbose": False}
                )
            except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise UserError(f"the chat template rejects it ({error}).") from error
        if not ids:
            raise UserError("has no tokens.")
        return list(ids)


def choose_encoding(tokenizer: PreTrainedTokenizerBase, no_chat_template: bool, system: str | None) -> Encoding:
    """Return a chat encoding if the tokenizer has a template and plain text is not asked for.

    Raises:
        UserError: a system prompt without a template.
    """
    if not no_chat_template and not tokenizer.chat_template:
        if system:
            raise UserError("--system_prompt: this model's tokenizer has no chat template, and so no place for it.")
        log.info("The tokenizer has no chat template: prompts are text to continue.")
    return Encoding(tokenizer, bool(tokenizer.chat_template) and not no_chat_template, system)


def one_prompt(options: Any) -> str:
    """Return the one prompt to answer: of --prompt, --prompt_file or stdin.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    text, where = options.prompt, "--prompt"
    if options.prompt_file:
        where = f"--prompt_file {options.prompt_file}"
        try:
            text = Path(options.prompt_file).expanduser().read_text(encoding="utf-8-sig").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read ({reason(error)}).") from error
    elif text is None:
        text, where = sys.stdin.read().removeprefix("\ufeff").rstrip("\n"), "The prompt from stdin"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: is not UTF-8.") from error
    if not text.strip():
        raise UserError(
            f"{where}: is empty. --prompt, --prompt_file, --prompts or stdin gives one, --chat asks for it."
        )
    return text


def read_prompts(file: Path, output_key: str) -> list[Prompt]:
    """Read the prompts of a file.

    Args:
        file: .txt, one prompt per line; or .jsonl, samples with `prompt` or `messages`. Blank lines are skipped.
        output_key: where the answer will be put.

    Raises:
        UserError: lines that are no prompts; or there are no prompts.
    """
    prompts, errors = list[Prompt](), list[str]()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: cannot be read ({error}).") from error
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            try:
                row = {"prompt": content} if file.suffix == ".txt" else json.loads(content)
                asked = _asked(row)
                if output_key in row:
                    raise ValueError(f'it has a key "{output_key}". --output_key names another one for the answer')
                json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written
                prompts.append(Prompt(len(prompts), line, asked, row))
            except (ValueError, RecursionError, BadRow) as error:
                errors.append(f"{file}:{line}: {str(error).removesuffix('.')}.")
    _raise_first(errors)
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompts.")
    return prompts


def _raise_first(errors: list[str]) -> None:
    more = [f"... and {len(errors) - NAMED_AT_MOST} more lines."] if len(errors) > NAMED_AT_MOST else []
    if errors:
        raise UserError(*errors[:NAMED_AT_MOST], *more)


def _asked(row: Any) -> Messages | str:
    """Return the prompt of a sample, without the answer that a sample for training ends in."""
    held = [key for key in ("prompt", "messages") if isinstance(row, dict) and key in row]
    if len(held) != 1:
        raise ValueError('expected an object with "prompt" or "messages"')
    value = row[held[0]]
    if isinstance(value, str) and value.strip() and held == ["prompt"]:
        return value
    messages = check_messages(value, held[0])
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        raise ValueError(f'"{held[0]}" holds no message of a user to answer')
    return asked


def check_messages(value: Any, key: str) -> Messages:
    """Return the messages of a conversation; contents that are lists of text parts become text, as for training.

    Raises:
        ValueError: they are not messages.
        BadRow: a content is not text.
    """
    if not isinstance(value, list) or not value:
        expected = "text or a list of messages" if key == "prompt" else "a list of messages"
        raise ValueError(f'"{key}" is {json.dumps(value)[:40]}; expected {expected}')
    messages = []
    for place, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else message
        if role not in ROLES or not isinstance(message, dict):
            raise ValueError(f'"{key}[{place}].role" is {json.dumps(role)[:40]}; expected {", ".join(ROLES)}')
        if message.get("content") is None and message.get("tool_calls"):
            messages.append(message)
        else:
            messages.append({**message, "content": content_text(message.get("content"), f"{key}[{place}].content")})
    return messages


@contextlib.contextmanager
def answers_to(file: Path | None, overwrite: bool) -> Iterator[IO[str]]:
    """Open the file of answers, JSON lines, for writing; without a file they go to stdout.

    Raises:
        RunFailure: it cannot be written; or it is there, and overwrite is false.
    """
    if file is None:
        yield sys.stdout
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w" if overwrite else "x", encoding="utf-8", newline="\n") as answers:
            yield answers
    except OSError as error:
        raise RunFailure(f"--output_file {file}: cannot be written ({error.strerror or error}).") from error


def answer_prompts(
    prompts: Sequence[Prompt],
    source: Path,
    answerer: Answerer,
    encoding: Encoding,
    sampling: Sampling,
    options: Any,
    job: Runtime,
) -> int:
    """Answer prompts and write the samples in their order; the ranks share the prompts of each batch.

    Args:
        prompts: in the order of their answers.
        source: the file they come from, for messages.
        answerer: the model.
        encoding: how prompts become tokens.
        sampling: how tokens are chosen.
        options: flags of recipes/inference.py: batch_size per rank, output_file, output_key and overwrite.
        job: the ranks.

    Returns:
        How many answers were truncated at max_new_tokens or the end of the context.

    Raises:
        UserError: prompts that cannot be answered, each with its line.
        RunFailure: the answers cannot be written.
    """
    lengths = _count_tokens(prompts, encoding, answerer, source)
    target = Path(options.output_file).expanduser() if options.output_file else None
    truncated, batch = 0, options.batch_size * job.world_size
    with answers_to(target, options.overwrite) if job.is_main else contextlib.nullcontext() as file:
        for first in range(0, len(prompts), batch * BATCHES_SORTED):
            window = range(first, min(first + batch * BATCHES_SORTED, len(prompts)))
            answers: dict[int, Answer] = {}
            for places in _batches(window, lengths, answerer, sampling, batch):
                mine = places[job.rank :: job.world_size]
                ids = [encoding.tokens(prompts[place].asked) for place in mine]
                said = answerer.answer(ids, [prompts[place].number for place in mine], sampling)
                everyone: list[Any] = [None] * job.world_size
                dist.all_gather_object(everyone, dict(zip(mine, said, strict=True)))
                for theirs in everyone:
                    answers |= theirs
            for place in window:
                truncated += answers[place].is_cut
                if file is not None:
                    row = {**prompts[place].row, options.output_key: answers[place].text}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if file is not None:
                file.flush()
            log.info(f"{window.stop} of {len(prompts)} prompts answered")
    return truncated


def _batches(
    window: range, lengths: Sequence[int], answerer: Answerer, sampling: Sampling, batch: int
) -> Iterator[list[int]]:
    """Prompts to answer together: of similar length, and whose answers may be equally long."""

    def longest(place: int) -> int:
        return answerer.longest_answer(lengths[place], sampling)

    for _, alike in groupby(sorted(window, key=lambda place: (lengths[place], place)), key=longest):
        places = list(alike)
        yield from (places[start : start + batch] for start in range(0, len(places), batch))


def _count_tokens(prompts: Sequence[Prompt], encoding: Encoding, answerer: Answerer, source: Path) -> list[int]:
    lengths, errors = [], []
    for prompt in prompts:
        try:
            lengths.append(len(encoding.tokens(prompt.asked)))
            if answerer.context is not None and lengths[-1] >= answerer.context:
                raise UserError(f"{lengths[-1]} tokens, and the model has {answerer.context} positions.")
        except UserError as error:
            errors.append(f"{source}:{prompt.line}: {error.messages[0]}")
    _raise_first(errors)
    return lengths
