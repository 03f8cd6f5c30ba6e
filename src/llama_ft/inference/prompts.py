"""Prompts: read from a file, and answered by all ranks."""

import json
import sys
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama_ft.data.formats import BadRow, content_text
from llama_ft.errors import UserError, reason
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.generate import Answerer, Messages
from llama_ft.runtime import Runtime, log


def one_prompt(options: InferenceFlags) -> str:
    """Return the one prompt to answer: of --prompt, --prompt_file or stdin."""
    text = options.prompt
    if options.prompt_file:
        text = _text_of(options.prompt_file, "--prompt_file").rstrip("\n")
    elif text is None:
        text = sys.stdin.read().removeprefix("\ufeff").rstrip("\n")
    if not text.strip():
        raise UserError("The prompt is empty. --prompt, --prompt_file, --prompts or stdin gives one.")
    return text


def _text_of(name: str, flag: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {name}: cannot be read ({reason(error)}).") from error


PROMPT_FORMS = (
    'expected an object with "prompt", a text, or "messages", a conversation; or a .txt file with a prompt per line.'
)


def read_prompts(name: str) -> list[tuple[dict[str, Any], Messages | str]]:
    """Read the prompts of a file: .txt, one per line; or .jsonl, samples with `prompt` or `messages`.

    Returns:
        Each sample, which gets the answer, with its prompt: text, or a conversation without its last answer.
    """
    prompts = []
    for line, text in enumerate(_text_of(name, "--prompts").split("\n"), start=1):
        if text.strip():
            try:
                row = {"prompt": text} if name.endswith(".txt") else json.loads(text)
                prompts.append((row, _asked(row)))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{name}:{line}: malformed JSON ({reason(error)}).") from error
            except (LookupError, TypeError, AttributeError, BadRow) as error:
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
    asked = [
        {**message, "content": content_text(message.get("content") or "", f"messages[{place}].content")}
        for place, message in enumerate(value[:-1] if value[-1]["role"] == "assistant" else value)
    ]
    if not asked or asked[-1]["role"] not in ("user", "tool"):
        raise BadRow("there is no message of a user to answer.")
    return asked


def answer_prompts(
    prompts: list[tuple[dict[str, Any], Messages | str]], answerer: Answerer, options: InferenceFlags, job: Runtime
) -> int:
    """Answer prompts and write the samples in their order; the ranks share the prompts of each batch.

    Args:
        prompts: what `read_prompts` returns.
        answerer: the model.
        options: batch_size per rank, output_file (None: stdout) and overwrite.
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
    truncated, batch = 0, options.batch_size * job.world_size
    file, has_file = Path(options.output_file or "").expanduser(), options.output_file and job.is_main
    if has_file:
        file.parent.mkdir(parents=True, exist_ok=True)
    mode = "w" if options.overwrite else "x"
    with open(file, mode, encoding="utf-8", errors="replace") if has_file else nullcontext(sys.stdout) as out:
        for _, alike in groupby(range(len(prompts)), key=limits.__getitem__):
            places = list(alike)
            for together in (places[start : start + batch] for start in range(0, len(places), batch)):
                mine = together[job.rank :: job.world_size]
                everyone: list[Any] = [None] * job.world_size
                dist.all_gather_object(everyone, answerer.answer([tokens[place] for place in mine]))
                for index, place in enumerate(together):
                    answer = everyone[index % job.world_size][index // job.world_size]
                    truncated += answer.is_truncated
                    if job.is_main:
                        row = {**prompts[place][0], "answer": answer.text}
                        print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
                log.info(f"{together[-1] + 1} of {len(prompts)} prompts answered")
    return truncated
