"""A file of prompts: read, turned into tokens, and answered by all ranks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from llama_ft.config.inference_flags import is_utf8
from llama_ft.data import own_template
from llama_ft.data.formats import BadRow, content_text
from llama_ft.errors import UserError
from llama_ft.inference.answers_file import AnswersFile
from llama_ft.inference.generate import Answerer, Sampling
from llama_ft.runtime import Runtime, log

Messages = list[dict[str, Any]]
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
NAMED_AT_MOST = 10
BATCHES_SORTED = 8  # prompts of so many batches are sorted by length: padding is less, and a kill loses no more


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        number: of the prompt in the file, from 0.
        line: of the file, from 1.
        asked: a conversation up to the answer, or plain text.
        row: what the answer is put into.
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
        is_chat: prompts are turns of a conversation, written by the chat template; else text to go on with.
        system: the first turn of conversations that do not bring their own.
    """

    tokenizer: PreTrainedTokenizerBase
    is_chat: bool
    system: str | None

    def tokens(self, asked: Messages | str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            UserError: the chat template refuses it, there is none for a conversation, or it has no tokens.
        """
        if not self.is_chat:
            if not isinstance(asked, str):
                raise UserError("a conversation, for which a chat template is needed; expected text.")
            ids: Any = self.tokenizer(asked, verbose=False)["input_ids"]  # its length is looked at here
        else:
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            if self.system and messages[0]["role"] not in SYSTEM_ROLES:
                messages = [{"role": "system", "content": self.system}, *messages]
            # Training's rows do not depend on the day, for which it sets this; an answer's date is today's.
            template = _compile_jinja_template(own_template(self.tokenizer))
            template.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
            try:
                ids = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False, tokenizer_kwargs={"verbose": False}
                )
            except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise UserError(f"the chat template refuses it ({error}).") from error
        if not ids:
            raise UserError("has no tokens.")
        return list(ids)


def choose_encoding(tokenizer: PreTrainedTokenizerBase, no_chat_template: bool, system: str | None) -> Encoding:
    """Chat where the tokenizer has a template, unless plain text is asked for; says where it has none.

    Raises:
        UserError: a system prompt without a template.
    """
    if not no_chat_template and not tokenizer.chat_template:
        if system:
            raise UserError("--system_prompt: this model's tokenizer has no chat template, and so no place for it.")
        log.info("The tokenizer has no chat template: prompts are taken as text to go on with.")
    return Encoding(tokenizer, bool(tokenizer.chat_template) and not no_chat_template, system)


def read_prompts(file: Path, output_key: str) -> list[Prompt]:
    """The prompts of a file.

    Args:
        file: .txt, a prompt a line; or .jsonl, rows with `prompt` or `messages`. Blank lines are left out.
        output_key: where the answer will be put.

    Raises:
        UserError: rows that are none, each with its line; or there are no prompts.
    """
    prompts, mistakes = list[Prompt](), list[str]()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: cannot be read ({error}).") from error
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = {"prompt": content} if file.suffix == ".txt" else _json_object(content)
            asked = _asked(row)
            if output_key in row:
                raise ValueError(f'has a key "{output_key}" already. --output_key names another one for the answer')
            prompts.append(Prompt(len(prompts), line, asked, row))
        except ValueError as error:
            mistakes.append(f"{file}:{line}: {error}.")
    more = [f"... and {len(mistakes) - NAMED_AT_MOST} more lines of {file}."]
    if mistakes:
        raise UserError(*mistakes[:NAMED_AT_MOST], *(more if len(mistakes) > NAMED_AT_MOST else []))
    if not prompts:
        raise UserError(f"--prompts {file}: holds no prompts.")
    return prompts


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError('expected an object with "prompt" or "messages"')
    if not is_utf8(json.dumps(row, ensure_ascii=False)):
        raise ValueError("holds half of a surrogate pair (\\ud800 to \\udfff), which no file of answers can hold")
    return row


def _asked(row: Mapping[str, Any]) -> Messages | str:
    """The prompt of a row. The answer that a row of training data ends in is left off."""
    held = [key for key in ("prompt", "messages") if key in row]
    if len(held) != 1:
        raise ValueError('expected one of the keys "prompt" and "messages"' + (", not both" if held else ""))
    value = row[held[0]]
    if isinstance(value, str) and held == ["prompt"]:
        if not value.strip():
            raise ValueError('"prompt" is empty')
        return value
    turns = check_turns(value, held[0])
    asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        raise ValueError(f'"{held[0]}" holds no user\'s turn to answer')
    return asked


def check_turns(value: Any, key: str) -> Messages:
    """The turns of a conversation; contents that are lists of text parts become text, as for training.

    Raises:
        ValueError: it is not; the message says what is wrong.
    """
    if not isinstance(value, list) or not value:
        expected = "text or a list of turns" if key == "prompt" else "a list of turns"
        raise ValueError(f'"{key}" is {json.dumps(value)[:40]}; expected {expected}')
    turns = []
    for place, turn in enumerate(value):
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            said = json.dumps(turn.get("role") if isinstance(turn, dict) else turn)[:40]
            raise ValueError(f'"{key}[{place}].role" is {said}; expected {", ".join(ROLES)}')
        if turn.get("content") is None and turn.get("tool_calls"):
            turns.append(turn)
            continue
        try:
            turns.append({**turn, "content": content_text(turn.get("content"), f"{key}[{place}].content")})
        except BadRow as error:
            raise ValueError(str(error).removesuffix(".")) from None
    return turns


def answer_prompts(
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    answerer: Answerer,
    encoding: Encoding,
    sampling: Sampling,
    batch_size: int,
    output_key: str,
    file: AnswersFile | None,
    job: Runtime,
) -> int:
    """Answer prompts and write the rows in their order; the ranks share each turn's prompts.

    Args:
        prompts: those that have no answer yet.
        lengths: tokens of each.
        answerer: the model.
        encoding: how prompts become tokens.
        sampling: how tokens are chosen.
        batch_size: of a rank.
        output_key: where answers are put.
        file: on rank 0.
        job: the ranks.

    Returns:
        How many answers were cut at max_new_tokens or the end of the context.
    """
    cut, turn_size = 0, batch_size * job.world_size
    for first in range(0, len(prompts), turn_size * BATCHES_SORTED):
        window = range(first, min(first + turn_size * BATCHES_SORTED, len(prompts)))
        done: dict[int, dict[str, Any]] = {}
        written = first
        for turn in _turns(window, lengths, answerer, sampling, turn_size):
            mine = [prompts[place] for place in turn[job.rank :: job.world_size]]
            answers = answerer.answer(
                [encoding.tokens(prompt.asked) for prompt in mine], [prompt.number for prompt in mine], sampling
            )
            everyone: list[Any] = [None] * job.world_size
            dist.all_gather_object(everyone, answers)
            for rank, theirs in enumerate(everyone):
                for place, answer in zip(turn[rank :: job.world_size], theirs, strict=True):
                    done[place] = {**prompts[place].row, output_key: answer.text}
                    cut += answer.is_cut
            ready = []
            while written in done:
                ready.append(done.pop(written))
                written += 1
            if file is not None and ready:
                file.write(ready)
        log.info(f"{prompts[window[-1]].number + 1} of {prompts[-1].number + 1} prompts answered")
    return cut


def _turns(
    window: range, lengths: Sequence[int], answerer: Answerer, sampling: Sampling, turn_size: int
) -> Iterator[list[int]]:
    """Prompts to answer together: of like length, and whose answers may be equally long."""

    def longest(place: int) -> int:
        return answerer.longest_answer(lengths[place], sampling)

    for _, alike in groupby(sorted(window, key=lambda place: (lengths[place], place)), key=longest):
        places = list(alike)
        yield from (places[start : start + turn_size] for start in range(0, len(places), turn_size))


def count_tokens(prompts: Sequence[Prompt], encoding: Encoding, answerer: Answerer, file: Path) -> list[int]:
    """Tokens of every prompt.

    Raises:
        UserError: those the chat template refuses or that leave no room for an answer, each with its line.
    """
    lengths, mistakes = [], []
    for prompt in prompts:
        try:
            lengths.append(len(encoding.tokens(prompt.asked)))
            if answerer.context is not None and lengths[-1] >= answerer.context:
                raise UserError(f"{lengths[-1]} tokens, and the model has {answerer.context} positions.")
        except UserError as error:
            mistakes.append(f"{file}:{prompt.line}: {error.messages[0]}")
    if mistakes:
        more = [f"... and {len(mistakes) - NAMED_AT_MOST} more lines of {file}."]
        raise UserError(*mistakes[:NAMED_AT_MOST], *(more if len(mistakes) > NAMED_AT_MOST else []))
    return lengths
