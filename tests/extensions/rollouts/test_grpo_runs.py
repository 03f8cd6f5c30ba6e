"""Runs with --objective grpo, compared with a loop over the answers of their rounds."""

import json
import math
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, metrics, reproducible_metrics, run_cases, series, write_jsonl
from forked import forked
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llama_ft.config import Config
from llama_ft.extensions.rollouts.grpo.settings import GrpoConfig
from llama_ft.extensions.rollouts.grpo.training_rounds import changed_settings
from llama_ft.extensions.rollouts.rounds import (
    Answer,
    Round,
    folder_of,
    read_round,
    sha256_of,
)

REWARD = """
import os, signal, time
from pathlib import Path

def score(prompt, answer, sample):
    folder = os.environ.get("KILLED_IN")
    if folder and Path(folder, "rollouts", "unscored-000004").exists():
        while not Path(os.environ.get("KILLED_AFTER", folder)).exists():
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)
    folder = os.environ.get("STOPPED_IN")
    if folder and Path(folder, "rollouts", "unscored-000002").exists():
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
    if sample["id"] == 3:
        return {"letters": 0.5, "short": 0.0}
    if len(answer) % 4 == 3:
        return None
    letters = sum(letter.islower() and letter.isascii() for letter in answer)
    return {"letters": letters / 8, "short": len(answer) < 8}

def letters(prompt, answer, sample):
    return sum(letter.islower() and letter.isascii() for letter in answer) / 8

def number(prompt, answer, sample):
    return sample["id"] / 10
"""
LONGEST = 8
# name -> flags, which the loop reads, too
VARIANTS = {
    "dapo": {"kl_beta": "0.1", "temperature": "0.7"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "mask_truncated_completions": "true",
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "equal_groups": "drop"},
    "twice": {
        "num_iterations": "2",
        "epsilon": "0.001",
        "epsilon_high": "0.002",
        "kl_beta": "0.1",
        "temperature": "0.7",
    },
}
LEARNING_RATE = 0.5
UPDATES = 3
HELD_OUT = (20, 40, 90)  # numbers of prompts in a file of their own
# five rounds of three steps each, but the last one of one step
WHOLE = {
    "lr": 0.01,
    "num_iterations": UPDATES,
    "save_steps": 5,
    "max_train_step": 13,
    "generate_batch_size": 5,  # three batches per round
}
TWO_ROUNDS = {**WHOLE, "max_train_step": 2 * UPDATES}
# how two ranks have the weights -> flags, and the batch of rank 1 that is the last but one of round 2:
# ranks that share the weights generate equally often
RANKED = {"sharded": ({"enable_fsdp": "true"}, 4), "copies": ({"enable_fsdp": "false"}, 2)}
STOPPED_RECIPE = Path(__file__).with_name("stopped_recipe.py")


