"""Ask a server for log-probabilities of a prompt's tokens, in the way that it supports.

| server    | request                                   | log-probabilities of                  |
|-----------|-------------------------------------------|---------------------------------------|
| vLLM      | /v1/completions with prompt_logprobs      | the prompt's tokens and the next one  |
| SGLang    | /v1/completions with echo and logprobs    | the prompt's tokens and the next one  |
| llama.cpp | /v1/completions with logprobs             | the next token                        |
| Ollama    | /api/generate with logprobs, without ids  | the next token                        |

Sources: vllm/entrypoints/openai, sglang/srt/entrypoints/openai/serving_completions.py,
llama.cpp/tools/server/README.md, ollama/docs/api.md.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llama_ft.errors import UserError
from llama_ft.extensions.serving.probes.probes import ChatProbe, Probe
from llama_ft.inference.server import Rejected, Server

COMPLETIONS = "/v1/completions"
OLLAMA = "/api/generate"
MOST_LIKELY = 5  # OpenAI's limit
# of the next token, where that is all that can be compared; llama.cpp has no limit, Ollama this one
MOST_LIKELY_ALONE = 20
TOKEN_ID = "token_id:"  # vLLM writes it in place of a token's text
# What a model's generation_config.json may set. Servers ignore names that they do not know.
AS_COMPUTED = {
    "temperature": 0,
    "top_p": 1,
    "seed": 0,
    "stream": False,
    "max_tokens": 1,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class ServerLogprobs:
    """Log-probabilities of a server for a probe.

    Attributes:
        scores: of the prompt's tokens but the first, None for one that is not a number; empty if
            the server does not give them.
        next_by_id, next_by_text: of the tokens that are most likely to follow. A server names them
            by their ids or by their texts.
    """

    scores: Sequence[float | None] = ()
    next_by_id: dict[int, float] = field(default_factory=dict)
    next_by_text: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.scores or self.next_by_id or self.next_by_text)


def ask(server: Server, model: str, probes: Sequence[Probe]) -> list[ServerLogprobs]:
    """Return the server's log-probabilities of each probe.

    Raises:
        UserError: it gives none, or it fails.
    """
    problems = list[str]()
    for way in (_as_vllm, _with_echo, _next_alone, _next_only, _as_ollama):
        answers = list[ServerLogprobs]()
        try:
            for probe in probes:
                answer = way(server, model, probe)
                if answer.is_empty:
                    break
                answers.append(answer)
        except Rejected as error:
            problems.append(str(error))
            continue
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # an answer of another form
        if len(answers) == len(probes):
            return answers
    # the first request is the richest, and Ollama's is of another API
    why = f" It says: {problems[0]}." if problems else ""
    raise UserError(
        f"--server {server.url}: gives no log-probabilities for the tokens of a prompt, by which a server is "
        f"compared.{why}"
    )


def _as_vllm(server: Server, model: str, probe: Probe) -> ServerLogprobs:
    names = {"return_tokens_as_token_ids": True, "repetition_penalty": 1.0, "min_p": 0}
    content = {
        **AS_COMPUTED,
        **names,
        "model": model,
        "prompt": list(probe.token_ids),
        "logprobs": MOST_LIKELY,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }
    choice = _choice(server.post(COMPLETIONS, content))
    by_position = choice.get("prompt_logprobs")
    if not by_position:
        return ServerLogprobs()
    scores = list[float | None]()
    for token, entry in zip(probe.token_ids[1:], by_position[1:], strict=True):
        scores.append(_number(entry[str(token)]["logprob"]))
    return ServerLogprobs(scores, *_next_tokens(choice))


def _with_echo(server: Server, model: str, probe: Probe) -> ServerLogprobs:
    content = {
        **AS_COMPUTED,
        "model": model,
        "prompt": list(probe.token_ids),
        "logprobs": MOST_LIKELY,
        "echo": True,
    }
    choice = _choice(server.post(COMPLETIONS, content))
    count = len(probe.token_ids)
    values = choice["logprobs"]["token_logprobs"]
    if len(values) not in (count, count + 1):
        return ServerLogprobs()
    scores = [_number(score) for score in values[1:count]]
    following = _next_tokens(choice) if len(values) > count else ({}, {})
    return ServerLogprobs(scores, *following)


def _next_alone(server: Server, model: str, probe: Probe) -> ServerLogprobs:
    return _next_only(server, model, probe, MOST_LIKELY_ALONE)


def _next_only(
    server: Server, model: str, probe: Probe, most_likely: int = MOST_LIKELY
) -> ServerLogprobs:
    content = {
        **AS_COMPUTED,
        "model": model,
        "prompt": list(probe.token_ids),
        "logprobs": most_likely,
    }
    return ServerLogprobs((), *_next_tokens(_choice(server.post(COMPLETIONS, content))))


def _as_ollama(server: Server, model: str, probe: Probe) -> ServerLogprobs:
    if probe.text is None:
        return ServerLogprobs()
    content = {
        "model": model,
        "prompt": probe.text,
        "raw": True,
        "stream": False,
        "logprobs": True,
        "top_logprobs": MOST_LIKELY_ALONE,
        "options": {"temperature": 0, "num_predict": 1, "seed": 0},
    }
    listed = server.post(OLLAMA, content)["logprobs"]
    return ServerLogprobs((), *_by_name(listed[0]["top_logprobs"]))


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    if not isinstance(choice, dict):
        raise TypeError
    return choice


def _next_tokens(choice: dict[str, Any]) -> tuple[dict[int, float], dict[str, float]]:
    """Return the log-probabilities of the generated token and its alternatives, by id and by text."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return {}, {}
    if logprobs.get("content"):  # llama.cpp's form, that of chats
        return _by_name(logprobs["content"][-1]["top_logprobs"])
    by_text = logprobs["top_logprobs"][-1]
    entries = [{"token": name, "logprob": score} for name, score in by_text.items()]
    return _by_name(entries)


