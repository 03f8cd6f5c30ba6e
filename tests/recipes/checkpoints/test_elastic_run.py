"""A run on torchrun --nnodes 1:2 that loses a node and gets it back is the run that nothing
happens to. Each agent is a node; they meet on this machine."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from agents import SLOWED, nodes, wait_until
from conftest import RECIPE, metrics, reproducible_metrics
from forked import forked, start_forked

STEPS = 40
# Without LoRA's dropout, whose random numbers depend on the rank.
SETTINGS = (
    "--precision fp32 --enable_fsdp --batch_size_training 2 --gradient_accumulation_steps 2 --num_epochs 99 "
    f"--max_train_step {STEPS} --lr 1e-3 --lr_scheduler linear --save_steps 5 --no_run_validation --no_plan"
)


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(steps, default=0)


def words_of(model: Path, rows: Path, output_dir: Path | str, *more: str) -> list[str]:
    inputs = ["--model_name", str(model), "--dataset", str(rows)]
    return [*SETTINGS.split(), *inputs, "--output_dir", str(output_dir), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows70: Path) -> Path:
    """The run on 2 ranks that nothing happens to."""
    output_dir = tmp_path_factory.mktemp("elastic") / "whole"
    finished = forked(RECIPE, *words_of(tiny_model, rows70, output_dir), ranks=2)
    assert finished.exit_code == 0, finished.output
    return output_dir


def assert_equal_run(run: Path, whole: Path) -> None:
    """Compare what every step has seen bit for bit, and its loss within 1e-5."""
    lines = metrics(run)
    expected = metrics(whole)
    for key in ("step", "tokens", "epoch", "train/lr"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    losses = [line["train/loss"] for line in lines]
    assert losses == pytest.approx([line["train/loss"] for line in expected], rel=1e-5)


@pytest.mark.slow
def test_attempts_on_other_numbers_of_ranks_continue_the_run_without_being_told(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    run = tmp_path / "run"
    words = words_of(tiny_model, rows70, run)
    # as torchrun's agent sets it
    error_file = tmp_path / "logs" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    agent = {"TORCHELASTIC_ERROR_FILE": str(error_file), "GROUP_WORLD_SIZE": "2"}
    brake = tmp_path / "brake"
    brake.write_text("0.05")
    output = ""
    for ranks, last in ((2, 7), (1, 20)):
        log = tmp_path / f"log{ranks}"
        running = start_forked(SLOWED, *words, output=log, ranks=ranks, BRAKE=str(brake), **agent)
        while running.is_alive() and last_step(run) < last:
            time.sleep(0.01)
        running.send(signal.SIGKILL)
        running.wait(30)
        output += log.read_text()
    finished = forked(RECIPE, *words, ranks=3, **agent)
    assert finished.exit_code == 0, finished.output
    assert output.count("Resuming from") == 1 and "Resuming from" in finished.output
    assert output.count("The global batch stays 8, as in the resumed run") == 1
    assert (
        "3 ranks do not divide it, so some wait for others (1, 2, 4, 8 ranks do)" in finished.output
    )
    assert_equal_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("is_command", [False, pytest.param(True, marks=pytest.mark.large)])
def test_a_lost_node_that_returns_changes_no_step(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path, is_command: bool
) -> None:
    run = tmp_path / "run"
    # no --resume: torchrun's next attempt must find the run by itself
    words = words_of(tiny_model, rows70, run)
    with nodes(2, tmp_path, words, is_command) as started:
        first = started.start("first")
        second = started.start("second")
        wait_until(lambda: last_step(run) >= 7, first, second)
        started.lose(first)
        lost_after = last_step(run)
        wait_until(lambda: last_step(run) > lost_after, second)
        started.take_per_step(2.0)  # so that the node is back before the run ends
        first = started.start("first")
        wait_until(lambda: started.output.count("= ranks (2) x micro-batch") >= 2, first, second)
        started.take_per_step(0.0)
        exit_codes = [node.wait() for node in (first, second)]
        output = started.output
    assert exit_codes == [0, 0], output
    assert "The global batch stays 8, as in the resumed run" in second.output
    assert "stopped by SIGTERM" in second.output  # to let the node in
    # twice, unless the nodes have met too late for a round
    resumed_from = [int(step) for step in re.findall(r"Resuming from .*/step-(\d+)", output)]
    assert len(resumed_from) >= 2, output
    assert lost_after - 10 < min(resumed_from) <= lost_after < max(resumed_from)
    assert_equal_run(run, whole)
    lines = reproducible_metrics(run)
    assert lines[: min(resumed_from)] == reproducible_metrics(whole)[: min(resumed_from)]

    # On 2 ranks again it is the run of 2 ranks from that checkpoint, bit for bit.
    copied = tmp_path / "copied"
    name = f"checkpoints/step-{max(resumed_from):06d}"
    shutil.copytree(run / name, copied / name)
    again = words_of(tiny_model, rows70, tmp_path / "again", "--resume", str(copied / name))
    finished = forked(RECIPE, *again, ranks=2)
    assert finished.exit_code == 0, finished.output
    assert reproducible_metrics(tmp_path / "again") == lines[max(resumed_from) :]


@pytest.mark.large
def test_a_node_lost_before_the_first_checkpoint_leaves_the_global_batch(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    run = tmp_path / "run"
    words = words_of(tiny_model, rows70, run, "--save_steps", "0", "--save_every_epoch", "False")
    with nodes(2, tmp_path, words) as started:
        first = started.start("first")
        second = started.start("second")
        wait_until(lambda: last_step(run) >= 5, first, second)
        started.lose(first)
        started.take_per_step(0.0)
        assert second.wait() == 0, second.output
    assert "The global batch stays 8" in second.output and "Resuming from" not in second.output
    assert_equal_run(run, whole)
