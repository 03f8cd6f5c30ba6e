"""Answers of servers over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from local_server import serve
from model_server import log_probabilities
from rollout_server import RolloutServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ft.data.batches.sampler import combine_seeds
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.rounds import Prompt
from llama_ft.extensions.rollouts.sampling import Sampling
from llama_ft.extensions.rollouts.servers import ServerRequests, ServerSampler

STOP = [7, 11, 30, 48]
PROMPTS = [Prompt(index, {}, "", "", [0, 5, 40 + index]) for index in range(3)]
SAMPLING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_completion_length=5,
    stop_ids=STOP,
    num_generations=2,
    seed=42,
)


class Servers:
    """Two servers of a tiny model, with the sampler that asks them."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.servers = [RolloutServer(self.model), RolloutServer(self.model)]

    @contextmanager
    def running(self, fault: str = "") -> Iterator[list[str]]:
        """Addresses. The second one has the fault."""
        self.servers[1].fault = fault
        for server in self.servers:
            server.requests.clear()
        with serve(self.servers[0].answer) as one, serve(self.servers[1].answer) as other:
            yield [one, other]

    def sampler(
        self, urls: list[str], sampling: Sampling = SAMPLING, seconds: float = 60
    ) -> ServerSampler:
        return ServerSampler(ServerRequests(urls, "tuned", seconds, 3), sampling, self.tokenizer)


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Servers:
    return Servers(tiny_model)


def test_two_servers_share_the_prompts_and_answer_with_our_tokens(servers: Servers) -> None:
    with servers.running() as urls:
        sampler = servers.sampler(urls)
        answers = sampler.sample(PROMPTS, step=2)
    assert sampler.source == {
        "kind": "server", "model": "tuned", "root": "/models/tuned", "version": "0.32.0",
    }  # fmt: skip
    by_server = [[tuple(one["prompt"]) for one in server.requests] for server in servers.servers]
    prompts = [tuple(prompt.token_ids) for prompt in PROMPTS]
    assert set(by_server[0]) == {prompts[0], prompts[2]}
    assert set(by_server[1]) == {prompts[1]}
    for prompt, group in zip(PROMPTS, answers, strict=True):
        assert len(group) == 2
        for number, answer in enumerate(group):
            assert answer.seed == combine_seeds(42, 2, prompt.index, number)
            ids = [*prompt.token_ids, *answer.token_ids.tolist()]
            logprobs = log_probabilities(servers.model, ids)[len(prompt.token_ids) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(answer.token_ids).long().unsqueeze(1))
            assert numpy.abs(answer.logprobs - expected.squeeze(1).numpy()).max() < 1e-5
            assert answer.has_ended == (ids[-1] in STOP)
            end = -1 if answer.has_ended else None
            assert answer.text == servers.tokenizer.decode(answer.token_ids[:end].tolist())


def test_requests_undo_what_a_generation_config_sets(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    with servers.running() as urls:
        servers.sampler(urls, replace(SAMPLING, top_p=0.9, temperature=2.0)).sample(PROMPTS, 1)
    request = servers.servers[0].requests[-1]
    expected = {
        "top_p": 0.9, "top_k": 0, "temperature": 2.0, "min_p": 0, "repetition_penalty": 1.0,
        "presence_penalty": 0, "frequency_penalty": 0, "n": 1, "stop_token_ids": STOP,
        "return_token_ids": True, "authorization": "Bearer sk-of-a-test",
    }  # fmt: skip
    assert request == {**request, **expected}


def test_an_answer_ends_with_the_context_of_the_server(servers: Servers) -> None:
    long = [Prompt(0, {}, "", "", [5] * 253)]
    with servers.running() as urls:
        sampler = servers.sampler(urls, replace(SAMPLING, stop_ids=[]))
        [group] = sampler.sample(long, step=1)
    assert [len(answer.token_ids) for answer in group] == [3, 3]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "/v1/completions fails with HTTP 500 (the engine has died)."),
        ("400", "rejects a request (HTTP 400: max_tokens is too large)."),
        ("html", "answers with HTML, not with JSON."),
        ("no ids", "answers without token ids (return_token_ids)"),
        ("no logprobs", "gives no log-probability for each token of an answer."),
        ("no choices", "/v1/completions answers in another form than OpenAI's."),
        ("other prompt", "has answered another prompt: its prompt_token_ids differ."),
        ("other model", "answers as base, not as tuned."),
        ("aborted", "has ended an answer with finish_reason 'abort'."),
        ("cut", "has ended an answer (finish_reason stop) with token"),
    ],
)
def test_a_fault_of_a_server_is_one_message(servers: Servers, fault: str, message: str) -> None:
    with servers.running(fault) as urls, pytest.raises(UserError) as error:
        servers.sampler(urls).sample(PROMPTS, step=1)
    assert len(error.value.messages) == 1
    assert error.value.messages[0].startswith(f"--server {urls[1]}: ")
    assert message in error.value.messages[0]


def test_a_slow_server_is_not_waited_for(servers: Servers) -> None:
    with servers.running("slow") as urls, pytest.raises(UserError) as error:
        servers.sampler(urls, seconds=1).sample(PROMPTS, step=1)
    assert "does not answer within 1 s. --server_timeout allows more." in str(error.value)


def test_a_server_that_is_gone_is_named(servers: Servers) -> None:
    with servers.running() as urls:
        sampler = servers.sampler(urls)
    with pytest.raises(UserError) as error:
        sampler.sample(PROMPTS, step=1)
    assert "connection refused" in str(error.value)
    assert len(error.value.messages) <= 2  # the other server may not have been asked yet


def test_log_probabilities_that_ignore_the_temperature_are_rejected(servers: Servers) -> None:
    with servers.running("raw") as urls, pytest.raises(UserError) as error:
        servers.sampler(urls, replace(SAMPLING, temperature=0.7)).sample(PROMPTS, step=1)
    assert "Start vLLM with --logprobs-mode processed_logprobs" in str(error.value)


def test_a_model_that_a_server_lacks_is_named(servers: Servers) -> None:
    with servers.running() as urls, pytest.raises(UserError, match="--model other: .* no such"):
        ServerSampler(ServerRequests(urls, "other", 60, 1), SAMPLING, servers.tokenizer)
