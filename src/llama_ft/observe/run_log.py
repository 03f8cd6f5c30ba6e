"""Everything a run says about itself while it trains, behind one call per logged step."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.metrics import Metrics, MetricsLog, records_up_to
from llama_ft.observe.mlflow_tracker import in_thread
from llama_ft.observe.progress import ProgressBar
from llama_ft.observe.trackers import Samples, Tracker, start_trackers
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
        rank: on every rank but 0 the log does nothing.
        resume_step: optimizer steps of the checkpoint that is resumed from; None for a new run.
        resumed_dir: the directory of the run that is resumed, where it is another one.
        tracker_ids: of the run that is resumed, as its checkpoint has them. Without them, or in another directory, this
            one is a new run for the trackers, with the earlier steps in it.

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
        self._trackers, self._failed_trackers = list[Tracker](), list[Tracker]()
        self._last_step, self._progress_shown = resume_step or 0, False
        if not self._is_main:
            return
        self._trackers = start_trackers(tracking, output_dir, resolved, resume_step, self.tracker_ids)
        for tracker in self._trackers:
            self.tracker_ids |= tracker.ids
        earlier = None if resumed_dir is None else resumed_dir / METRICS_FILE
        self._metrics_log = MetricsLog(output_dir / METRICS_FILE, resume_step, earlier)
        self._open.callback(self._metrics_log.close)
        self._progress = ProgressBar(total_steps, self._last_step)
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
                _warn(tracker, "could not be closed.", failure)
        for tracker in self._failed_trackers:
            with contextlib.suppress(Exception):  # that this one is broken has been reported
                tracker.finish(1, stopped)

    def training(self) -> contextlib.ExitStack:
        """The block in which steps are logged: its end closes the progress bar and metrics.jsonl, not the trackers."""
        return self._open

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics.jsonl and tell the trackers and the screen.

        Args:
            step: optimizer steps done.
            metrics: keys of metrics.jsonl, without `step`; of a step with an evaluation eval/loss and eval/perplexity
                too, since a step has one line.
        """
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

    def log_samples(self, samples: Samples) -> None:
        """Show the answers before and after fine-tuning in the trackers."""
        # An answer that was cut short may end with half a character, which UTF-8 does not have.
        whole = [{key: text.encode("utf-8", "replace").decode() for key, text in it.items()} for it in samples]
        for tracker in self._trackers if samples else ():
            try:
                tracker.log_samples(whole, self._last_step)
            except Exception as error:
                _warn(tracker, "has no samples; facts.json has them.", error)

    def log_result(self, folder: Path, outcome: Mapping[str, Any], base_model: str, seconds: float) -> None:
        """Give the final model or adapter to the trackers that were asked to take it, in so many seconds. What fails is
        reported, and the run goes on.

        Args:
            folder: where it is.
            outcome: of training: `weights_of`, whose step's weights these are, and `best_step`, where the validation
                loss was lowest; 0 where there was none.
            base_model: what was fine-tuned.
            seconds: how long this may take for all.
        """
        takers = [tracker for tracker in self._trackers if tracker.takes_result]
        step, best_step = outcome["weights_of"], outcome["best_step"]
        result = folder, step, step == best_step > 0, mask_secrets(base_model)
        for tracker in takers:
            try:
                in_thread(partial(tracker.log_result, *result)).result(seconds / len(takers))
            except Exception as error:
                _warn(tracker, f"did not take the result, which is in {folder}.", error)

    def _log_to_trackers(self, step: int, metrics: Metrics) -> None:
        self._last_step = step
        for tracker in list(self._trackers):
            try:
                tracker.log(metrics, step)
            except Exception as error:  # whatever it is: a plot is not worth a training run
                self._trackers.remove(tracker)
                self._failed_trackers.append(tracker)
                _warn(tracker, f"failed at step {step} and gets no more metrics; metrics.jsonl goes on.", error)


def _warn(tracker: Tracker, what: str, error: Exception) -> None:
    log.warning(f"{tracker.name} {what} ({mask_secrets(reason(error))})")
