"""A run stopped by SIGTERM, resumed, and then hit by kill -9 under torchrun --max_restarts is the
run never stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, RECIPE, reproducible_metrics

STEPS = 60
DEADLINE_SECONDS = 120.0


def start(
    output_dir: Path, model: Path, rows: Path, *more: str, restarts: int = 0
) -> subprocess.Popen[str]:
    """The recipe on 2 ranks, running."""
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node 2 --max_restarts {restarts}"
    settings = "--precision fp32 --batch_size_training 2 --num_epochs 9 --eval_steps 7 --save_steps 5 --keep_last 2"
    settings += f" --enable_fsdp --use_peft --lora_dropout 0.2 --validation 0.1 --lr 1e-3 --max_train_step {STEPS}"
    settings += f" --model_name {model} --dataset {rows} --output_dir {output_dir}"
    command = [sys.executable, *launcher.split(), str(RECIPE), *settings.split(), *more]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def wait_for_step(output_dir: Path, step: int, torchrun: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any(line["step"] >= step for line in written(output_dir)):
        assert torchrun.poll() is None, torchrun.communicate()[0]
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def written(output_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl so far."""
    file = output_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def rank_process(torchrun: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank, which torchrun has started."""
    for process in Path("/proc").iterdir():
        try:
            is_child = f"PPid:\t{torchrun.pid}\n" in (process / "status").read_text()
            if is_child and f"\0RANK={rank}\0" in (process / "environ").read_text():
                return int(process.name)
        except OSError:
            continue  # not a process, or one that has ended
    raise AssertionError(f"no rank {rank}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rows70: Path) -> Path:
    """The run that nothing happens to."""
    output_dir = tmp_path_factory.mktemp("restarts") / "whole"
    torchrun = start(output_dir, tiny_model, rows70)
    output, _ = torchrun.communicate(timeout=DEADLINE_SECONDS)
    assert torchrun.returncode == 0, output
    return output_dir


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_equals_the_uninterrupted_one(
    whole: Path, tmp_path: Path, tiny_model: Path, rows70: Path
) -> None:
    output_dir = tmp_path / "run"
    torchrun = start(output_dir, tiny_model, rows70)
    wait_for_step(output_dir, 12, torchrun)
    torchrun.send_signal(signal.SIGTERM)
    output, _ = torchrun.communicate(timeout=DEADLINE_SECONDS)
    status = json.loads((output_dir / "status.json").read_text())
    checkpoint = output_dir / "checkpoints" / f"step-{status['step']:06d}"
    assert torchrun.returncode != 0
    assert (status["state"], status["exit_code"]) == ("stopped", 143)
    assert (
        status["message"]
        == f"stopped by SIGTERM after step {status['step']}. To resume: --resume {checkpoint}"
    )
    assert 12 <= status["step"] < STEPS and checkpoint.is_dir()
    assert status["message"] in (output_dir / "report.html").read_text()

    torchrun = start(output_dir, tiny_model, rows70, "--resume", str(checkpoint), restarts=2)
    wait_for_step(output_dir, max(status["step"] + 3, 33), torchrun)
    os.kill(rank_process(torchrun, 1), signal.SIGKILL)
    output, _ = torchrun.communicate(timeout=DEADLINE_SECONDS)
    assert torchrun.returncode == 0, output
    assert output.count("Resuming from") == 2
    assert reproducible_metrics(output_dir) == reproducible_metrics(whole)
    assert json.loads((output_dir / "status.json").read_text())["state"] == "finished"
    kept = {path.name for path in (output_dir / "checkpoints").glob("step-*")}
    assert kept == {path.name for path in (whole / "checkpoints").glob("step-*")}


@pytest.mark.large
def test_a_restarted_attempt_does_not_overwrite_the_previous_one(
    whole: Path, tiny_model: Path, rows70: Path
) -> None:
    expected = reproducible_metrics(whole)
    torchrun = start(whole, tiny_model, rows70, "--overwrite", restarts=1)
    while len(written(whole)) >= len(expected) and torchrun.poll() is None:
        threading.Event().wait(0.01)  # until the earlier run is gone
    wait_for_step(whole, 20, torchrun)
    os.kill(rank_process(torchrun, 0), signal.SIGKILL)
    output, _ = torchrun.communicate(timeout=DEADLINE_SECONDS)
    assert torchrun.returncode == 0, output
    assert output.count("Resuming from") == 1
    assert reproducible_metrics(whole) == expected
