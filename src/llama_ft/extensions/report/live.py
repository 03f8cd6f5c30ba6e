"""What a run is doing now, from its files: the time of its end, what it has cost, and what a stop
would lose."""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy

from llama_ft.config.attempts import readable_attempts
from llama_ft.extensions.report.run import Run

COMPLETE = re.compile(r"step-(\d{6,})")  # name of a complete checkpoint
RECENT_STEPS = 20
LOGS = ("metrics.jsonl", "status.json")


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest complete checkpoint of a run."""

    folder: Path
    step: int
    saved_at: float  # seconds since 1970, as all moments here


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. None stands for what its files do not say.

    Attributes:
        step, total_steps: optimizer steps.
        ranks: processes, each on a GPU of its own if there are GPUs.
        started_at: start of this launch.
        until: now, or when the run has ended.
        spent_seconds: time of all launches. Those before this one count with the time of their
            steps only.
        step_seconds: wall-clock time per step, with evaluations and checkpoints.
        left_seconds: until the last step; None if the run has ended.
        checkpoint: the newest one.
        saves_on_stop: the run saves a checkpoint when it is asked to stop.
    """

    step: int
    total_steps: int | None
    ranks: int
    started_at: float | None
    until: float
    spent_seconds: float | None
    step_seconds: float | None
    left_seconds: float | None
    checkpoint: NewestCheckpoint | None
    saves_on_stop: bool

    @property
    def unsaved_steps(self) -> int:
        """Steps since the newest checkpoint, which a kill would lose."""
        saved = self.checkpoint.step if self.checkpoint else 0
        return max(0, self.step - saved)

    def cost(self, seconds: float | None, price: float | None) -> float | None:
        """Return what all ranks cost for some seconds, at a price per rank and hour."""
        if seconds is None or price is None:
            return None
        return price * self.ranks * seconds / 3600


def progress_of(run: Run, now: float) -> Progress:
    """Return where a run is at a moment."""
    attempts = readable_attempts(run.facts)
    launch: dict[str, Any] = attempts[-1] if attempts else {}
    started_at = moment(launch.get("time"))
    is_running = run.status.get("state") == "running"
    until = now if is_running else _ended_at(run, started_at, now)
    step_seconds = _step_seconds(run)
    total = run.facts.get("total_steps")
    left_seconds = None
    if is_running and total and step_seconds is not None:
        since = now - _written_at(run.folder / "metrics.jsonl", now)
        left_seconds = max(0.0, (total - run.step) * step_seconds - since)
    spent = None
    if started_at is not None:
        spent = until - started_at + _seconds_before(run, launch["step"])
    settings = run.settings
    return Progress(
        step=run.step,
        total_steps=total,
        ranks=launch.get("ranks") or run.plan.get("world_size") or 1,
        started_at=started_at,
        until=until,
        spent_seconds=spent,
        step_seconds=step_seconds,
        left_seconds=left_seconds,
        checkpoint=newest_checkpoint(run.folder),
        saves_on_stop=bool(
            settings.get("checkpoint.save_steps") or settings.get("checkpoint.save_model")
        ),
    )


def moment(text: object) -> float | None:
    """Return seconds since 1970 of a time in facts.json."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def newest_checkpoint(run: Path) -> NewestCheckpoint | None:
    """Return the newest complete checkpoint of a run."""
    checkpoints = list[NewestCheckpoint]()
    for folder in run.glob("checkpoints/step-*"):
        name = COMPLETE.fullmatch(folder.name)
        if name is not None:
            checkpoints.append(NewestCheckpoint(folder, int(name[1]), _written_at(folder, 0.0)))
    return max(checkpoints, key=lambda checkpoint: checkpoint.step, default=None)


def _written_at(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise


def _ended_at(run: Run, started_at: float | None, now: float) -> float:
    """Return when a run has ended: it has written that, unless it has failed or was killed."""
    ended = moment(run.facts.get("ended"))
    if ended is not None and (started_at is None or ended >= started_at):
        return ended
    written = [_written_at(run.folder / name, 0.0) for name in LOGS]
    return max(written) or now


def _step_seconds(run: Run) -> float | None:
    """Return the wall-clock time per step since the first step of this launch, or else the median of
    the last steps."""
    began = run.facts.get("training_began") or {}
    began_at = moment(began.get("time"))
    logged_at = _written_at(run.folder / "metrics.jsonl", 0.0)
    if began_at is not None:
        done = run.step - began["step"]
        if done > 0 and logged_at > began_at:
            return (logged_at - began_at) / done
    if "perf/step_seconds" in run.curves:
        recent = run.curves["perf/step_seconds"].values[-RECENT_STEPS:]
        return float(numpy.median(recent))
    return None


def _seconds_before(run: Run, step: int) -> float:
    """Return the time of the steps before this launch, which are logged with or without gaps."""
    curve = run.curves.get("perf/step_seconds")
    if curve is None or not step:
        return 0.0
    earlier = curve.values[curve.steps <= step]
    return float(earlier.mean()) * step if earlier.size else 0.0
