"""`check --server`: compare a running server with the probes of a run."""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config import parse_duration
from llama_ft.config.rules import SECRET
from llama_ft.config.value_types import STRICT, Duration
from llama_ft.errors import UserError, plural
from llama_ft.extensions.serving.probes.ask import ServerLogprobs, ask, rendered_chat
from llama_ft.extensions.serving.probes.probes import Probe, Probes, find_probes
from llama_ft.inference.server import Server, check_model
from llama_ft.inference.verdict import Compared, ProbeVerdict, Weights, judge
from llama_ft.masking import is_url_with_secret, printable

WRONG_WEIGHTS = 3  # exit code
UNNOTICED = 0.1  # share of the adapter's effect whose loss could matter


@dataclass(config=STRICT, kw_only=True)
class ServerFlags:
    """Flags that compare a running server with a run"""

    paths: list[str] = Field(default_factory=list)
    """[RUN]: with --server, the directory of the run whose model or adapter is served."""

    server: str | None = None
    """URL of an OpenAI-compatible server, such as http://localhost:8000: instead of the machines, check
    that it computes with what RUN has trained. OPENAI_API_KEY has its key, if it wants one."""

    model: str | None = None
    """With --server: the name by which the server has the model or adapter."""

    server_timeout: Duration = "1m"
    """With --server: longest time of a request."""


def check_server(flags: ServerFlags) -> None:
    """Print whether a server computes with what a run has trained. The exit code is 3 if it does
    not.

    Raises:
        UserError: the server cannot be compared.
    """
    run, url = _check_flags(flags)
    file, probes = find_probes(run)
    server = Server(url, parse_duration(flags.server_timeout))
    model = check_model(server, flags.model)
    answers = ask(server, model, probes.probes)
    verdict = _judge_parts(probes, answers, _trains_head(file.parent))
    if verdict.weights is None:
        raise UserError(
            f"{run}: the adapter changes the log-probabilities of the probes by {verdict.effect:.1e} on average, "
            "less than a server's rounding. Whether it is applied cannot be told."
        )
    lines = [f"{model} at {server.url}: {_describe(verdict, probes, run)}"]
    template = _compare_template(server, model, probes, file.parent)
    lines += [line for line in [template.text] if line]
    print(printable("\n".join(lines)), flush=True)
    if verdict.weights is not Weights.FINE_TUNED or not template.is_right:
        sys.exit(WRONG_WEIGHTS)