def _by_name(entries: Sequence[dict[str, Any]]) -> tuple[dict[int, float], dict[str, float]]:
    by_id = dict[int, float]()
    by_text = dict[str, float]()
    for entry in entries:
        name = str(entry["token"])
        score = _number(entry["logprob"])
        if score is None:
            continue
        if isinstance(entry.get("id"), int):
            by_id[entry["id"]] = score
        elif name.startswith(TOKEN_ID):
            by_id[int(name.removeprefix(TOKEN_ID))] = score
        else:
            by_text[name] = score
    return by_id, by_text


def _number(score: Any) -> float | None:
    """Return a log-probability; None for what is none, such as vLLM's -9999 for minus infinity."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return float(score) if -9000 < score <= 1e-3 else None


def rendered_chat(server: Server, model: str, chat: ChatProbe) -> list[int] | int | None:
    """Return the token ids of a chat as the server renders it, or only their number; None if the
    server tells neither."""
    request = {
        **AS_COMPUTED,
        "model": model,
        "messages": chat.messages,
        **({"tools": chat.tools} if chat.tools else {}),
        "return_token_ids": True,  # of vLLM
    }
    count: Any = None
    with suppress(Rejected):
        answer = server.post("/v1/chat/completions", request)
        if ids := _ids(answer.get("prompt_token_ids")):
            return ids
        usage = answer.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    with suppress(Rejected):
        if ids := _ids(server.post("/tokenize", request).get("tokens")):
            return ids
    with suppress(Rejected):  # llama.cpp
        text = server.post("/apply-template", request).get("prompt")
        content = {"content": text, "add_special": False, "parse_special": True}
        if ids := _ids(server.post("/tokenize", content).get("tokens")):
            return ids
    return count if isinstance(count, int) and count > 0 else None


def _ids(tokens: Any) -> list[int] | None:
    is_list = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
    return tokens if is_list else None
