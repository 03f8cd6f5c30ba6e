"""A signal stops a run within an evaluation or the generation of sample answers, and no step is
lost. What torchrun adds to a signal is tested in runtime/test_signals.py."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, losses, metrics, write_rows
from forked import forked, start_forked

from llama_ft.checkpoint import checkpoint_errors

EVALUATING = Path(__file__).with_name("evaluating_job.py")
TRAINING = (
    "--precision fp32 --context_length 64 --lr 1e-3 --max_train_step 4 --save_steps 1 --eval_steps 3 "
    "--gradient_accumulation_steps 1 --no_plan"
).split()
# a thousand batches, or hundreds of tokens: seconds that end at once if they are abandoned
LONG_EVALUATION = ["--val_batch_size", "1"]
SHORT_EVALUATION = ["--max_eval_step", "1"]
LONG_ANSWERS = ["--sample_tokens", "2000"]
DEADLINE_SECONDS = 120.0
CTRL_C = (
    "warning: Ctrl-C: the run finishes the current step, saves a checkpoint and exits. "
    "A second Ctrl-C exits at once without saving.\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, save_model: Any) -> Path:
    """A model of many positions, data, and `whole`, a run that is not stopped."""
    folder = tmp_path_factory.mktemp("stop")
    save_model(folder / "model", max_position_embeddings=4096)
    write_rows(folder / "rows.jsonl", 32)
    write_rows(folder / "validation.jsonl", 2000)
    for ranks, name in ((2, "whole"), (0, "single")):
        finished = forked(RECIPE, *flags(folder, name), *SHORT_EVALUATION, ranks=ranks)
        assert finished.exit_code == 0, finished.output
    return folder


def flags(folder: Path, name: str) -> list[str]:
    inputs = {"model_name": "model", "dataset": "rows.jsonl", "validation": "validation.jsonl"}
    inputs["output_dir"] = name
    paths = [word for flag, path in inputs.items() for word in (f"--{flag}", f"{folder}/{path}")]
    return [*paths, "--batch_size_training", "2", *TRAINING]


class Run:
    """The recipe in processes that get signals."""

    def __init__(
        self, folder: Path, name: str, *more: str, ranks: int = 0, script: Path = RECIPE
    ) -> None:
        self.directory = folder / name
        self.log = folder / f"{name}.log"
        words = [*flags(folder, name), *more]
        if script != RECIPE:
            words = [str(RECIPE), *words]
        self.running = start_forked(script, *words, output=self.log, ranks=ranks)

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "status.json").read_text()))

    def wait_for(self, text: str, name: str = "") -> None:
        """Wait until the output, or the file `name` of the run, has a text."""
        file = self.directory / name if name else self.log
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not file.exists() or text not in file.read_text():
            is_late = time.monotonic() > deadline
            assert self.running.is_alive() and not is_late, self.log.read_text()
            time.sleep(0.02)

    def stop(self, number: int) -> tuple[int | None, str]:
        """Send a signal to all ranks. Return the exit code and the output."""
        self.running.send(number)
        exit_code = self.running.wait(DEADLINE_SECONDS)
        return exit_code, self.log.read_text()


def after_step_1(folder: Path, run: str) -> list[str]:
    return ["--resume", str(folder / run / "checkpoints" / "step-000001")]


def test_ctrl_c_during_an_evaluation_abandons_it_and_saves_the_step(folder: Path) -> None:
    resumed = after_step_1(folder, "whole")
    run = Run(folder, "evaluating", *resumed, *LONG_EVALUATION, ranks=2, script=EVALUATING)
    run.wait_for("evaluation begins")
    exit_code, output = run.stop(signal.SIGINT)
    assert exit_code == 130
    assert output.count(CTRL_C) == 1
    assert output.index(CTRL_C) < output.index("The evaluation was abandoned.\n")
    checkpoint = run.directory / "checkpoints" / "step-000003"
    line = f"stopped by Ctrl-C after step 3. To resume: --resume {checkpoint}"
    assert re.findall("stopped by .*", output) == [line]
    assert run.status == {"state": "stopped", "step": 3, "exit_code": 130, "message": line}
    assert checkpoint_errors(checkpoint) == []
    assert "eval/loss" not in metrics(run.directory)[-1] and len(losses(run.directory)) == 3
    resumed = ["--resume", "auto", *SHORT_EVALUATION]
    finished = forked(RECIPE, *flags(folder, "evaluating"), *resumed, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert losses(run.directory) == losses(folder / "whole")


def test_sigterm_during_sample_answers_saves_the_step(folder: Path) -> None:
    """Without a plan, units fit into free memory. So rank 0 generates while the other one waits."""
    more = [*after_step_1(folder, "whole"), *LONG_ANSWERS, "--sample_steps", "3"]
    run = Run(folder, "answering", *more, *SHORT_EVALUATION, "--enable_fsdp", ranks=2)
    run.wait_for('"step": 3', "metrics.jsonl")
    exit_code, output = run.stop(signal.SIGTERM)
    assert exit_code == 143
    assert "The generation of sample answers was abandoned." in output
    assert run.status["step"] == 3 and "stopped by SIGTERM after step 3. To resume" in output
    assert checkpoint_errors(run.directory / "checkpoints" / "step-000003") == []
    assert "after step 3" not in (run.directory / "facts.json").read_text()


def test_ctrl_c_during_the_evaluation_before_step_1_saves_nothing(folder: Path) -> None:
    run = Run(folder, "before", *LONG_EVALUATION, "--sample_tokens", "1")
    run.wait_for("Before fine-tuning")
    exit_code, output = run.stop(signal.SIGINT)
    assert exit_code == 130
    assert "stopped by Ctrl-C before step 1. Nothing was saved.\n" in output
    assert not (run.directory / "checkpoints").exists()
    assert "To resume" not in output and metrics(run.directory) == []


def test_a_run_stopped_after_its_last_step_resumes_with_the_export(folder: Path) -> None:
    more = [*after_step_1(folder, "single"), *SHORT_EVALUATION]
    run = Run(folder, "after", *more, *LONG_ANSWERS)
    run.wait_for('"step": 4', "metrics.jsonl")
    exit_code, output = run.stop(signal.SIGINT)
    assert exit_code == 130
    assert "The generation of sample answers was abandoned." in output
    assert "stopped by Ctrl-C after step 4. To resume: --resume " in output
    assert run.status["state"] == "stopped" and not (run.directory / "model").exists()
    finished = forked(RECIPE, *flags(folder, "after"), "--resume", "auto", *SHORT_EVALUATION)
    assert finished.exit_code == 0 and (run.directory / "model").is_dir(), finished.output


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_requested_checkpoint_is_saved_and_training_continues(folder: Path, ranks: int) -> None:
    name = f"requested-{ranks}"
    never = "--save_steps 0 --save_model False --max_train_step 4000 --num_epochs 4000".split()
    run = Run(folder, name, *never, "--eval_steps", "0", *SHORT_EVALUATION, ranks=ranks)
    run.wait_for('"step": 1', "metrics.jsonl")
    last_rank = run.running.processes[-1]
    os.kill(last_rank.pid, signal.SIGUSR1)
    run.wait_for("was requested")
    first = requested_steps(run)
    request = run.directory / "save"
    request.touch()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(requested_steps(run)) == len(first):
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.02)
    assert not request.exists()
    last = requested_steps(run)[-1]
    run.wait_for(f'"step": {last + 2}', "metrics.jsonl")
    exit_code, output = run.stop(signal.SIGINT)
    assert exit_code == 130, output
    assert len(requested_steps(run)) == 2, output
    saved = run.directory / "checkpoints" / f"step-{last:06d}"
    assert checkpoint_errors(saved) == []
    assert f"To resume: --resume {saved}" in output


def requested_steps(run: Run) -> list[int]:
    found = re.findall(r"A checkpoint of step (\d+) was requested", run.log.read_text())
    return [int(step) for step in found]
