"""Everything a run says about itself while it trains, behind one call per logged step."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llama_ft.config.sections import TrackingConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.observe.metrics import Metrics, MetricsLog
from llama_ft.observe.progress import Progress
from llama_ft.observe.trackers import Tracker, start_trackers
from llama_ft.runtime.console import log

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """metrics.jsonl, trackers and progress of one run; a context manager.

    The block's end closes all of it; an exception that leaves the block marks the run as failed in the trackers, or,
    where it has an `exit_code`, as stopped: it can be resumed. A tracker that does not have a resumed run's earlier
    steps (another directory, another project, the first time it is asked for, or lines a kill took away) gets them
    from metrics.jsonl.

    Args:
        output_dir: the run's directory, which must exist.
        tracking: which trackers to start.
        resolved: the run's configuration as plain values, for the trackers.
        total_steps: the last step of the run.
        enabled: False on every rank but 0: the log then does nothing.
        resume_step: optimizer steps of the checkpoint that is resumed from; None for a new run.
        resumed_dir: the directory of the run that is resumed, where it is another one.
        tracker_ids: `tracker_ids` of the run that is resumed, as its checkpoint has them. Without them, or in another
            directory, this one is a new run for W&B, with the earlier steps in it.

    Raises:
        UserError: a tracker cannot start.
    """

    def __init__(
        self,
        output_dir: Path,
        tracking: TrackingConfig,
        resolved: dict[str, Any],
        total_steps: int,
        enabled: bool = True,
        resume_step: int | None = None,
        resumed_dir: Path | None = None,
        tracker_ids: Mapping[str, str] | None = None,
    ) -> None:
        branches_off = resumed_dir is not None and resumed_dir.resolve() != output_dir.resolve()
        self.tracker_ids = {} if branches_off else dict(tracker_ids or {})
        self._enabled = enabled
        self._open = contextlib.ExitStack()
        self._trackers: list[Tracker] = []
        self._failed_trackers: list[Tracker] = []
        if not enabled:
            return
        self._trackers = start_trackers(tracking, output_dir, resolved, resume_step, self.tracker_ids)
        for tracker in self._trackers:
            self.tracker_ids |= tracker.ids
        earlier = None if resumed_dir is None else resumed_dir / METRICS_FILE
        self._metrics_log = MetricsLog(output_dir / METRICS_FILE, resume_step, earlier)
        self._open.callback(self._metrics_log.close)
        if self._trackers:
            for step, metrics in self._metrics_log.records():
                self._tell_trackers(step, metrics)
        self._progress = Progress(total_steps, resume_step or 0)
        self._progress_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()  # the bar first, so that what trackers have to say comes below it
        self._finish_trackers(_exit_code(error), stopped=_is_stop(error))

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics.jsonl and tell the trackers and the screen.

        Args:
            step: optimizer steps done.
            metrics: keys of metrics.jsonl, without `step`. When the step ended with an evaluation, eval/loss and
                eval/perplexity belong in the same call: a step has one line.
        """
        if not self._enabled:
            return
        self._metrics_log.write({"step": step, **metrics})
        self._tell_trackers(step, metrics)
        if not self._progress_shown:  # not earlier: its clock is the training's, not the loading's
            self._open.enter_context(self._progress)
            self._progress_shown = True
        if "train/loss" in metrics:
            self._progress.update(step, metrics)
        loss, perplexity = metrics.get("eval/loss"), metrics.get("eval/perplexity")
        if isinstance(loss, float) and isinstance(perplexity, float):
            self._progress.note_evaluation(step, loss, perplexity)

    def _tell_trackers(self, step: int, metrics: Metrics) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(metrics, step)
            except Exception as error:  # whatever it is: a plot is not worth a training run
                self._trackers.remove(tracker)
                self._failed_trackers.append(tracker)
                log.warning(
                    f"{tracker.name} failed at step {step} and gets no more metrics; metrics.jsonl goes on. "
                    f"({type(error).__name__}: {error})"
                )

    def _finish_trackers(self, exit_code: int, stopped: bool) -> None:
        for tracker in self._trackers:
            try:
                tracker.finish(exit_code, stopped)
            except Exception as error:
                log.warning(f"{tracker.name} could not be closed: {type(error).__name__}: {error}")
        for tracker in self._failed_trackers:
            with contextlib.suppress(Exception):  # it has been told that this one is broken
                tracker.finish(exit_code, stopped)


def _exit_code(error: BaseException | None) -> int:
    """The exit code the recipe will end with, as trackers show it."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if error is None:
        return 0
    if _is_stop(error):
        return int(error.exit_code)  # type: ignore[attr-defined]
    if isinstance(error, UserError):
        return 1 if isinstance(error, RunFailure) else 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_stop(error: BaseException | None) -> bool:
    """Whether the run was asked to stop, and so can be resumed: such an exception has the exit code in it."""
    return isinstance(getattr(error, "exit_code", None), int)