class Job:
    """Prompts and rewards in a folder, and runs."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        (folder / "reward.py").write_text(REWARD)
        user = {"role": "user", "content": "How many?"}
        chats = [{"messages": [{**user, "content": f"Number {n}?"}], "id": n} for n in range(15)]
        write_jsonl(folder / "prompts.jsonl", chats)

    def flags(self, output: str, **settings: Any) -> list[str]:
        given = {
            "objective": "grpo",
            "model_name": self.model,
            "dataset": self.folder / "prompts.jsonl",
            "output_dir": self.folder / output,
            "reward": f"{self.folder}/reward.py:score",
            "num_generations": 4,
            "prompts_per_step": 3,
            "max_completion_length": LONGEST,
            "batch_size_training": 5,
            "use_peft": "true",
            "lr_scheduler": "constant",
            "precision": "fp32",
            "device": "cpu",
        }
        settings = {**given, **settings}
        return [f"--{name}={value}" for name, value in settings.items() if value is not None]

    def round(self, output: str, step: int) -> Round:
        return read_round(folder_of(self.folder / output, step))

    def content(self, output: str) -> dict[str, Any]:
        """What a run has written: its rounds and adapter, as bytes, and its metrics."""
        folder = self.folder / output
        files = [*(folder / "rollouts").rglob("*.*"), folder / "model/adapter_model.safetensors"]
        found: dict[str, Any] = {
            str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()
        }
        return found | {"metrics": reproducible_metrics(folder)}


def sgd(**settings: Any) -> dict[str, Any]:
    return {"optimizer": "SGD", "lr": LEARNING_RATE, **settings}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """Each variant for one step and for two, and runs that are not interrupted, reach a limit, have
    held-out prompts, and learn."""
    one = Job(tmp_path_factory.mktemp("grpo"), tiny_model)
    cases = []
    for name, settings in VARIANTS.items():
        for steps in (1, 2):
            cases.append(one.flags(f"{name}-{steps}", **sgd(**settings, max_train_step=steps)))
    cases.append(one.flags("whole", **WHOLE))
    cases.append(one.flags("limited", lr=0.01, max_train_step=5, max_generated_tokens=100))
    held_out = {"reward": f"{one.folder}/reward.py:number", "validation": 0.3, "num_epochs": 1}
    cases.append(one.flags("held_out", **held_out))
    run_cases(one.folder, cases)
    return one


@pytest.fixture(scope="module")
def of_two_ranks(job: Job) -> Job:
    """The same steps by two ranks, which share the answers, or the weights as well."""
    cases = []
    for name in VARIANTS:
        settings = sgd(**VARIANTS[name], max_train_step=2)
        if name == "dapo":
            settings["enable_fsdp"] = "true"
        cases.append(job.flags(f"{name}-ranks", **settings))
    write_jsonl(job.folder / "held_out.jsonl", [{"prompt": f"Say {n}", "id": n} for n in HELD_OUT])
    held_out = {"validation": job.folder / "held_out.jsonl", "num_generations_eval": 2}
    reward = f"{job.folder}/reward.py:number"
    cases.append(job.flags("held_out-ranks", reward=reward, max_train_step=1, **held_out))
    for name, (settings, _) in RANKED.items():
        cases.append(job.flags(f"{name}-whole", **TWO_ROUNDS, **settings))
    run_cases(job.folder, cases, ranks=2)
    return job


def advantages(group: list[Answer], settings: dict[str, str]) -> list[float | None]:
    totals = [answer.total for answer in group]
    known = [total for total in totals if total is not None]
    if len(known) < 2 or (settings.get("equal_groups") == "drop" and len(set(known)) == 1):
        return [None] * len(group)
    divisor = statistics.stdev(known) + 1e-4
    if settings.get("scale_rewards") == "none":
        divisor = 1.0
    mean = statistics.mean(known)
    return [None if total is None else (total - mean) / divisor for total in totals]


def by_hand(model: PeftModel, rollouts: Round, settings: dict[str, str]) -> torch.Tensor:
    """The loss of a round, one answer after another."""
    kind = settings.get("loss_type", "dapo")
    temperature = float(settings.get("temperature", 1))
    lowest = 1 - float(settings.get("epsilon", 0.2))
    highest = 1 + float(settings.get("epsilon_high", 0.2))
    beta = float(settings.get("kl_beta", 0))

    def log_probabilities(prompt: list[int], answer: Answer) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *answer.token_ids.tolist()]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)

    total = torch.zeros(())
    tokens = 0
    answers = 0
    for prompt, group in zip(rollouts.prompts, rollouts.answers, strict=True):
        for answer, advantage in zip(group, advantages(group, settings), strict=True):
            if advantage is None:
                continue
            answers += 1
            if settings.get("mask_truncated_completions") and not answer.has_ended:
                continue
            tokens += len(answer.token_ids)
            new = log_probabilities(prompt.token_ids, answer)
            with torch.no_grad(), model.disable_adapter():
                reference = log_probabilities(prompt.token_ids, answer)
            # before step 1 the new adapter is zero
            old = reference if "num_iterations" in settings else new.detach()
            ratio = (new - old).exp()
            if settings.get("importance_sampling_level") == "sequence":
                ratio = (new - old).mean().exp().expand(len(new))
            sampled = torch.from_numpy(answer.logprobs.copy()).double()
            weight = math.exp(float((old.double() - sampled).sum()))
            divergence = (reference - new).exp() - (reference - new) - 1
            gain = torch.min(ratio * advantage, ratio.clamp(lowest, highest) * advantage)
            losses = -gain * weight + beta * ratio * divergence
            divisor = {"dapo": 1, "grpo": len(new), "dr_grpo": LONGEST}[kind]
            total = total + losses.sum() / divisor
    return total / (tokens if kind == "dapo" else answers)


def adapter(job: Job, output: str) -> dict[str, torch.Tensor]:
    return load_file(job.folder / output / "model/adapter_model.safetensors")


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_a_loop_over_the_stored_round(job: Job, name: str) -> None:
    """Of step 2, whose adapter is not zero: that of a run of one step. With several steps per round
    it is the second one on round 1."""
    settings = VARIANTS[name]
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(job.folder / f"{name}-1/model"), is_trainable=True)
    rollouts = job.round(f"{name}-2", 1 if name == "twice" else 2)
    expected = by_hand(model, rollouts, settings)
    expected.backward()
    found = series(job.folder / f"{name}-2", "train/loss")
    assert found[1] == pytest.approx(expected.item(), abs=1e-6)
    before = adapter(job, f"{name}-1")
    after = adapter(job, f"{name}-2")
    gradients = {key: (before[key] - after[key]) / LEARNING_RATE for key in before}
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in gradients.values())
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = gradients[key.replace(".default", "")]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_have_the_losses_and_rounds_of_one(of_two_ranks: Job, name: str) -> None:
    job = of_two_ranks
    one = series(job.folder / f"{name}-2", "train/loss")
    assert series(job.folder / f"{name}-ranks", "train/loss") == pytest.approx(one, abs=1e-6)
    for number in ("weight", "largest_weight", "effective_sample_size"):
        key = f"train/sampler/{number}"
        ours = series(job.folder / f"{name}-2", key)
        assert series(job.folder / f"{name}-ranks", key) == pytest.approx(ours, abs=1e-5)
    for number in (1,) if name == "twice" else (1, 2):
        answers = [answer.token_ids.tolist() for answer in flat(job.round(f"{name}-2", number))]
        theirs = [answer.token_ids.tolist() for answer in flat(job.round(f"{name}-ranks", number))]
        assert theirs == answers


def flat(rollouts: Round) -> list[Answer]:
    return [answer for group in rollouts.answers for answer in group]


def test_metrics_have_the_mean_rewards_of_each_round(job: Job) -> None:
    lines = metrics(job.folder / "whole")
    assert [line["step"] for line in lines] == [*range(1, 14)]
    for line in lines:
        answers = flat(job.round("whole", math.ceil(line["step"] / UPDATES)))
        totals = [answer.total for answer in answers if answer.total is not None]
        assert line["train/reward"] == pytest.approx(statistics.mean(totals))
        for name in ("letters", "short"):
            values = [answer.rewards[f"score.{name}"] for answer in answers]
            known = [value for value in values if value is not None]
            assert line[f"train/reward/score.{name}"] == pytest.approx(statistics.mean(known))
        assert line["train/rollout/without_reward"] == len(answers) - len(totals)
        # the sampler and the trainer compute the same probabilities
        assert line["train/sampler/weight"] == pytest.approx(1, abs=1e-4)
        assert line["train/sampler/largest_weight"] == pytest.approx(1, abs=1e-4)
        assert line["train/sampler/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert line["train/sampler/masked"] == 0
        assert line["train/sampler/kl"] == pytest.approx(0, abs=1e-6)


def test_the_report_has_the_best_and_the_worst_answer_of_steps(job: Job) -> None:
    facts = json.loads((job.folder / "whole/facts.json").read_text())
    steps = facts["rollouts"]
    assert [one["when"] for one in steps] == [f"step {step}" for step in (1, 4, 7, 10, 13)]
    for number, one in enumerate(steps, 1):
        answers = flat(job.round("whole", number))
        totals = [answer.total for answer in answers if answer.total is not None]
        assert [shown["reward"] for shown in one["answers"]] == [max(totals), min(totals)]
    page = (job.folder / "whole/report.html").read_text()
    assert "Best and worst answers" in page


def test_each_round_is_of_the_prompts_and_weights_before_its_first_step(job: Job) -> None:
    rounds = [job.round("whole", number) for number in range(1, 6)]
    seen = sorted(prompt.index for one in rounds for prompt in one.prompts)
    assert seen == list(range(15))  # an epoch
    assert len({one.facts.policy["checksum"] for one in rounds}) == 5
    epochs = [line["epoch"] for line in metrics(job.folder / "whole")]
    assert epochs == pytest.approx([step / 15 for step in range(1, 14)])


def test_later_steps_on_a_round_are_clipped(job: Job) -> None:
    first, second = series(job.folder / "twice-2", "train/policy/clipped")
    assert first == 0
    assert 0 < second < 1


def test_limits_without_effect_may_differ_in_a_resumed_run() -> None:
    """Older versions accepted them with one step per round. Now they are an error."""
    settings = Config().section(GrpoConfig)
    earlier = {**asdict(settings), "epsilon": 0.1, "epsilon_high": 0.28}
    assert not changed_settings(settings, earlier)
    twice = replace(settings, num_iterations=2)
    messages = changed_settings(twice, {**earlier, "num_iterations": 2})
    assert [message.split(":")[0] for message in messages] == ["--epsilon", "--epsilon_high"]


def test_a_run_ends_after_the_step_that_reaches_the_limit_of_tokens(job: Job) -> None:
    folder = job.folder / "limited"
    tokens = [job.round("limited", step).tokens for step in (1, 2)]
    assert tokens[0] < 100 <= sum(tokens)
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == ["000001", "000002"]
    assert (folder / "model/adapter_model.safetensors").is_file()
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["stopped_early"] == "max_generated_tokens 100 is reached"


def test_the_reward_of_held_out_prompts_is_measured(job: Job) -> None:
    """Their reward is their number. A fraction is not trained on."""
    rounds = [
        job.round("held_out", int(line["step"])) for line in metrics(job.folder / "held_out")[1:]
    ]
    trained = {prompt.sample["id"] for one in rounds for prompt in one.prompts}
    held_out = set(range(15)) - trained
    assert held_out
    expected = statistics.mean(held_out) / 10
    lines = metrics(job.folder / "held_out")
    assert [line["eval/reward"] for line in (lines[0], lines[-1])] == pytest.approx([expected] * 2)
    assert lines[-1]["eval/loss"] == pytest.approx(-expected)
    assert "eval/perplexity" not in lines[-1]


def test_held_out_prompts_without_responses_cannot_be_compared(job: Job) -> None:
    evaluate = RECIPE.with_name("evaluate.py")
    finished = forked(evaluate, job.folder / "held_out", "--device", "cpu")
    assert finished.exit_code == 2, finished.output
    assert "To compare rewards of prompts, use llama-ft rollout" in finished.output


def test_ranks_share_the_prompts_of_a_validation_file(of_two_ranks: Job) -> None:
    rewards = series(of_two_ranks.folder / "held_out-ranks", "eval/reward")
    assert rewards == pytest.approx([statistics.mean(HELD_OUT) / 10] * 2)


@pytest.mark.slow
def test_a_verifiable_reward_rises(job: Job) -> None:
    settings = {"reward": f"{job.folder}/reward.py:letters", "num_generations": 16, "lr": 0.1}
    finished = forked(RECIPE, *job.flags("learning", **settings, num_epochs=4))
    assert finished.exit_code == 0, finished.output
    rewards = series(job.folder / "learning", "train/reward")
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4]) + 0.1


def test_a_killed_run_replays_its_rounds_and_ends_with_the_same_bytes(job: Job) -> None:
    """It is killed while the answers of round 4 are scored, before step 10. The newest checkpoint is
    of step 5, the second one on round 2: this round and round 3 are read, and round 4 is only
    scored."""
    flags = job.flags("killed", **WHOLE, resume="auto")
    folder = job.folder / "killed"
    killed = forked(RECIPE, *flags, KILLED_IN=str(folder))
    assert killed.exit_code != 0
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == ["000001", "000002", "000003", "unscored-000004"]
    times = {path: path.stat().st_mtime_ns for path in (folder / "rollouts").glob("0*/*")}

    resumed = forked(RECIPE, *flags)
    assert resumed.exit_code == 0, resumed.output
    assert "1 round of the steps after 5 on disk" in resumed.output
    assert "round 4: its answers are on disk, and are only scored" in resumed.output
    kept = {path: time for path, time in times.items() if path.name != "old-logprobs.safetensors"}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert job.content("killed") == job.content("whole")


def test_a_signal_ends_the_generation_of_a_round_and_keeps_its_answers(job: Job) -> None:
    """SIGTERM arrives in the third batch of round 2, before step 4: the others have all answers to two
    prompts, and two of the four to the third one."""
    folder = job.folder / "signalled"
    flags = job.flags("signalled", **WHOLE, resume="auto")
    stopped = forked(STOPPED_RECIPE, *flags, STOPPED_IN_BATCH="6")
    assert stopped.exit_code == 143, stopped.output
    assert "round 2: the answers to 2 prompts are kept" in stopped.output
    assert "stopped by SIGTERM after step 3. To resume" in stopped.output
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == ["000001", "begun-000002"]
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
    resumed = forked(STOPPED_RECIPE, *flags)
    assert resumed.exit_code == 0, resumed.output
    assert "batches 11" in resumed.output  # four rounds of three, without the first one
    assert job.content("signalled") == job.content("whole")


@pytest.mark.slow
@pytest.mark.parametrize("weights", RANKED)
def test_a_signal_to_one_of_two_ranks_ends_generation_and_a_reward_that_hangs(
    of_two_ranks: Job, weights: str
) -> None:
    """Rank 1 gets SIGTERM while it generates for round 2. The resumed run's rank 0 gets it while a
    reward is computed, which would take an hour."""
    job = of_two_ranks
    name = f"{weights}-signalled"
    folder = job.folder / name
    settings, batch = RANKED[weights]
    flags = job.flags(name, **TWO_ROUNDS, **settings, resume="auto", reward_timeout=3600)
    in_batch = {"STOPPED_RANK": "1", "STOPPED_IN_BATCH": str(batch)}
    generating = forked(STOPPED_RECIPE, *flags, ranks=2, **in_batch)
    assert generating.exit_code == 143, generating.output
    assert "round 2: the answers to 2 prompts are kept" in generating.output
    scoring = forked(RECIPE, *flags, ranks=2, STOPPED_IN=str(folder))
    assert scoring.exit_code == 143, scoring.output
    assert "stopped by SIGTERM after step 3. To resume" in scoring.output
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == ["000001", "unscored-000002"]
    resumed = forked(RECIPE, *flags, ranks=2)
    assert resumed.exit_code == 0, resumed.output
    assert job.content(name) == job.content(f"{weights}-whole")


def test_a_run_resumes_in_the_middle_of_a_round_on_an_empty_disk(job: Job) -> None:
    """Its checkpoint of step 5, the second one on round 2, is in a store with the rounds so far."""
    folder = job.folder / "moved"
    settings = {**WHOLE, "save_to": f"file://{job.folder}/store", "resume": "auto"}
    first = forked(RECIPE, *job.flags("moved", **{**settings, "max_train_step": 5}))
    assert first.exit_code == 0, first.output
    shutil.rmtree(folder)
    settings["resume_allow_changes"] = "max_train_step"
    resumed = forked(RECIPE, *job.flags("moved", **settings))
    assert resumed.exit_code == 0, resumed.output
    assert "Fetching step-000005" in resumed.output
    assert job.content("moved") == job.content("whole")
    names = {path.name for path in (job.folder / "store/rollouts").iterdir()}
    assert names == {f"{number:06}" for number in range(1, 6)}


@pytest.mark.parametrize("damage", ["missing", "half", "one bit"])
def test_corrupted_log_probabilities_of_a_round_are_an_error(
    job: Job, tmp_path: Path, damage: str
) -> None:
    """A run resumes at step 11, the second one on round 4."""
    folder = tmp_path / "damaged"
    shutil.copytree(job.folder / "whole", folder)
    file = folder / "rollouts/000004/old-logprobs.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "one bit":
        file.write_bytes(content)
    elif damage == "half":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    settings = {**WHOLE, "output_dir": folder, "resume": folder / "checkpoints/step-000010"}
    resumed = forked(RECIPE, *job.flags("damaged", **settings))
    assert resumed.exit_code == 2, resumed.output
    assert f"{file}: is missing or corrupted" in resumed.output
    assert "Traceback" not in resumed.output


def test_a_changed_reward_is_named_before_rounds_are_used_and_can_be_allowed(job: Job) -> None:
    """The round of the checkpoint has the earlier reward, and keeps it."""
    reward = job.folder / "own_reward.py"
    reward.write_text(REWARD)
    settings = {"reward": f"{reward}:letters", "save_steps": 1, "resume": "auto"}
    first = forked(RECIPE, *job.flags("changed", **settings, max_train_step=1))
    assert first.exit_code == 0, first.output
    reward.write_text(REWARD + "\n# changed\n")
    settings |= {"max_train_step": 2, "resume_allow_changes": "max_train_step"}
    changed = forked(RECIPE, *job.flags("changed", **settings))
    assert changed.exit_code == 2, changed.output
    assert f"another file {reward}" in changed.output
    names = sorted(path.name for path in (job.folder / "changed/rollouts").iterdir())
    assert names == ["000001"]
    assert "--resume_allow_changes reward continues" in changed.output
    settings["resume_allow_changes"] = "max_train_step,reward"
    before = contents(folder_of(job.folder / "changed", 1))
    allowed = forked(RECIPE, *job.flags("changed", **settings))
    assert allowed.exit_code == 0, allowed.output
    assert contents(folder_of(job.folder / "changed", 1)) == before
    sums = [job.round("changed", number).facts.rewards[0].sha256 for number in (1, 2)]
    assert sums[0] != sums[1] == sha256_of(reward)
    settings["resume_allow_changes"] = "max_train_step,reward,seed"
    other = forked(RECIPE, *job.flags("changed", **settings | {"max_train_step": 3, "seed": 7}))
    assert other.exit_code == 0, other.output
    seeds = [job.round("changed", number).facts.seed for number in (1, 2, 3)]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["data", "model"])
def test_rounds_of_other_data_or_weights_are_an_error(
    job: Job, tmp_path: Path, changed: str
) -> None:
    """A run was killed before its first checkpoint. Its round is not generated again."""
    one = Job(tmp_path, job.model)
    run = tmp_path / "run"
    shutil.copytree(job.folder / "dapo-1/rollouts", run / "rollouts")
    (run / ".llama_ft-run").touch()
    settings = sgd(**VARIANTS["dapo"], max_train_step=1, resume="auto")
    settings["reward"] = f"{job.folder}/reward.py:score"
    if changed == "data":
        prompts = [{"messages": [{"role": "user", "content": f"{n}?"}], "id": n} for n in range(15)]
        write_jsonl(tmp_path / "prompts.jsonl", prompts)
    else:
        settings["model_name"] = shutil.copytree(job.model, tmp_path / "model")
        file = tmp_path / "model/model-00001-of-00003.safetensors"
        weights = load_file(file)
        save_file({name: weights[name] * 1.5 for name in weights}, file, {"format": "pt"})
    before = contents(folder_of(run, 1))
    finished = forked(RECIPE, *one.flags("run", **settings))
    assert finished.exit_code == 2, finished.output
    assert (
        f"{run}/rollouts/000001: was made with\n  another {changed}: "
        in finished.output.replace("\n       ", "\n")
    )
    assert "Traceback" not in finished.output
    assert contents(folder_of(run, 1)) == before


def test_settings_that_do_not_fit_are_user_errors(job: Job) -> None:
    accumulating = job.flags("bad", gradient_accumulation_steps=2)
    finished = forked(RECIPE, *accumulating)
    assert finished.exit_code == 2, finished.output
    assert "--gradient_accumulation_steps has no effect with objective grpo" in finished.output
    settings = {"reward": None, "use_peft": "false", "kl_beta": 0.1}
    finished = forked(RECIPE, *job.flags("bad", **settings))
    assert finished.exit_code == 2, finished.output
    assert "--reward is needed" in finished.output
    assert "--kl_beta: the reference is the model with its adapter off" in finished.output
    finished = forked(RECIPE, *job.flags("bad", max_completion_length=257))
    assert finished.exit_code == 2, finished.output
    assert (
        "--max_completion_length 257: a prompt and its answer have 256 positions" in finished.output
    )
    prompts = [{"prompt": "How many? " * count} for count in (1, 80)]
    long = write_jsonl(job.folder / "long.jsonl", prompts)
    finished = forked(RECIPE, *job.flags("bad", validation=long))
    assert finished.exit_code == 2, finished.output
    assert "--validation: 1 bad sample." in finished.output
    assert f"{long}:2: the prompt has" in finished.output
    assert "error: --dataset" not in finished.output
    assert not (job.folder / "bad").exists()


def test_steps_that_teach_nothing_are_a_warning_once(job: Job) -> None:
    equal = job.flags("equal", reward=f"{job.folder}/reward.py:number", max_train_step=2)
    finished = forked(RECIPE, *equal)
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("have equal rewards, so the step teaches nothing") == 1
    assert series(job.folder / "equal", "train/grad_norm") == [0, 0]


@pytest.mark.slow
def test_overwriting_a_run_keeps_the_answers_that_it_generated(job: Job) -> None:
    folder = job.folder / "overwritten"
    answers = contents(folder_of(job.folder / "dapo-1", 1))
    shutil.copytree(job.folder / "dapo-1", folder)
    texts = write_jsonl(job.folder / "texts.jsonl", [{"text": "One sample."}] * 4)
    sft = ["--objective=sft", f"--model_name={job.model}", f"--output_dir={folder}", "--overwrite"]
    sft += [f"--dataset={texts}", "--max_train_step=1", "--no_plan", "--device=cpu"]
    assert forked(RECIPE, *sft).exit_code == 0
    assert contents(folder_of(folder, 1)) == answers
    more = job.flags("overwritten", overwrite="true", **sgd(max_train_step=1))
    finished = forked(RECIPE, *more)
    assert finished.exit_code == 0, finished.output
    assert (
        "rollouts is of the run that --overwrite replaces; it is kept as set-aside-1-rollouts"
        in (finished.output)
    )
    assert contents(folder / "set-aside-1-rollouts" / "000001") == answers
    assert contents(folder_of(folder, 1)) != answers  # sampled at another temperature


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