def _check_flags(flags: ServerFlags) -> tuple[str, str]:
    """Return RUN and the URL. Raises UserError with all errors."""
    errors = list[str]()
    url = flags.server or ""
    if not url:
        errors.append("RUN and --model: only for --server URL, which is compared with a run.")
    elif is_url_with_secret(url):
        errors.append(f"--server {SECRET}")
    elif not _is_url(url):
        errors.append(f"--server {url}: expected a URL such as http://localhost:8000.")
    if url and len(flags.paths) != 1:
        errors.append("RUN is needed: the directory of the run that the server is compared with.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        errors.append("--server: runs in one process. Leave out torchrun and --nproc.")
    if errors:
        raise UserError(*errors)
    return flags.paths[0], url


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is none
        return False


class ServerNumbers(NamedTuple):
    """The log-probabilities of a server that can be compared: of the tokens of prompts, and of those
    that may follow."""

    prompts: list[Compared]
    following: list[Compared]


def compared(probes: Probes, answers: Sequence[ServerLogprobs]) -> ServerNumbers:
    """Put the log-probabilities of a server next to those of a run. Raises UserError if none of its
    tokens is in a probe."""
    numbers = ServerNumbers([], [])
    for probe, answer in zip(probes.probes, answers, strict=True):
        for score, of_run in zip(answer.scores, probe.scores.by_token(), strict=False):
            if score is not None:
                numbers.prompts.append(Compared(score, *of_run))
        numbers.following.extend(_next_numbers(probe, answer))
    if not numbers.prompts and not numbers.following:
        raise UserError(
            "--server: no log-probability of the server can be compared: its tokens are others, or its values "
            "are not log-probabilities."
        )
    count = sum(len(answer.scores) for answer in answers)
    if 2 * len(numbers.prompts) < count:
        raise UserError(
            f"--server: only {len(numbers.prompts):,} of {count:,} values of the server are log-probabilities. "
            "A server whose numbers overflow gives others."
        )
    return numbers


def _trains_head(folder: Path) -> bool:
    """Return whether the adapter of a directory, if there is one, is also of the LM head."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text())
        return "lm_head" in str(settings["target_modules"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _judge_parts(
    probes: Probes, answers: Sequence[ServerLogprobs], has_head: bool = False
) -> ProbeVerdict:
    """Judge by all log-probabilities. With an adapter of the LM head, those of the tokens after the
    prompts may be right and the others not: vLLM computes those of prompts without it."""
    prompts, following = compared(probes, answers)
    verdict = judge(prompts + following, probes.quantization)
    if has_head and following and verdict.weights is Weights.OTHER:
        alone = judge(following, probes.quantization)
        if alone.weights is Weights.FINE_TUNED:
            return alone
    return verdict


def _next_numbers(probe: Probe, answer: ServerLogprobs) -> Iterator[Compared]:
    """Yield the comparisons of the tokens that follow a prompt."""
    texts = Counter(probe.next_texts)
    by_token = probe.next_scores.by_token()
    for token, text, of_run in zip(probe.next_ids, probe.next_texts, by_token, strict=True):
        score = answer.next_by_id.get(token)
        if score is None and texts[text] == 1:
            score = answer.next_by_text.get(text)
        if score is not None:
            yield Compared(score, *of_run)


def _describe(verdict: ProbeVerdict, probes: Probes, run: str) -> str:
    """Return the verdict as a text, with what to do."""
    difference = (
        f"largest difference {verdict.largest:.1e} of {plural(verdict.count, 'log-probability')}"
    )
    difference = difference.replace("probabilitys", "probabilities")
    if verdict.largest_of_base is not None:
        difference += f"; the base model's is {verdict.largest_of_base:.1e}"
    what = "the adapter is applied" if probes.is_adapter else "the weights are as trained"
    if verdict.weights is Weights.FINE_TUNED:
        text = f"{what} ({difference})."
        if verdict.tolerance >= UNNOTICED:
            text += (
                f"\nThe comparison is rough: with {verdict.tolerance:.0%} more or less of its effect, the adapter "
                "would pass, too."
            )
        return text
    if verdict.weights is Weights.BASE:
        return (
            f"the server answers as the base model: the adapter is NOT applied ({difference}).\n"
            f"Merge it and serve the whole model: llama-ft export {shlex.quote(run)} OUT --merge"
        )
    other = (
        "neither the fine-tuned nor the base model"
        if probes.is_adapter
        else "not the fine-tuned model"
    )
    text = f"{other}: other weights, template or dtype ({difference})."
    if verdict.is_whole:
        text += "\nThe adapter has its whole effect: look for another base model, quantization or dtype."
    elif verdict.share is not None:
        text += (
            f"\nAlong the way from base to fine-tuned model the server is at {verdict.share:.0%}: for a part of it, "
            "look for another alpha or rank, names that the server skips, or layers without adapter."
        )
        if verdict.alpha is not None:
            text += f"\nThe numbers are about those of an alpha that is {verdict.alpha:.0%} of the trained one."
    if probes.quantization is not None:
        text += f"\nThe run has computed with a {probes.quantization} base model; the server may have another."
    return text


@dataclass
class _Template:
    """The comparison of chat templates: a line to print, "" for none."""

    text: str = ""
    is_right: bool = True


def _compare_template(server: Server, model: str, probes: Probes, folder: Path) -> _Template:
    """Compare the server's rendering of a chat with that of the fine-tuning."""
    chat = probes.chat
    if chat is None:
        return _Template()
    expected = list(chat.token_ids)
    rendering = rendered_chat(server, model, chat)
    if rendering is None:
        return _Template(
            "chat template: not compared, the server does not tell the tokens of a chat."
        )
    if rendering in (expected, len(expected)):
        return _Template(
            f"chat template: as in the fine-tuning ({plural(len(expected), 'token')})."
        )
    if isinstance(rendering, int):
        where = f"the server makes {plural(rendering, 'token')} of a chat, the fine-tuning {len(expected):,}"
    else:
        same = os.path.commonprefix([rendering, expected])
        where = f"the server's token {len(same) + 1} of a chat differs ({len(rendering):,} tokens, {len(expected):,})"
    text = (
        f"chat template: {where}.\nThat of the fine-tuning is {folder / 'chat_template.jinja'} "
        "(vLLM and SGLang: --chat-template, llama.cpp: --chat-template-file)."
    )
    return _Template(text, is_right=False)
