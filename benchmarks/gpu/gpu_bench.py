"""Directories, time limits and processes of gpu_check.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "src"))

import psutil

from benchmarks.gpu.gpu_image_model import make_chats, make_image_model
from benchmarks.gpu.gpu_models import (
    DEVICE,
    PUBLISHED,
    TINY,
    make_answers,
    make_architecture,
    make_model,
    make_pairs,
    make_published,
    make_samples,
)

RECIPES = REPOSITORY / "recipes"
ON_GPU = DEVICE == "cuda"
NO_TIME = "left out: too little time"
LORA = ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0"]
# The first case of a process also imports torch and starts CUDA: 10 to 20 s from a cold disk.
SECONDS_TO_IMPORT = 60.0
SECONDS_PER_CASE = 60.0
POLL_SECONDS = 0.1
SECONDS_TO_DIE = 5.0  # after SIGKILL; a process may wait for the GPU's driver for longer
MOST_KEPT = 6000  # characters of each stream of a failed case


class Row(NamedTuple):
    """A line of the table."""

    check: str
    claim: str
    expected: str
    found: str
    ok: bool | None  # None: left out


class Case(NamedTuple):
    """A finished case of `Bench.run`."""

    name: str
    error: str  # "" if it finished; NO_TIME; or the last line of what it printed


class Bench:
    """Where files are, and the seconds that are left.

    Args:
        output: small files: the table, what failed cases printed, profiles.
        scratch: models, samples and runs. Another command with the same directory finds the models.
        seconds: after these no case starts, and the running one is killed.
    """

    def __init__(self, output: Path, scratch: Path, seconds: float) -> None:
        self.output = output
        self.scratch = scratch
        self._until = time.monotonic() + seconds
        self.records: dict[str, dict[str, Any]] = {}  # by finished case; see gpu_child.py
        self.printed: dict[str, str] = {}  # by failed case
        output.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def tiny(self, model: str = "", samples: str = "tokens") -> list[str]:
        """Return flags of a tiny model and samples.

        Args:
            model: a key of ARCHITECTURES or PUBLISHED, "images", or "" for a plain Llama.
            samples: tokens (of uneven length), pairs of responses, answers, rated (answers), chats
                (about images).
        """
        folder = self.scratch / (f"tiny-{model}" if model else "tiny")
        if model == "images":
            make_image_model(folder)
        elif model in PUBLISHED:
            make_published(folder, model)
        elif model:
            make_architecture(folder, model)
        else:
            make_model(folder, TINY)
        file = self.scratch / f"{samples}.jsonl"
        match samples:
            case "tokens":
                make_samples(file, [20 + 37 * number % 200 for number in range(64)])
            case "pairs":
                make_pairs(file, 64)
            case "answers" | "rated":
                make_answers(file, 160, are_rated=samples == "rated")
            case "chats":
                file = make_chats(self.scratch / "chats", 120)
        common = "--lr 1e-3 --no_plan --context_length 256 --batch_size_training 2"
        saving = "--save_model false --overwrite"
        data = ["--model_name", str(folder), "--dataset", str(file)]
        return [*data, *common.split(), *saving.split()]

    def run(
        self,
        cases: dict[str, list[str]],
        recipe: str = "finetuning",
        toggle: str = "",
        needs: float = 10.0,
        limit: float = SECONDS_PER_CASE,
    ) -> Iterator[Case]:
        """Run a recipe with the flags of each case, as many as possible in one process, and yield
        each case as soon as it has ended. After a case that fails, the others run in a new process:
        a CUDA error makes all later calls of its process fail.

        Args:
            cases: flags by name.
            recipe: a file in recipes/, or a part of gpu_kernels.PARTS, whose cases have no flags.
            toggle: a key of gpu_child.TOGGLES.
            needs: no case starts if fewer seconds are left.
            limit: a case that takes more seconds is killed, and counts as failed.
        """
        left = dict(cases)
        while left and self.seconds_left > needs:
            yield from self._run_in_one_process(left, recipe, toggle, needs, limit)
        for name in left:
            yield Case(name, NO_TIME)

    def _run_in_one_process(
        self, left: dict[str, list[str]], recipe: str, toggle: str, needs: float, limit: float
    ) -> Iterator[Case]:
        """Run cases until one fails or the time is up. Cases that have ended are removed from
        `left`."""
        case_file = self.scratch / "cases.json"
        done_file = self.scratch / "done.jsonl"
        streams = [self.scratch / "stdout.log", self.scratch / "stderr.log"]
        case_file.write_text(json.dumps(left))
        done_file.write_text("")
        script = str(REPOSITORY / "benchmarks" / "gpu_check.py")
        command = [sys.executable, script, "--child", str(case_file)]
        command += ["--recipe", recipe, "--toggle", toggle]
        with open(streams[0], "wb") as stdout, open(streams[1], "wb") as stderr:
            child = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        printed = [0, 0]  # bytes of each stream that belong to earlier cases
        deadline = time.monotonic() + SECONDS_TO_IMPORT + limit
        done = 0
        try:
            while left:
                name = next(iter(left))
                has_ended = child.poll() is not None  # before the file is read
                lines = done_file.read_text().split("\n")[:-1]  # what follows is being written
                if len(lines) > done:
                    record = json.loads(lines[done])
                    self.records[name] = record
                    printed = record["printed"]
                    done += 1
                    del left[name]
                    deadline = time.monotonic() + limit
                    yield Case(name, "")
                    if self.seconds_left < needs:
                        return
                elif self.seconds_left < 0:
                    texts = [_read_from(*each) for each in zip(streams, printed, strict=True)]
                    self.keep(name, NO_TIME, *texts)
                    del left[name]
                    yield Case(name, NO_TIME)
                    return
                elif has_ended or time.monotonic() > deadline:
                    problem = f"exit code {child.returncode}" if has_ended else f"over {limit:g} s"
                    texts = [_read_from(*each) for each in zip(streams, printed, strict=True)]
                    self.keep(name, problem, *texts)
                    del left[name]
                    yield Case(name, f"{problem}: {last_line(texts[1].strip() or texts[0])}")
                    return
                else:
                    time.sleep(POLL_SECONDS)
        finally:
            end_processes(child)

    def run_command(self, name: str, command: list[str], limit: float) -> tuple[int | None, str]:
        """Run a command, with all that it starts.

        Returns:
            Its exit code, or None if it was killed after `limit` seconds or when the time was up;
            and what it printed.
        """
        log = self.scratch / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        exit_code = None
        try:
            exit_code = process.wait(timeout=max(1.0, min(limit, self.seconds_left)))
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_processes(process)
        return exit_code, log.read_text(errors="replace")

    def keep(self, name: str, problem: str, stdout: str, stderr: str = "") -> None:
        """Append what a failed case has printed to failed.log."""
        self.printed[name] = f"{stdout}\n{stderr}".strip()
        parts = [f"=== {name}: {problem}", "--- stdout", stdout[-MOST_KEPT:]]
        parts += ["--- stderr", stderr[-MOST_KEPT:], ""]
        with open(self.output / "failed.log", "a") as file:
            file.write("\n".join(parts))

    def guarded(self, part: str, claim: str, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield lines. An exception is one of them: what follows runs all the same."""
        try:
            yield from rows
        except Exception as error:
            self.keep(f"{part} {claim}", "exception in gpu_check.py", "", traceback.format_exc())
            yield Row(part, claim, "no exception", last_line(repr(error)), False)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl that are steps."""
        text = (self.scratch / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if "train/loss" in line]

    def losses(self, name: str) -> list[float]:
        """Return the loss of each step of a run."""
        return [line["train/loss"] for line in self.steps(name)]

    def remove_run(self, name: str) -> None:
        """Delete a run's directory: its checkpoints may take tens of GB."""
        shutil.rmtree(self.scratch / name, ignore_errors=True)


def _read_from(file: Path, start: int) -> str:
    with open(file, "rb") as opened:
        opened.seek(start)
        return opened.read().decode(errors="replace")


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with start_new_session, its session, and what it has started
    in other sessions: torchrun starts each rank in one."""
    end_descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_DIE)


def end_descendants(process_id: int) -> None:
    """Kill all processes that a process has started, directly or not."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        descendants = psutil.Process(process_id).children(recursive=True)
    for descendant in descendants:
        with suppress(psutil.Error):
            descendant.kill()


def left_out(part: str, claim: str) -> Row:
    """Return the line of a case for which there was no time."""
    return Row(part, claim, "", NO_TIME, None)


def failed_row(part: str, expected: str, case: Case) -> Row:
    """Return the line of a case that did not finish."""
    if case.error == NO_TIME:
        return left_out(part, case.name)
    return Row(part, case.name, expected, case.error, False)


def last_line(text: str) -> str:
    """Return the last line of what a process has printed, for the table."""
    lines = text.strip().splitlines() or ["nothing was printed"]
    return lines[-1].strip().replace("|", "/")[-200:]
