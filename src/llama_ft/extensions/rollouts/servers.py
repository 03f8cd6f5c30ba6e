"""Sample answers with servers, such as vLLM: token ids in, token ids and their log-probabilities out.

Each answer is one request to /v1/completions, with a seed of its own. Prompts are shared among the
servers, so that the answers to a prompt find its keys and values in one server's prefix cache.
Tokens are never made from text.

Source: vllm/entrypoints/openai/completion/protocol.py (return_token_ids since 0.10.2).
"""

import math
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.rounds import Answer, Prompt
from llama_ft.extensions.rollouts.sampling import Sampling, make_answer
from llama_ft.inference.server import Rejected, Server, check_model, served_models

COMPLETIONS = "/v1/completions"
# What a served model's generation_config.json may set. Servers ignore names that they do not know.
UNCHANGED = {
    "n": 1,
    "stream": False,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "ignore_eos": False,
    "add_special_tokens": False,
}
ENDS = {"stop": True, "length": False}  # finish_reason -> the answer has ended
PROBE_TEMPERATURE = 2.0
PROBE_TOKENS = 5  # the most likely ones
LEAST_GAP = 1e-3  # of log-probabilities, else nothing can be compared


class ServerRequests(NamedTuple):
    """How servers are asked.

    Attributes:
        urls: of the servers.
        model: the name by which they have the model; None: their only one.
        timeout_seconds: longest time of a request.
        at_once: requests at the same time, per server.
    """

    urls: list[str]
    model: str | None
    timeout_seconds: float
    at_once: int


