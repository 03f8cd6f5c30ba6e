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
from forked import REPOSITORY, start_forked

from llama_ft.runtime.ends.exit import Stop
from llama_ft.runtime.ends.signals import StopSignals

JOB = str(Path(__file__).with_name("stopping_job.py"))
ACKNOWLEDGED = (
    "warning: Ctrl-C: the run finishes the current step, saves a checkpoint and exits. "
    "A second Ctrl-C exits at once without saving.\n"
)
DEADLINE_SECONDS = 120.0
SOON_SECONDS = 20.0  # on a busy machine; what the job waits for takes a minute


class Job:
    """A job that has been started; its files show what it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_alive(self) -> bool:
        raise NotImplementedError

    def press_ctrl_c(self) -> None:
        """Send what a terminal sends: a signal to every process."""
        raise NotImplementedError

    def end(self) -> int | None:
        """Wait for its end; its exit code."""
        raise NotImplementedError

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all((self.folder / name).exists() for name in names):
            assert self.is_alive() and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    @property
    def output(self) -> str:
        return self.read("output")

    @property
    def status(self) -> dict[str, object]:
        return json.loads(self.read("status.json"))


class Launched(Job):
    """Two ranks of torchrun, started as a shell would: in a process group of their own."""

    def __init__(self, folder: Path, *arguments: str, flags: tuple[str, ...] = ()) -> None:
        super().__init__(folder)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc_per_node", "2", *flags, JOB, str(folder), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
        streams: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, **streams, stdout=output, env=environment, start_new_session=True
            )

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        ranks = [int(file.read_text()) for file in self.folder.glob("process-*")]
        for group in [*ranks, self.process.pid]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.process.wait()


class Forked(Job):
    """Ranks, or one process, without torchrun."""

    def __init__(self, folder: Path, *arguments: str, ranks: int = 0) -> None:
        super().__init__(folder)
        self.running = start_forked(JOB, folder, *arguments, output=folder / "output", ranks=ranks)

    def is_alive(self) -> bool:
        return self.running.is_alive()

    def press_ctrl_c(self) -> None:
        self.running.send(signal.SIGINT)

    def end(self) -> int | None:
        return self.running.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        self.running.wait(0)


@contextmanager
def torchrun(folder: Path, *arguments: str, flags: tuple[str, ...] = ()) -> Iterator[Launched]:
    launched = Launched(folder, *arguments, flags=flags)
    try:
        yield launched
    finally:
        launched.kill()


@contextmanager
def forked(folder: Path, *arguments: str, ranks: int = 0) -> Iterator[Forked]:
    started = Forked(folder, *arguments, ranks=ranks)
    try:
        yield started
    finally:
        started.kill()


def stopped_line(running: Job, reason: str, step: str) -> str:
    checkpoint = running.folder / "checkpoints" / f"step-{int(step):06d}"
    return f"stopped by {reason} after step {step}. To resume: --resume {checkpoint}"


def test_sigterm_to_torchrun_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    with torchrun(tmp_path, "rank 0 saves longer") as running:
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


@pytest.mark.parametrize(
    ("start", "has_checkpoint"),
    [pytest.param(torchrun, False, marks=pytest.mark.slow), (forked, True)],
)
def test_a_second_ctrl_c_ends_all_ranks_without_waiting_for_the_save(
    start: Any, has_checkpoint: bool, tmp_path: Path
) -> None:
    ranks = 2 if start == torchrun else 1
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    with start(tmp_path, "saves for ever") as running:
        running.wait_for(*(f"training-{rank}" for rank in range(ranks)))
        running.press_ctrl_c()
        running.wait_for(*(f"saving-{rank}" for rank in range(ranks)))
        assert running.read("saving-0") == running.read(f"saving-{ranks - 1}")
        assert running.output.count(ACKNOWLEDGED) == 1
        started = time.monotonic()
        running.press_ctrl_c()
        running.end()
    assert time.monotonic() - started < SOON_SECONDS
    assert not list(tmp_path.glob("saved-*"))
    hint = f". To resume: --output_dir {tmp_path} --resume auto" if has_checkpoint else ""
    assert re.findall("stopped by .*", running.output) == [
        f"stopped by a second Ctrl-C, without saving{hint}"
    ]
    assert running.status["state"] == "stopped" and running.status["exit_code"] == 130


@pytest.mark.slow
def test_stop_after_ends_torchrun_with_exit_code_0_and_no_restart(tmp_path: Path) -> None:
    started = time.time()
    with torchrun(tmp_path, "", "6s", flags=("--max_restarts", "3")) as running:
        assert running.end() == 0
    assert time.time() - started > 6
    for rank in (0, 1):  # the time counts from torchrun's start, not from the end of loading
        assert -0.1 < float(running.read(f"started-{rank}")) - started < 3
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
    with forked(tmp_path, "rank 0 hangs", ranks=2) as running:
        running.wait_for("training-0", "training-1")
        killed = int(running.read("process-1"))
        started = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        assert running.end() in (1, -signal.SIGKILL)  # of the rank that ends first
    assert time.monotonic() - started < SOON_SECONDS
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
    with forked(tmp_path, way) as running:
        running.wait_for("loading-0" if way else "training-0")
        started = time.monotonic()
        running.running.send(number)
        assert running.end() == code
    assert time.monotonic() - started < SOON_SECONDS
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
    assert stopping.request() == number and not ended


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
    assert stopping.request() == 0 and not ended


def test_ranks_with_different_signals_agree_on_one() -> None:
    stopping = StopSignals()
    with stopping.between_steps("1h30m"):
        asked = stopping.request()
        assert asked == 0 and stopping.agreed(torch.tensor([0.0, 0.0])) is None
        assert stopping.agreed(torch.tensor([0.0, 0.5])) == Stop(0, "--stop_after 1h30m")
        assert stopping.agreed(torch.tensor([0.5, 15.0, 0.0])) == Stop(143, "SIGTERM")
        assert stopping.agreed(torch.tensor([2.0, 0.5])) == Stop(130, "Ctrl-C")
        assert stopping.agreed(torch.tensor([0.5, 1.0])) == Stop(129, "SIGHUP")
