"""Everything a run says about itself while it trains, behind one call per logged step."""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.metrics import Metrics, MetricsLog, records_up_to
from llama_ft.observe.progress import ProgressBar
from llama_ft.observe.trackers import Tracker, start_trackers
from llama_ft.runtime.console import log

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """metrics.jsonl, trackers and progress of one run; a context manager.

    The block's end closes all of it; an exception that leaves the block marks the run as failed in the trackers, or,
    where it has an `exit_code`, as stopped. Trackers get those of a resumed run's earlier steps that they lack.

    Args:
        output_dir: the run's directory, which must exist.
        tracking: which trackers to start.
        resolved: the run's configuration as plain values, for the trackers.
        total_steps: the last step of the run.
        rank: on every rank but 0 the log does nothing.
        resume_step: optimizer steps of the checkpoint that is resumed from; None for a new run.
        resumed_dir: the directory of the run that is resumed, where it is another one.
        tracker_ids: of the run that is resumed, as its checkpoint has them. Without them, or in another directory, this
            is a new run for the trackers.

    Raises:
        UserError: a tracker cannot start.
    """

    def __init__(
        self,
        output_dir: Path,
        tracking: TrackingConfig,
        resolved: dict[str, Any],
        total_steps: int,
        rank: int = 0,
        resume_step: int | None = None,
        resumed_dir: Path | None = None,
        tracker_ids: Mapping[str, str] | None = None,
    ) -> None:
        branches_off = resumed_dir is not None and resumed_dir.resolve() != output_dir.resolve()
        self.tracker_ids = {} if branches_off else dict(tracker_ids or {})
        self._is_main = rank == 0
        self._open = contextlib.ExitStack()
        self._trackers, self._failed = list[Tracker](), set[str]()
        self._progress_shown = False
        if not self._is_main:
            return
        self._trackers = start_trackers(tracking, output_dir, resolved, resume_step, self.tracker_ids)
        for tracker in self._trackers:
            self.tracker_ids |= tracker.ids
        earlier = None if resumed_dir is None else resumed_dir / METRICS_FILE
        self._metrics_log = MetricsLog(output_dir / METRICS_FILE, resume_step, earlier)
        self._open.callback(self._metrics_log.close)
        self._progress = ProgressBar(total_steps, resume_step or 0)
        if self._trackers and resume_step is not None:
            for step, metrics in records_up_to(output_dir / METRICS_FILE, resume_step):
                self._log_to_trackers(step, metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._open.close()  # the bar first, so that what trackers have to say comes below it
        code = getattr(error, "exit_code", None)  # of a run that was asked to stop, and so can be resumed
        stopped = isinstance(code, int)
        for tracker in self._trackers:
            try:
                tracker.finish(code if isinstance(code, int) else int(error is not None), stopped)
            except Exception as failure:
                if tracker.name not in self._failed:
                    _warn(tracker, "could not be closed.", failure)

    def training(self) -> contextlib.ExitStack:
        """The block in which steps are logged: its end closes the progress bar and metrics.jsonl, not the trackers."""
        return self._open

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics.jsonl after `step` optimizer steps, and tell the trackers and the screen.
        `metrics` also has eval/loss and eval/perplexity after an evaluation, since a step has one line."""
        if not self._is_main:
            return
        self._metrics_log.write({"step": step, **metrics})
        self._log_to_trackers(step, metrics)
        if not self._progress_shown:  # not earlier: its clock is the training's, not the loading's
            self._open.enter_context(self._progress)
            self._progress_shown = True
        if "train/loss" in metrics:
            self._progress.update(step, metrics)
        loss, perplexity = metrics.get("eval/loss"), metrics.get("eval/perplexity")
        if isinstance(loss, float) and isinstance(perplexity, float):
            self._progress.note_evaluation(step, loss, perplexity)

    def log_result(self, folder: Path, outcome: Mapping[str, Any], seconds: float) -> None:
        """Give the final model or adapter in `folder` to the trackers that were asked to take it, within `seconds`;
        what fails is a warning. `outcome` has `weights_of`, whose step's weights these are, and `best_step`."""
        step, best_step = outcome["weights_of"], outcome["best_step"]

        def give(tracker: Tracker) -> None:
            try:
                tracker.log_result(folder, step, step == best_step > 0)
                log.info(f"{tracker.name} has {folder}.")
            except Exception as error:
                _warn(tracker, f"did not take the result, which is in {folder}.", error)

        takers = [tracker for tracker in self._trackers if tracker.takes_result]
        for tracker in takers:
            thread = threading.Thread(target=give, args=(tracker,), daemon=True)
            thread.start()
            thread.join(seconds / len(takers))
            if thread.is_alive():
                log.warning(f"{tracker.name} did not take the result in time; it is in {folder}.")

    def _log_to_trackers(self, step: int, metrics: Metrics) -> None:
        for tracker in self._trackers:
            if tracker.name not in self._failed:
                try:
                    tracker.log(metrics, step)
                except Exception as error:  # whatever it is: a plot is not worth a training run
                    self._failed.add(tracker.name)
                    _warn(tracker, f"failed at step {step} and gets no more metrics; metrics.jsonl goes on.", error)


def _warn(tracker: Tracker, what: str, error: Exception) -> None:
    log.warning(f"{tracker.name} {what} ({mask_secrets(reason(error))})")
