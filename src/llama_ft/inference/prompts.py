"""Prompts answered by all ranks: one, a file of them, or a conversation with a terminal or a program that writes lines.
Answers go to stdout, the rest to stderr."""

import json
import signal
import sys
from contextlib import nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama_ft.data.formats import BadRow, content_text
from llama_ft.errors import RunFailure, UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answer, Answerer, Messages
from llama_ft.masking import printable
from llama_ft.runtime import Runtime, log

with suppress(ImportError):  # not every Python has it; input() then has no history
    import readline  # noqa: F401

PROMPT_FORMS = 'expected a JSON object with "prompt", a text, or "messages", a conversation; or a .txt file of prompts.'
HELP = "/reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer; a space before a slash makes it a message."


def one_prompt(options: InferenceFlags) -> str:
    """Return the one prompt to answer: of --prompt, --prompt_file or stdin."""
    text = _text_of(options.prompt_file) if options.prompt_file else options.prompt or sys.stdin.read()
    if not text.strip("\ufeff\n "):
        raise UserError("The prompt is empty. Use --prompt, --prompt_file, --prompts or stdin.")
    return text.removeprefix("\ufeff").rstrip("\n")


def _text_of(name: str) -> str:
    return Path(name).expanduser().read_text(encoding="utf-8-sig", errors="replace")


def read_prompts(name: str) -> list[tuple[dict[str, Any], Messages | str]]:
    """Read the prompts of a file: .txt, one per line; or .jsonl, samples with `prompt` or `messages`.

    Returns:
        Each sample, which gets the answer, with its prompt: text, or a conversation without its last answer.
    """
    prompts = []
    for line, text in enumerate(_text_of(name).split("\n"), start=1):
        if text.strip():
            try:
                row = {"prompt": text} if name.endswith(".txt") else json.loads(text)
                prompts.append((row, _asked(row)))
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError, BadRow) as error:
                why = str(error) if isinstance(error, BadRow) else PROMPT_FORMS
                raise UserError(f"{name}:{line}: {why}") from error
    if not prompts:
        raise UserError(f"--prompts {name}: holds no prompts.")
    return prompts


def _asked(row: Any) -> Messages | str:
    if "answer" in row:
        raise BadRow('"answer" would be replaced.')
    value = row["prompt"] if "prompt" in row else row["messages"]
    if isinstance(value, str) and value.strip():
        return value
    asked = value[:-1] if value[-1]["role"] == "assistant" else value
    if not asked:
        raise BadRow("there is no message to answer.")
    return [
        {**message, "content": content_text(message.get("content") or "", f"messages[{place}].content")}
        for place, message in enumerate(asked)
    ]


def answer_prompts(
    prompts: list[tuple[dict[str, Any], Messages | str]], answerer: Answerer, options: InferenceFlags, job: Runtime
) -> int:
    """Answer prompts and write the samples in their order; the ranks share the prompts of each batch.

    Args:
        prompts: what `read_prompts` returns.
        answerer: the model.
        options: batch_size per rank, and output_file (None: stdout), which must not exist.
        job: the ranks; rank 0 writes.

    Returns:
        How many answers were truncated.
    """
    tokens, limits = [], []
    for number, (_, asked) in enumerate(prompts, start=1):
        try:
            tokens.append(answerer.tokens(asked))
            limits.append(answerer.longest_answer(len(tokens[-1])))
        except UserError as error:
            raise UserError(f"--prompts: prompt {number}: {error.messages[0]}") from error
    truncated, batch, file = 0, options.batch_size * job.world_size, Path(options.output_file or "").expanduser()
    has_file = options.output_file and job.is_main
    if has_file:
        file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "x", encoding="utf-8", errors="replace") if has_file else nullcontext(sys.stdout) as out:
        start = 0
        while start < len(prompts):
            alike = takewhile(lambda limit: limit == limits[start], limits[start : start + batch])  # noqa: B023
            stop = start + len(list(alike))  # a prompt near the end of the context must not shorten other answers
            everyone = [list[Answer]()] * job.world_size
            mine = tokens[start:stop][job.rank :: job.world_size] or tokens[:1]  # all ranks all-gather
            dist.all_gather_object(everyone, answerer.answer(mine))
            for index, (row, _) in enumerate(prompts[start:stop]):
                answer = everyone[index % job.world_size][index // job.world_size]
                truncated += answer.is_truncated
                if job.is_main:
                    print(json.dumps({**row, "answer": answer.text}, ensure_ascii=False), file=out, flush=True)
            start = stop
            log.info(f"{start} of {len(prompts)} prompts answered")
    return truncated


def converse(answerer: Answerer, job: Runtime) -> None:
    """Talk until the input of rank 0 ends; all ranks answer together."""
    if not answerer.tokenizer.chat_template:
        raise UserError("--chat: this model's tokenizer has no chat template. Use --prompt with a text to continue.")
    messages: Messages = []
    if job.world_size == 1:  # else torchrun ends all ranks at Ctrl-C
        signal.set_wakeup_fd(-1)  # of runtime.signals, which would end the program
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdin.isatty():
        log.info(HELP)
    while True:
        try:
            message = job.broadcast_from_rank0(_read)
            if message in (None, "/exit", "/quit"):
                return
            if message == "/reset":
                messages = []
            elif message.startswith("/"):
                log.info(HELP)
            elif message.strip():
                messages = _answered([*messages, {"role": "user", "content": message}], answerer, job)
        except KeyboardInterrupt:
            log.info("\n(Ctrl-D or /exit ends)")
        except RunFailure:
            raise
        except UserError as error:
            log.info(str(error))


def _answered(asked: Messages, answerer: Answerer, job: Runtime) -> Messages:
    """Print the answer as it comes, and return the conversation with it: with the part that Ctrl-C has let come."""
    parts, note = list[str](), ""

    def show(part: str) -> None:
        parts.append(part)
        if job.is_main:
            print_part(part)

    try:
        if answerer.answer([answerer.tokens(asked)], show)[0].is_truncated:
            note = "(truncated: --max_new_tokens N allows longer answers)"
    except KeyboardInterrupt:
        note = "(stopped)"
    show("\n")
    if note:
        log.info(note)
    return [*asked, {"role": "assistant", "content": "".join(parts[:-1])}]


def print_part(text: str) -> None:
    """Print a part of an answer. In a terminal control characters are replaced: a model is not to move the cursor."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _read() -> str | None:
    """Return the next line; None at the end of the input."""
    with suppress(EOFError):
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    return None
