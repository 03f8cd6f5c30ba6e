"""Adapters are handed over to servers that compute with PEFT, and to servers that misbehave."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import RECIPE, load_script, write_jsonl
from local_server import serve
from lora_server import LoraServer
from transformers import AutoConfig, AutoTokenizer

from llama_ft.config import Config, load
from llama_ft.data import BatchLayout
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.hand_over.adapter_rules import find_problems
from llama_ft.extensions.rollouts.hand_over.flags import PolicyServerFlags
from llama_ft.extensions.rollouts.hand_over.policy_servers import PolicyServers
from llama_ft.extensions.rollouts.hand_over.probe import Scorer
from llama_ft.extensions.rollouts.rounds import Prompt, RoundFacts
from llama_ft.extensions.rollouts.sampling import Sampling
from llama_ft.models import BuiltModel, ModelRequest
from llama_ft.phases import NULL_MONITOR
from llama_ft.runtime import Ranks

PROMPTS = [Prompt(index, {}, "", "", [0, 5, 40 + index]) for index in range(4)]
SAMPLING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_completion_length=12,
    stop_ids=[7, 11],
    num_generations=2,
    seed=42,
)


class Trainer:
    """A model with an adapter, and runs that hand it over."""

    def __init__(self, model: Path, prompts: Path, ranks: Ranks) -> None:
        self.model = model
        self.prompts = prompts
        self.ranks = ranks
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        config = self.config()
        request = ModelRequest(config, model, AutoConfig.from_pretrained(model))
        self.built: BuiltModel = load_script(RECIPE).build_model(request, ranks, NULL_MONITOR)
        self.built.model.eval()
        layout = BatchLayout(data_size=1, data_rank=0, micro_batch=3)
        self.scorer = Scorer(self.built, layout, 1.0, torch.device("cpu"))
        self.train(0.0)

    def config(self) -> Config:
        flags = {
            "objective": "grpo",
            "model_name": self.model,
            "dataset": self.prompts,
            "use_peft": "true",
            "precision": "fp32",
            "batching_strategy": "padding",
        }
        return load([f"--{name}={value}" for name, value in flags.items()])[0]

    def settings(self, *urls: str) -> PolicyServerFlags:
        return PolicyServerFlags(server=list(urls), server_timeout="10s")  # on busy cores, too

    def train(self, size: float) -> None:
        """Give the matrices B any values of this size."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.built.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.built.model.named_parameters()}

    def restore(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.built.model.named_parameters():
                parameter.copy_(weights[name])

    @contextmanager
    def connected(self, folder: Path, *servers: LoraServer) -> Iterator[PolicyServers]:
        with ExitStack() as running:
            urls = [running.enter_context(serve(server.answer)) for server in servers]
            policy = PolicyServers(self.settings(*urls), self.tokenizer, self.ranks)
            (folder / "rollouts").mkdir()
            policy.open([folder], PROMPTS)
            yield policy

    def facts(self, step: int, checksum: str) -> RoundFacts:
        return RoundFacts(step, 2, {"checksum": checksum}, {}, {}, 42, [], {})


@pytest.fixture(scope="module")
def trainer(tiny_model: Path, runtime: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    prompts = write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", [{"prompt": "a"}])
    return Trainer(tiny_model, prompts, runtime)


def adapter_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.built.adapter is not None
    keys = trainer.built.adapter.keys
    return {keys[name]: value for name, value in trainer.weights().items() if name in keys}


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_servers_get_each_version_under_a_new_name_and_lose_the_earlier_one(
    trainer: Trainer, tmp_path: Path
) -> None:
    servers = [LoraServer(trainer.model), LoraServer(trainer.model)]
    trainer.train(0.0)
    first = trainer.weights()
    with trainer.connected(tmp_path, *servers) as policy:
        assert policy.context == 64
        policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        after = trainer.weights()
        assert is_equal(after, first)  # the probe has changed nothing
        trainer.train(0.05)
        policy.publish(trainer.scorer, SAMPLING, trainer.facts(2, "b"))
        answers = policy.sample(trainer.scorer, SAMPLING, PROMPTS, step=2)
        assert [len(group) for group in answers] == [2] * 4
        for server in servers:
            canaries = [name for name in server.loaded if "canary" in name]
            versions = [name for name in server.loaded if "canary" not in name]
            assert len(canaries) >= 1 and len(versions) == len(set(versions)) == 2
            assert is_equal(server.weights[versions[1]], adapter_of(trainer))
            assert list(server.adapters) == [versions[1]]
            used = {request["model"] for request in server.requests[-4:]}
            assert used == {versions[1]}
        [folder] = (tmp_path / "rollouts").iterdir()
        assert folder.name.startswith("policy-000002-")
        policy.close(keeps_files=False)
        assert not any(server.adapters for server in servers)
        assert not list((tmp_path / "rollouts").iterdir())


def test_what_a_killed_run_has_left_is_deleted(trainer: Trainer, tmp_path: Path) -> None:
    server = LoraServer(trainer.model)
    left = tmp_path / "rollouts" / "policy-000007-12345678"
    with trainer.connected(tmp_path, server) as policy:
        left.mkdir()
        server.adapters[f"{tmp_path.name}-{left.name}"] = object()
        server.adapters["of another run"] = object()
        policy.open([tmp_path], PROMPTS)
        assert list(server.adapters) == ["of another run"]
        assert not left.exists()


def test_the_random_adapter_of_other_weights_has_another_name(
    trainer: Trainer, tmp_path: Path
) -> None:
    """With --staleness 1 several resumed runs may need the adapter of one round, each at weights of its
    own. The server rejects other weights under a known name."""
    server = LoraServer(trainer.model)
    trainer.train(0.05)
    before = trainer.weights()
    with trainer.connected(tmp_path, server) as policy:
        first = policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        settings = replace(trainer.settings(*policy.urls), staleness=1)
        resumed = PolicyServers(settings, trainer.tokenizer, trainer.ranks)
        resumed.open([tmp_path], PROMPTS)
        found = resumed.find(1)
        assert found is not None and found.name == first.name
        try:
            with torch.no_grad():
                for name, parameter in trainer.built.model.named_parameters():
                    if "lora_A" in name:
                        parameter.mul_(1.1)
            resumed.publish_again(trainer.scorer, SAMPLING, found)
        finally:
            trainer.restore(before)
    canaries = [name for name in server.loaded if "canary" in name]
    assert len(set(canaries)) == len(canaries) >= 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ignores", "answers as the base model, so it ignores the adapter."),
        ("half", "of the way from the base model to the adapter."),
        ("other base", "computes with other weights than the trainer"),
        ("shifted", "computes with other weights than the trainer"),
        ("accepts", "does not list"),
        ("no route", "has no /v1/load_lora_adapter (no such path). Start vLLM with --enable-lora"),
        ("rank", "fails with HTTP 500 (LoRA rank 8 is greater than max_lora_rank 4)."),
        ("no disk", "It must see this directory under the same path."),
        ("no ids", "answers without token ids (return_token_ids)"),
        pytest.param("slow", "does not answer within 10 s.", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_does_not_apply_adapters_is_found_before_the_first_round(
    trainer: Trainer, tmp_path: Path, fault: str, message: str
) -> None:
    """Although the adapter itself changes nothing yet."""
    trainer.train(0.0)
    before = trainer.weights()
    servers = [LoraServer(trainer.model), LoraServer(trainer.model, fault)]
    with trainer.connected(tmp_path, *servers) as policy:
        with pytest.raises(UserError) as error:
            policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        url = policy.urls[1]
    assert len(error.value.messages) == 1, error.value
    assert error.value.messages[0].startswith(f"--server {url}: ")
    assert message in error.value.messages[0]
    assert is_equal(trainer.weights(), before)


def test_a_server_that_is_gone_is_one_message(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be asked"):
        PolicyServers(trainer.settings("http://127.0.0.1:9"), trainer.tokenizer, trainer.ranks)


@pytest.mark.parametrize("fault", ["ignores", "half", "other base"])
def test_a_server_that_changes_later_is_found_at_the_next_version(
    trainer: Trainer, tmp_path: Path, fault: str
) -> None:
    server = LoraServer(trainer.model)
    trainer.train(0.2)
    with trainer.connected(tmp_path, server) as policy:
        policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        server.fault = fault
        with pytest.raises(UserError, match=r"does not apply|other weights") as error:
            policy.publish(trainer.scorer, SAMPLING, trainer.facts(2, "b"))
        assert len(error.value.messages) == 1


@pytest.mark.parametrize("fault", ["", "other base"])
def test_a_server_that_was_restarted_gets_the_adapter_again(
    trainer: Trainer, tmp_path: Path, fault: str
) -> None:
    server = LoraServer(trainer.model)
    trainer.train(0.2)
    with trainer.connected(tmp_path, server) as policy:
        policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        expected = policy.sample(trainer.scorer, SAMPLING, PROMPTS, step=1)
        server.forgets = len(server.requests) + 3
        server.fault = fault
        if fault:
            with pytest.raises(UserError, match=r"does not apply|other weights"):
                policy.sample(trainer.scorer, SAMPLING, PROMPTS, step=1)
            return
        answers = policy.sample(trainer.scorer, SAMPLING, PROMPTS, step=1)
    for group, others in zip(answers, expected, strict=True):
        for answer, other in zip(group, others, strict=True):
            assert answer.token_ids.tolist() == other.token_ids.tolist()


def test_a_server_that_loses_adapters_is_named_with_what_continues_the_run(
    trainer: Trainer, tmp_path: Path
) -> None:
    server = LoraServer(trainer.model)
    trainer.train(0.2)
    with trainer.connected(tmp_path, server) as policy:
        first = policy.publish(trainer.scorer, SAMPLING, trainer.facts(1, "a"))
        (tmp_path / "rollouts" / "000001").mkdir()  # a round
        server.before_answer = lambda request: server.adapters.clear()  # at each one
        with pytest.raises(UserError) as sampling:
            policy.sample(trainer.scorer, SAMPLING, PROMPTS, step=1)
        with pytest.raises(UserError) as probing:
            policy.publish(trainer.scorer, SAMPLING, trainer.facts(2, "b"))
        [url] = policy.urls
    names = [first.name, server.loaded[-1]]
    for error, name in zip((sampling, probing), names, strict=True):
        [message] = error.value.messages
        assert message.startswith(f"--server {url}: has lost the adapter {name}: the server was")
        assert message.endswith("the same command with --resume auto continues.")
    assert "policy-000002" in names[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use_peft=false"], "full fine-tuning has none. Add --use_peft"),
        (["--use_dora=true"], "--peft.use_dora: vLLM has no DoRA."),
        (["--peft.bias=all"], "--peft.bias all: vLLM has no trained biases."),
        (["--peft.r=1024"], "--peft.r 1024: vLLM has ranks up to 512."),
        (["--peft.r=512", "--init_lora_weights=pissa"], "--peft.r 1024: vLLM has ranks"),
        (["--peft_method=loha"], "--peft_method loha: vLLM loads LoRA adapters only."),
        (["--modules_to_save=lm_head"], "--peft.modules_to_save lm_head: vLLM loads no whole"),
    ],
)
def test_adapters_that_vllm_lacks_are_one_message(flags: list[str], message: str) -> None:
    config, _ = load(["--objective=grpo", "--use_peft=true", *flags])
    [problem] = find_problems(config)
    assert message in problem
    assert "leave --server out" in problem
