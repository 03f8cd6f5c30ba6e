"""recipes/rollout.py as users run it."""

import math
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, write_jsonl
from forked import Finished, Running, forked, start_forked
from local_server import serve
from rollout_server import RolloutServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_ft.extensions.rollouts.rounds import Round, list_rounds, read_round

ROLLOUT = REPOSITORY / "recipes" / "rollout.py"
REWARD = """
import time
from pathlib import Path

def score(prompt, answer, sample):
    while sample["id"] >= 2 and Path({wait!r}).exists():
        time.sleep(0.05)
    if sample["id"] == 1:
        return None
    return {{"length": len(answer), "vowels": sum(answer.count(letter) for letter in "aeiou")}}

def nothing(prompt, answer, sample):
    raise ValueError("no idea")
"""
FAILING = """
right = score

def score(prompt, answer, sample):
    if sample["id"] >= 2:
        raise KeyError("total")
    return right(prompt, answer, sample)
"""
FILES = ("prompts.jsonl", "round.json", "samples.safetensors")


class Job:
    """A task in a folder: five prompts, one with a response, and rewards."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.wait = folder / "wait"
        self.reward = folder / "reward.py"
        self.reward.write_text(REWARD.format(wait=str(self.wait)))
        user = {"role": "user", "content": "How many?"}
        answer = {"role": "assistant", "content": "Three."}
        rows = [
            {"messages": [user], "id": 0, "target": math.nan},
            {"messages": [user, answer], "id": 1},
            *({"messages": [{**user, "content": f"Number {n}?"}], "id": n} for n in (2, 3, 4)),
        ]
        write_jsonl(folder / "prompts.jsonl", rows)

    def flags(self, output: str, *more: str) -> list[str]:
        own = [str(self.model), "--output_dir", str(self.folder / output)]
        own += ["--dataset", f"{self.folder}/prompts.jsonl", "--prompts_per_step", "2"]
        own += ["--num_generations", "3", "--max_completion_length", "8", "--prompt_format", "text"]
        own += ["--reward_timeout", "200", "--device", "cpu", "--precision", "fp32"]
        return [*own, "--batch_size", "2", "--reward", f"{self.folder}/reward.py:score=0.5", *more]

    def run(self, output: str, *more: str, ranks: int = 0) -> Finished:
        return forked(ROLLOUT, *self.flags(output, *more), ranks=ranks)

    def start(self, output: str, *more: str, ranks: int) -> Running:
        flags = self.flags(output, *more)
        return start_forked(ROLLOUT, *flags, output=self.folder / "output.txt", ranks=ranks)

    def rounds(self, output: str) -> list[Round]:
        return [read_round(folder) for folder in list_rounds(self.folder / output)]

    def content(self, output: str) -> dict[str, bytes]:
        """The bytes of all files, by their names."""
        folder = self.folder / output / "rollouts"
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name in FILES]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """The task, with the rounds of a run that was not interrupted in `whole`."""
    folder = tmp_path_factory.mktemp("rollouts")
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = template
    model = folder / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(model)
    tokenizer.save_pretrained(model)
    one = Job(folder, model)
    finished = one.run("whole")
    assert finished.exit_code == 0, finished.output
    assert "round 1 of 3: 6 answers" in finished.output
    assert "1 prompt with fewer than two rewards" in finished.output
    return one


def test_rounds_have_prompts_rewards_and_checksums(job: Job) -> None:
    rounds = job.rounds("whole")
    prompts = [prompt for one in rounds for prompt in one.prompts]
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.sample["id"] for prompt in prompts] == [0, 1, 2, 3, 4]
    assert prompts[0].content == prompts[1].content == [{"role": "user", "content": "How many?"}]
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[2].text == "Number 2?"
    first = rounds[0].answers[0][0]
    vowels = sum(first.text.count(letter) for letter in "aeiou")
    assert first.rewards == {"score.length": len(first.text), "score.vowels": vowels}
    assert first.total == pytest.approx(0.5 * (len(first.text) + vowels))
    assert [answer.total for answer in rounds[0].answers[1]] == [None] * 3
    assert rounds[0].groups() == [0]
    seeds = {answer.seed for one in rounds for group in one.answers for answer in group}
    assert len(seeds) == 15
    facts = rounds[0].facts
    assert facts.sampling["max_completion_length"] == 8
    assert facts.policy["compute"] == "torch.float32"
    assert len(facts.policy["checksum"]) == len(facts.data["sha256"]) == 64


def test_a_killed_command_of_two_sharded_ranks_ends_with_the_bytes_of_one_rank(job: Job) -> None:
    """The ranks share the weights; in each round one of them has fewer batches. The rewards of round
    2 wait for the kill. Its answers are scored without generating them again."""
    job.wait.touch()
    running = job.start("killed", "--enable_fsdp", ranks=2)
    folder = job.folder / "killed/rollouts"
    deadline = time.monotonic() + 200
    while not (folder / "unscored-000002").exists() and time.monotonic() < deadline:
        assert running.is_alive(), (job.folder / "output.txt").read_text()
        time.sleep(0.05)
    running.send(signal.SIGKILL)
    running.wait(30)
    job.wait.unlink()
    assert "sharded across 2 ranks" in (job.folder / "output.txt").read_text()
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == ["000001", "unscored-000002"]

    finished = job.run("killed", ranks=2)
    assert finished.exit_code == 0, finished.output
    assert "3 rounds of 2 prompts with 3 answers each; 1 complete" in finished.output
    assert finished.output.count("round 2: its answers are on disk, and are only scored") == 1
    assert job.content("killed") == job.content("whole")


def test_complete_rounds_are_verified_and_other_settings_named(job: Job) -> None:
    before = job.content("whole")
    text = job.reward.read_text()
    job.reward.write_text(text + "\n# new\n")
    finished = job.run("whole", "--temperature", "0.5", "--seed", "7")
    job.reward.write_text(text)
    assert finished.exit_code == 2, finished.output
    lines = finished.output[finished.output.index("error:") :].splitlines()
    assert lines[0] == f"error: {job.folder}/whole/rollouts/000001: was made with"
    named = [line.split(":")[0].split()[:3] for line in lines[1:4]]
    assert [words[0] for words in named] == ["--seed", "--temperature", "another"]
    assert f"another file {job.folder}/reward.py:" in lines[3]
    assert job.content("whole") == before


def test_corrected_rewards_score_all_answers_again_without_generating(job: Job) -> None:
    """The function fails in round 2, so round 1 is complete with another file."""
    text = job.reward.read_text()
    job.reward.write_text(text + FAILING)
    failed = job.run("corrected")
    job.reward.write_text(text)
    assert failed.exit_code == 2, failed.output
    assert "no answer of round 2 has a reward" in failed.output
    named = job.run("corrected")
    assert named.exit_code == 2, named.output
    assert "--score_again scores its answers again" in named.output
    finished = job.run("corrected", "--score_again")
    assert finished.exit_code == 0, finished.output
    for number in (1, 2):
        line = f"round {number}: its answers are on disk, and are only scored"
        assert finished.output.count(line) == 1
    assert job.content("corrected") == job.content("whole")


def test_a_server_answers_once_also_if_the_rewards_fail_at_first(job: Job) -> None:
    server = RolloutServer(AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32))
    flags = job.flags("served")
    for name in ("--device", "--precision", "--batch_size"):
        place = flags.index(name)
        del flags[place : place + 2]
    with serve(server.answer) as url:
        flags += ["--server", url, "--model", "tuned"]
        failed = forked(ROLLOUT, *flags, "--reward", f"{job.folder}/reward.py:nothing")
        assert len(server.requests) == 6
        finished = forked(ROLLOUT, *flags)
        count = len(server.requests)
        again = forked(ROLLOUT, *flags)
    assert failed.exit_code == 2, failed.output
    assert "no answer of round 1 has a reward" in failed.output
    assert "ValueError: no idea" in failed.output
    assert "Traceback" not in failed.output
    assert finished.exit_code == 0, finished.output
    assert "round 1: its answers are on disk, and are only scored" in finished.output
    assert again.exit_code == 0, again.output
    assert "3 complete" in again.output
    assert len(server.requests) == count == 15
    rounds = job.rounds("served")
    assert [len(one.prompts) for one in rounds] == [2, 2, 1]
    assert rounds[0].facts.source["version"] == "0.32.0"
    seeds = [answer.seed for one in rounds for group in one.answers for answer in group]
    own = job.rounds("whole")
    assert seeds == [answer.seed for one in own for group in one.answers for answer in group]


def test_an_error_in_the_data_leaves_nothing(job: Job, tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "How many?"}, {"other": 1}])
    output = tmp_path / "new" / "output"
    flags = ["--dataset", str(bad), "--output_dir", str(output), "--device", "cpu"]
    finished = forked(ROLLOUT, str(job.model), *flags)
    assert finished.exit_code == 2, finished.output
    assert f"{bad}:2: expected a column" in finished.output
    assert "--dataset: 1 bad sample." in finished.output
    assert not output.parent.exists()


def test_flags_that_do_not_fit_are_one_message_each(tmp_path: Path, tiny_model: Path) -> None:
    flags = ["--server", "localhost:8000", "--device", "cpu", "--temperature", "0"]
    flags += ["--score_again", "--reward_timeout", "5", "--pass_threshold", "2"]
    flags += ["--num_generations", "100001"]
    finished = forked(ROLLOUT, str(tiny_model), *flags)
    assert finished.exit_code == 2
    for message in (
        "--dataset is needed: the prompts.",
        "--output_dir is needed: the directory for the rounds.",
        "--server localhost:8000: expected a URL such as http://localhost:8000.",
        "--device: not with --server, which computes.",
        "--score_again: needs --reward.",
        "--reward_timeout: needs --reward.",
        "--pass_threshold: needs --reward.",
        "--num_generations 100001: must be at most 100000.",
        "--temperature",
    ):
        assert finished.output.count(message) == 1, finished.output