class ServerSampler:
    """Samples with servers that have the same model.

    Args:
        requests: the servers, and how they are asked.
        sampling: how answers are sampled.
        tokenizer: of the model.

    Raises:
        UserError: a server does not answer, lacks the model, or its log-probabilities are those of
            another distribution.
    """

    def __init__(
        self, requests: ServerRequests, sampling: Sampling, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._requests = requests
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._servers = [Server(url, requests.timeout_seconds) for url in requests.urls]
        self._model = check_model(self._servers[0], requests.model)
        for server in self._servers[1:]:
            check_model(server, self._model)
        versions = {version_of(server) for server in self._servers}
        entries = served_models(self._servers[0])
        served = entries[self._model]
        self.source = {
            "kind": "server",
            "model": self._model,
            "root": str(served.get("root") or ""),
            "version": ", ".join(sorted(versions)),
        }
        # vLLM says it of an adapter's base model only
        base = entries.get(str(served.get("parent")), {})
        limit = served.get("max_model_len") or base.get("max_model_len")
        self.context = limit if isinstance(limit, int) else sys.maxsize
        self._is_checked = False
        self._futures = list[list[Future[Answer]]]()

    def sample(
        self, prompts: Sequence[Prompt], step: int, begun: Sequence[list[Answer]] = ()
    ) -> list[list[Answer]]:
        """Return the answers to each prompt of a round. `begun`: see `Sampler`.

        Raises:
            UserError: a server fails, or its answer lacks what is needed.
        """
        prompts = prompts[len(begun) :]
        if not prompts:
            return [*begun]
        if not self._is_checked:
            for server in self._servers:
                self._check_distribution(server, prompts[0])
            self._is_checked = True
        pools = [ThreadPoolExecutor(self._requests.at_once) for _ in self._servers]
        futures = list[list[Future[Answer]]]()
        self._futures = futures
        try:
            for place, prompt in enumerate(prompts):
                pool = pools[place % len(pools)]
                server = self._servers[place % len(pools)]
                group = []
                for number in range(self._sampling.num_generations):
                    seed = self._sampling.seed_of(step, prompt, number)
                    group.append(pool.submit(self._ask, server, prompt, seed))
                futures.append(group)
            flat = [future for group in futures for future in group]
            wait(flat, return_when=FIRST_EXCEPTION)
        finally:
            # running requests are not waited for after an error: a server may be hanging
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
        _raise_errors(flat)
        return [*begun, *([future.result() for future in group] for group in futures)]

    def answers_so_far(self) -> list[list[Answer]]:
        """Return the answers to the first prompts of a call of `sample` that has not returned."""
        groups = list[list[Answer]]()
        for futures in [*self._futures]:
            for future in futures:
                if not future.done() or future.cancelled() or future.exception() is not None:
                    return groups
            groups.append([future.result() for future in futures])
        return groups

    def _ask(self, server: Server, prompt: Prompt, seed: int) -> Answer:
        settings = self._sampling
        content = {
            **UNCHANGED,
            "model": self._model,
            "prompt": prompt.token_ids,
            "seed": seed,
            "max_tokens": min(settings.max_completion_length, self.context - len(prompt.token_ids)),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "stop_token_ids": settings.stop_ids,
            "logprobs": 0,  # those of the sampled tokens only
            "return_token_ids": True,
        }
        answer = _post(server, content)
        try:
            return self._answer(answer, prompt, seed)
        except _Unusable as problem:
            raise UserError(f"--server {server.url}: {problem}") from problem
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--server {server.url}: {COMPLETIONS} answers in another form than OpenAI's."
            ) from error

    def _answer(self, content: dict[str, Any], prompt: Prompt, seed: int) -> Answer:
        """Return the answer in what a server sends. Raises _Unusable, or any error of wrong types."""
        if content.get("model", self._model) != self._model:
            raise _Unusable(f"answers as {content['model']}, not as {self._model}.")
        choice = content["choices"][0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise _Unusable(
                "answers without token ids (return_token_ids), which vLLM 0.10.2 and later give. "
                "Tokens made from text may be others than the sampled ones."
            )
        echoed = choice.get("prompt_token_ids", content.get("prompt_token_ids"))
        if echoed is not None and echoed != prompt.token_ids:
            raise _Unusable("has answered another prompt: its prompt_token_ids differ.")
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(values) != len(ids) or not all(map(_is_log_probability, values)):
            raise _Unusable("gives no log-probability for each token of an answer.")
        reason = choice["finish_reason"]
        if reason not in ENDS:
            raise _Unusable(f"has ended an answer with finish_reason {reason!r:.40}.")
        limit = self._sampling.max_completion_length
        if len(ids) > limit or not ids:
            raise _Unusable(f"has answered with {len(ids)} tokens; expected 1 to {limit}.")
        stop_ids = self._sampling.stop_ids
        result = make_answer(ids, values, seed, self._tokenizer, stop_ids)
        if result.has_ended != ENDS[reason] or len(result.token_ids) != len(ids):
            raise _Unusable(
                f"has ended an answer (finish_reason {reason}) with token {ids[-1]}; expected one of {stop_ids}."
            )
        return result

    def _check_distribution(self, server: Server, prompt: Prompt) -> None:
        """Check that log-probabilities are those of the distribution that is sampled. Differences of
        two tokens are halved at temperature 2."""
        settings = self._sampling
        if (settings.temperature, settings.top_p, settings.top_k) == (1, 1, 0):
            return
        plain, halved = (
            self._likely_tokens(server, prompt, temperature)
            for temperature in (1.0, PROBE_TEMPERATURE)
        )
        both = plain.keys() & halved.keys()  # the sampled tokens, which are there, too, may differ
        gap = _gap(plain, both)
        if gap > LEAST_GAP and _gap(halved, both) > 0.75 * gap:
            raise UserError(
                f"--server {server.url}: its log-probabilities ignore the temperature, --top_p and --top_k.\n"
                "Start vLLM with --logprobs-mode processed_logprobs, or use --temperature 1 without the others."
            )

    def _likely_tokens(
        self, server: Server, prompt: Prompt, temperature: float
    ) -> dict[str, float]:
        """Return the log-probabilities of the tokens that are most likely to follow a prompt."""
        content = {
            **UNCHANGED,
            "model": self._model,
            "prompt": prompt.token_ids,
            "seed": 0,
            "max_tokens": 1,
            "temperature": temperature,
            "top_p": 1,
            "top_k": 0,
            "logprobs": PROBE_TOKENS,
        }
        try:
            [likely] = _post(server, content)["choices"][0]["logprobs"]["top_logprobs"]
            return {name: float(value) for name, value in likely.items()}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--server {server.url}: gives no log-probabilities of tokens."
            ) from error


class _Unusable(Exception):
    """An answer of a server that cannot be used. The message says why."""


def _gap(values: dict[str, float], names: Collection[str]) -> float:
    """Return the largest difference of some log-probabilities."""
    chosen = [values[name] for name in names]
    return max(chosen) - min(chosen) if chosen else 0.0


def _post(server: Server, content: dict[str, Any]) -> dict[str, Any]:
    try:
        return server.post(COMPLETIONS, content)
    except Rejected as error:
        raise UserError(
            f"--server {server.url}: rejects a request (HTTP {error.status}: {error})."
        ) from error


def _raise_errors(futures: Sequence[Future[Answer]]) -> None:
    """Raise a UserError with the first error of each server."""
    messages = dict[str, str]()
    for future in futures:
        if future.cancelled() or not future.done():
            continue
        error = future.exception()
        if isinstance(error, UserError):
            for message in error.messages:
                messages.setdefault(message.partition(": ")[0], message)  # "--server URL"
        elif error is not None:
            raise error
    if messages:
        raise UserError(*messages.values())


def _is_log_probability(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value <= 1e-3


def version_of(server: Server) -> str:
    """Return the version of a server, such as that of vLLM; "" if it does not tell."""
    try:
        return str(server.get("/version").get("version") or "")
    except (Rejected, UserError):
        return ""
