"""Runs with --objective grpo whose answers are sampled by servers that compute with PEFT."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, metrics, run_cases, series
from extensions.rollouts.test_grpo_runs import Job, flat
from forked import forked, start_forked
from local_server import serve
from lora_server import LoraServer

SETTINGS = {
    "lr": 0.05,
    "save_steps": 2,
    "max_train_step": 5,
    "num_generations": 3,
    "max_completion_length": 5,  # the servers compute without a cache
}
# runs whose servers are one round ahead, with a checkpoint at the end of a round or in the middle of one
STALE = {
    "stale": {"staleness": 1, "save_steps": 3},
    "stale-twice": {"staleness": 1, "save_steps": 5, "num_iterations": 2, "max_train_step": 7},
}


class ServedJob(Job):
    """A job whose runs are answered by a server, and another one."""

    def __init__(self, folder: Path, model: Path, servers: list[LoraServer]) -> None:
        super().__init__(folder, model)
        self.servers = servers
        self.urls = list[str]()

    def flags(self, output: str, **settings: Any) -> list[str]:
        given = {"server": self.urls[0], "server_timeout": "20s", **SETTINGS, **settings}
        if given["server"] is None:
            del given["server_timeout"]
        return super().flags(output, **given)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServedJob]:
    """A run that is not interrupted."""
    servers = [LoraServer(tiny_model), LoraServer(tiny_model)]
    one = ServedJob(tmp_path_factory.mktemp("served"), tiny_model, servers)
    with serve(servers[0].answer) as first, serve(servers[1].answer) as second:
        one.urls = [first, second]
        cases = [one.flags("whole"), *(one.flags(name, **STALE[name]) for name in STALE)]
        run_cases(one.folder, cases)
        yield one


def test_each_round_is_sampled_with_the_weights_before_its_step(job: ServedJob) -> None:
    """Otherwise sampler and trainer would give its tokens other probabilities."""
    for line in metrics(job.folder / "whole"):
        assert line["train/sampler/weight"] == pytest.approx(1, abs=1e-4)
        assert line["train/sampler/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    rounds = [job.round("whole", step) for step in range(1, 6)]
    assert len({one.facts.policy["checksum"] for one in rounds}) == 5
    assert {str(one.facts.source) for one in rounds} == {"{'kind': 'server', 'version': '0.32.0'}"}
    versions = [name for name in job.servers[0].loaded if name.startswith("whole-policy-0")]
    assert [name.split("-")[2] for name in versions] == [f"{step:06}" for step in range(1, 6)]


def test_nothing_is_left_of_the_adapters(job: ServedJob) -> None:
    names = sorted(path.name for path in (job.folder / "whole/rollouts").iterdir())
    assert names == [f"{step:06}" for step in range(1, 6)]
    assert not any(name.startswith("whole") for name in job.servers[0].adapters)


@pytest.mark.slow
def test_two_servers_and_two_ranks_give_the_rounds_of_one(job: ServedJob) -> None:
    both = {"server": ",".join(job.urls), "max_train_step": 2, "enable_fsdp": "true"}
    run_cases(job.folder, [job.flags("ranks", **both)], ranks=2)
    one = series(job.folder / "whole", "train/loss")[:2]
    assert series(job.folder / "ranks", "train/loss") == pytest.approx(one, abs=1e-6)
    for step in (1, 2):
        answers = [answer.token_ids.tolist() for answer in flat(job.round("whole", step))]
        theirs = [answer.token_ids.tolist() for answer in flat(job.round("ranks", step))]
        assert theirs == answers
    assert any(name.startswith("ranks") for name in job.servers[1].loaded)


@pytest.fixture(scope="module")
def killed(job: ServedJob) -> Path:
    """A run that was killed while the answers of step 4 were scored; its checkpoint is of step 2."""
    folder = job.folder / "killed"
    finished = forked(RECIPE, *job.flags("killed", resume="auto"), KILLED_IN=str(folder))
    assert finished.exit_code != 0
    shutil.copytree(folder, job.folder / "alone")
    return folder


def test_a_killed_run_replays_its_rounds_and_asks_for_the_missing_ones(
    job: ServedJob, killed: Path
) -> None:
    names = {path.name for path in (killed / "rollouts").iterdir()}
    assert names >= {"000001", "000002", "000003", "unscored-000004"}
    server = job.servers[0]
    assert any(name.startswith("killed-policy-000004") for name in server.adapters)
    server.requests.clear()
    resumed = forked(RECIPE, *job.flags("killed", resume="auto"))
    assert resumed.exit_code == 0, resumed.output
    assert "1 round of the steps after 2 on disk" in resumed.output
    assert "round 4: its answers are on disk, and are only scored" in resumed.output
    answered = [one for one in server.requests if one["model"].startswith("killed-policy-0")]
    assert {one["model"].split("-")[2] for one in answered} == {"000005"}
    assert job.content("killed") == job.content("whole")
    assert not any(name.startswith("killed") for name in server.adapters)


def test_a_run_whose_servers_are_gone_continues_by_itself(job: ServedJob, killed: Path) -> None:
    resumed = forked(RECIPE, *job.flags("alone", resume="auto", server=None))
    assert resumed.exit_code == 0, resumed.output
    kinds = [job.round("alone", step).facts.source["kind"] for step in range(1, 6)]
    assert kinds == ["server"] * 4 + ["own generation"]


def test_with_staleness_each_round_is_sampled_with_the_weights_one_step_earlier(
    job: ServedJob,
) -> None:
    checksums = [job.round("stale", step).facts.policy["checksum"] for step in range(1, 6)]
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == 4
    lines = metrics(job.folder / "stale")
    assert lines[0]["train/sampler/largest_weight"] == pytest.approx(1, abs=1e-4)
    weights = [line["train/sampler/largest_weight"] for line in lines[1:]]
    assert all(abs(weight - 1) > 1e-3 for weight in weights)  # a step apart
    server = job.servers[0]
    assert not any(name.startswith("stale") for name in server.adapters)
    names = sorted(path.name for path in (job.folder / "stale/rollouts").iterdir())
    assert names == [f"{step:06}" for step in range(1, 6)]


def test_with_staleness_each_round_of_two_steps_is_sampled_before_the_previous_one(
    job: ServedJob,
) -> None:
    checksums = [job.round("stale-twice", n).facts.policy["checksum"] for n in range(1, 5)]
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == 3
    clipped = series(job.folder / "stale-twice", "train/policy/clipped")
    assert clipped[::2] == [0] * 4  # the ratio is to the weights before the first step on a round


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["stale", "stale-twice"])
def test_with_staleness_a_killed_run_has_the_weights_of_its_next_round(
    job: ServedJob, whole: str
) -> None:
    """It is killed while the answers of round 4 are scored, once as it is and once as if they had not
    arrived yet: their weights, those before round 3, are not in the checkpoint."""
    names = [f"{whole}-killed", f"{whole}-lost"]
    folder = job.folder / names[0]
    settings = {**STALE[whole], "resume": "auto"}
    assert forked(RECIPE, *job.flags(names[0], **settings), KILLED_IN=str(folder)).exit_code != 0
    unscored = folder / "rollouts/unscored-000004"
    shutil.copytree(folder, job.folder / names[1])
    shutil.rmtree(job.folder / names[1] / "rollouts/unscored-000004")
    assert unscored.is_dir()
    for name in names:
        resumed = forked(RECIPE, *job.flags(name, **settings))
        assert resumed.exit_code == 0, resumed.output
        assert job.content(name) == job.content(whole)
    assert "loaded again" not in resumed.output


@pytest.mark.slow
def test_without_the_weights_of_its_next_round_a_run_does_not_resume(job: ServedJob) -> None:
    folder = job.folder / "stale-moved"
    shutil.copytree(job.folder / "stale", folder)
    for step in (4, 5):
        shutil.rmtree(folder / f"rollouts/{step:06}")
    shutil.rmtree(folder / "model")
    settings = {**STALE["stale"], "resume": folder / "checkpoints/step-000003"}
    resumed = forked(RECIPE, *job.flags("stale-moved", **settings))
    assert resumed.exit_code == 2, resumed.output
    assert "round 4: is missing, and so are its weights" in resumed.output
    assert "Traceback" not in resumed.output


@pytest.mark.slow
def test_with_staleness_a_killed_run_resumes_on_an_empty_disk(job: ServedJob) -> None:
    """It is killed while the answers of round 4 are scored, when the checkpoint of step 3 is in the
    store with their weights, those before round 3."""
    folder = job.folder / "stored"
    store = job.folder / "store"
    settings = {**STALE["stale"], "resume": "auto", "save_to": f"file://{store}"}
    flags = job.flags("stored", **settings, reward_timeout=240)
    after = str(store / "checkpoints/step-000003/commit.json")
    killed = forked(RECIPE, *flags, KILLED_IN=str(folder), KILLED_AFTER=after)
    assert killed.exit_code != 0
    [policy] = (store / "rollouts").glob("policy-*")
    assert policy.name.startswith("policy-000004-")
    shutil.rmtree(folder)
    resumed = forked(RECIPE, *flags)
    assert resumed.exit_code == 0, resumed.output
    assert "Fetching step-000003" in resumed.output
    assert job.content("stored") == job.content("stale")


def signalled(
    job: ServedJob, output: Path, flags: list[str], is_chosen: Callable[[dict[str, Any]], bool]
) -> str:
    """Send SIGTERM to a run when the first server gets a chosen request, which has no answer until the
    run has ended. Return what it prints."""
    server = job.servers[0]
    running = start_forked(RECIPE, *flags, output=output)
    is_over = threading.Event()

    def stop(request: dict[str, Any]) -> None:
        if is_chosen(request) and not is_over.is_set():
            running.send(signal.SIGTERM)
            is_over.wait(60)

    server.before_answer = stop
    try:
        exit_code = running.wait(120)
    finally:
        is_over.set()
        server.before_answer = lambda request: None
    assert exit_code == 143, output.read_text()
    return output.read_text()


@pytest.mark.slow
def test_a_signal_while_a_server_answers_keeps_its_answers(job: ServedJob, tmp_path: Path) -> None:
    """It arrives when the server has answered four requests of round 3: one prompt has its three
    answers. The resumed run gets one while it probes the server."""
    flags = job.flags("signalled", server_requests=1, resume="auto")
    seeds = [answer.seed for answer in flat(job.round("whole", 3))]
    answering = signalled(
        job, tmp_path / "answering", flags, lambda request: request["seed"] == seeds[4]
    )
    assert "round 3: the answers to 1 prompt are kept" in answering
    assert "stopped by SIGTERM after step 2. To resume" in answering
    probing = signalled(
        job, tmp_path / "probing", flags, lambda request: "canary" in request["model"]
    )
    assert "stopped by SIGTERM after step 2. To resume" in probing
    server = job.servers[0]
    server.requests.clear()
    resumed = forked(RECIPE, *flags)
    assert resumed.exit_code == 0, resumed.output
    asked = {request["seed"] for request in server.requests}
    assert [seed in asked for seed in seeds] == [False] * 3 + [True] * 6
    assert job.content("signalled") == job.content("whole")


@pytest.mark.slow
def test_a_server_that_loses_adapters_ends_the_run_which_resumes(job: ServedJob) -> None:
    server = job.servers[0]

    def lose(request: dict[str, Any]) -> None:
        if "lost-policy-000003" in request["model"]:
            server.adapters.clear()

    server.before_answer = lose
    ended = forked(RECIPE, *job.flags("lost"))
    server.before_answer = lambda request: None
    assert ended.exit_code == 2, ended.output
    assert "has lost the adapter lost-policy-000003-" in ended.output
    assert "the same command with --resume auto continues" in ended.output
    assert "Traceback" not in ended.output
    resumed = forked(RECIPE, *job.flags("lost", resume="auto"))
    assert resumed.exit_code == 0, resumed.output
    assert job.content("lost") == job.content("whole")


def test_a_server_of_the_base_model_is_found_in_the_first_round(job: ServedJob) -> None:
    job.servers[1].fault = "ignores"
    finished = forked(RECIPE, *job.flags("base", server=job.urls[1]))
    job.servers[1].fault = ""
    assert finished.exit_code == 2, finished.output
    assert "answers as the base model, so it ignores the adapter" in finished.output
    assert "Traceback" not in finished.output
    assert not list((job.folder / "base").rglob("round.json"))


def test_settings_that_need_no_server_are_user_errors(job: ServedJob) -> None:
    settings = {"server": "localhost:8000", "use_peft": "false"}
    finished = forked(RECIPE, *job.flags("bad", **settings))
    assert finished.exit_code == 2, finished.output
    assert "--server localhost:8000: expected a URL such as" in finished.output
    assert "full fine-tuning has none. Add --use_peft" in finished.output
    finished = forked(RECIPE, *job.flags("bad", server=None, staleness=1))
    assert "--staleness has no effect without server." in finished.output
    assert not (job.folder / "bad").exists()
