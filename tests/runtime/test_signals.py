"""Signals and --stop_after end jobs between two steps, alike on all ranks, or at once where nothing
can be saved."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

from llama_ft.runtime.exit import Stop
from llama_ft.runtime.signals import StopSignals

JOB = str(Path(__file__).with_name("stopping_job.py"))
ACKNOWLEDGED = (
    "warning: Ctrl-C: the run finishes the current step, saves a checkpoint and exits. "
    "A second Ctrl-C exits at once without saving.\n"
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


class Running:
    """A job that has been started; its files show what it does."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 90
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(90)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    @property
    def output(self) -> str:
        return self.read("output")

    @property
    def status(self) -> dict[str, object]:
        return json.loads(self.read("status.json"))


@contextmanager
def job(folder: Path, *arguments: str, launcher: list[str] = TORCHRUN) -> Iterator[Running]:
    """Start the job as a shell would: in a process group of its own."""
    command = [sys.executable, *launcher, JOB, str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
    try:
        yield Running(folder, process)
    finally:
        for group in [*(int(rank.read_text()) for rank in folder.glob("process-*")), process.pid]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()


def stopped_line(running: Running, reason: str, step: str) -> str:
    checkpoint = running.folder / "checkpoints" / f"step-{int(step):06d}"
    return f"stopped by {reason} after step {step}. To resume: --resume {checkpoint}"


def test_sigterm_to_torchrun_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    with job(tmp_path, "rank 0 saves longer") as running:
        running.wait_for("training-0", "training-1")
        running.process.terminate()
        running.end()
    step = running.read("saved-0")
    assert int(step) >= 3 and running.read("saved-1") == step
    line = stopped_line(running, "SIGTERM", step)
    assert re.findall("stopped by .*", running.output) == [line]
    assert running.status == {
        "state": "stopped",
        "step": int(step),
        "exit_code": 143,
        "message": line,
    }


@pytest.mark.parametrize(("launcher", "has_checkpoint"), [(TORCHRUN, False), ([], True)])
def test_a_second_ctrl_c_ends_all_ranks_without_waiting_for_the_save(
    launcher: list[str], has_checkpoint: bool, tmp_path: Path
) -> None:
    ranks = 2 if launcher else 1
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    with job(tmp_path, "saves for ever", launcher=launcher) as running:
        running.wait_for(*(f"training-{rank}" for rank in range(ranks)))
        os.killpg(running.process.pid, signal.SIGINT)  # what a terminal does
        running.wait_for(*(f"saving-{rank}" for rank in range(ranks)))
        assert running.read("saving-0") == running.read(f"saving-{ranks - 1}")
        assert running.output.count(ACKNOWLEDGED) == 1
        started = time.monotonic()
        os.killpg(running.process.pid, signal.SIGINT)
        running.end()
    assert time.monotonic() - started < 5
    assert not list(tmp_path.glob("saved-*"))
    hint = f". To resume: --output_dir {tmp_path} --resume auto" if has_checkpoint else ""
    assert re.findall("stopped by .*", running.output) == [
        f"stopped by a second Ctrl-C, without saving{hint}"
    ]
    assert running.status["state"] == "stopped" and running.status["exit_code"] == 130


def test_stop_after_ends_torchrun_with_exit_code_0_and_no_restart(tmp_path: Path) -> None:
    started = time.time()
    with job(tmp_path, "", "6s", launcher=[*TORCHRUN, "--max_restarts", "3"]) as running:
        assert running.end() == 0
    assert time.time() - started > 6
    for rank in (0, 1):  # the time counts from torchrun's start, not from the end of loading
        assert -0.1 < float(running.read(f"started-{rank}")) - started < 1
    step = running.read("saved-0")
    assert running.read("saved-1") == step
    line = stopped_line(running, "--stop_after 6s", step)
    assert running.output.splitlines() == [line]
    assert running.status == {
        "state": "stopped",
        "step": int(step),
        "exit_code": 0,
        "message": line,
    }


def test_a_hanging_rank_ends_soon_after_another_is_killed_and_saves_nothing(
    tmp_path: Path,
) -> None:
    with job(tmp_path, "rank 0 hangs") as running:
        running.wait_for("training-0", "training-1")
        killed = int(running.read("process-1"))
        started = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        assert running.end() == 1
    assert time.monotonic() - started < 5
    assert not list(tmp_path.glob("saved-*"))
    assert (
        running.output.count(
            f"error: lost contact with another rank: rank 1 (process {killed}) has ended"
        )
        == 1
    )
    # there is no checkpoint
    assert "stopped by" not in running.output and "--resume" not in running.output
    assert running.status["state"] == "failed" and running.status["exit_code"] == 1


@pytest.mark.parametrize(
    ("way", "number", "name", "code"),
    [
        ("", signal.SIGHUP, "SIGHUP", 129),
        ("loads in Python", signal.SIGTERM, "SIGTERM", 143),
        ("loads in C++", signal.SIGINT, "Ctrl-C", 130),
    ],
)
def test_a_signal_stops_one_process_after_its_step_or_at_once_before_training(
    tmp_path: Path, way: str, number: int, name: str, code: int
) -> None:
    with job(tmp_path, way, launcher=[]) as running:
        running.wait_for("loading-0" if way else "training-0")
        started = time.monotonic()
        running.process.send_signal(number)
        assert running.end() == code
    assert time.monotonic() - started < 5
    step = 0 if way else int(running.read("saved-0"))
    line = f"stopped by {name}" if way else stopped_line(running, name, str(step))
    assert running.output == f"{line}\n"
    assert running.status == {"state": "stopped", "step": step, "exit_code": code, "message": line}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_delivered_twice_by_a_launcher_counts_once(number: int) -> None:
    stopping = StopSignals()
    ended = []
    with stopping.listening(ended.append):
        with pytest.raises((SystemExit, KeyboardInterrupt)), stopping.between_steps(None):
            os.kill(os.getpid(), number)
            assert stopping.end_requested.wait(10)
            os.kill(os.getpid(), number)
    assert stopping.asked() == number and not ended


def test_a_forked_process_that_is_terminated_does_not_stop_its_parent() -> None:
    stopping = StopSignals()
    ended = []
    with stopping.listening(ended.append):
        context = multiprocessing.get_context("fork")
        runs = context.Event()
        child = context.Process(target=lambda: (runs.set(), time.sleep(60)))
        child.start()
        assert runs.wait(30)
        os.kill(child.pid, signal.SIGTERM)
        child.join()
    assert child.exitcode == -signal.SIGTERM
    assert stopping.asked() == 0 and not ended


def test_ranks_with_different_signals_agree_on_one() -> None:
    stopping = StopSignals()
    with stopping.between_steps("1h30m"):
        asked = stopping.asked()
        assert asked == 0 and stopping.agreed(torch.tensor([0.0, 0.0])) is None
        assert stopping.agreed(torch.tensor([0.0, 0.5])) == Stop(0, "--stop_after 1h30m")
        assert stopping.agreed(torch.tensor([0.5, 15.0, 0.0])) == Stop(143, "SIGTERM")
        assert stopping.agreed(torch.tensor([2.0, 0.5])) == Stop(130, "Ctrl-C")
        assert stopping.agreed(torch.tensor([0.5, 1.0])) == Stop(129, "SIGHUP")
