"""What a run says about itself while it trains, behind one call per logged step: metrics.jsonl, trackers, progress."""

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_ft.config.settings import TrackingConfig
from llama_ft.errors import reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.progress import ProgressBar
from llama_ft.observe.trackers import Tracker, start_trackers
from llama_ft.runtime.console import log

METRICS_FILE = "metrics.jsonl"
Metrics = Mapping[str, float | Sequence[float]]  # a sequence has one value per rank


class RunLog(contextlib.AbstractContextManager["RunLog"]):
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
        source = None
        if resumed_dir is not None and resumed_dir.resolve() != output_dir.resolve():
            source, tracker_ids = resumed_dir / METRICS_FILE, None
        self.tracker_ids = dict(tracker_ids or {})
        self._is_main, self._trackers = rank == 0, list[Tracker]()
        if not self._is_main:
            return
        self._trackers = start_trackers(tracking, output_dir, resolved, resume_step, self.tracker_ids)
        self.tracker_ids |= {tracker.key: tracker.run_id for tracker in self._trackers if tracker.run_id}
        path = output_dir / METRICS_FILE
        self._metrics_log = MetricsLog(path, resume_step, source)
        self._progress = ProgressBar(total_steps, resume_step or 0, is_quiet=tracking.quiet)
        if self._trackers:
            for line in path.read_text().splitlines():
                record: dict[str, Any] = json.loads(line)
                finite = {key: math.nan if value is None else value for key, value in record.items() if key != "step"}
                self._log_to_trackers(record["step"], finite)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_main:
            self._metrics_log.close()
        code = getattr(error, "exit_code", None)  # of a run that was asked to stop, and so can be resumed
        for tracker in self._trackers:
            with _continue_without(tracker, "could not be closed."):
                tracker.finish(int(error is not None) if code is None else code, stopped=code is not None)

    def training(self) -> contextlib.AbstractContextManager[object]:
        """The block in which steps are logged: the progress bar is shown in it."""
        return self._progress if self._is_main else contextlib.nullcontext()

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics.jsonl after `step` optimizer steps, and tell the trackers and the screen.
        `metrics` also has eval/loss and what goes with it after an evaluation, since a step has one line."""
        if self._is_main:
            self._metrics_log.write({"step": step, **metrics})
            self._log_to_trackers(step, metrics)
            self._progress.update(step, metrics)

    def log_result(self, folder: Path, outcome: Mapping[str, Any], seconds: float) -> None:
        """Give the final model or adapter in `folder` to the trackers that were asked to take it, within `seconds`;
        what fails is a warning. `outcome` has `weights_of`, whose step's weights these are, and `best_step`."""
        step, best_step = outcome["weights_of"], outcome["best_step"]

        def give() -> None:
            for tracker in self._trackers:
                if tracker.takes_result:
                    with _continue_without(tracker, f"did not accept the final model, which is in {folder}."):
                        tracker.log_result(folder, step, step == best_step > 0)

        thread = threading.Thread(target=give, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            log.warning(f"The final model was not uploaded within {seconds:.0f} s; it is in {folder}.")

    def _log_to_trackers(self, step: int, metrics: Metrics) -> None:
        series = one_series_per_rank(metrics)
        for tracker in self._trackers:
            if step >= tracker.first_step and not tracker.has_failed:
                with _continue_without(tracker, f"failed at step {step} and gets no more metrics."):
                    tracker.log(series, step)


@contextlib.contextmanager
def _continue_without(tracker: Tracker, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it is: a plot is not worth a training run
        tracker.has_failed = True
        log.warning(f"{tracker.name} {what} ({mask_secrets(reason(error))})")


class MetricsLog:
    """Appends records to a file of JSON lines.

    What an earlier attempt logged after the step that is resumed from goes, a line cut short by a kill included, so
    that the file has each step once. Steps only grow, so what stays is the file's beginning and cutting the rest off is
    one system call: a kill leaves the file as it was or as it should be.

    Args:
        path: the file.
        resume_step: the step that is resumed from, whose lines and those before it are kept; None for a new run,
            which keeps none.
        source: metrics.jsonl of the run that is resumed, when it is another file: its lines are taken over.
    """

    def __init__(self, path: Path, resume_step: int | None = None, source: Path | None = None) -> None:
        if source is not None and source.exists():
            shutil.copyfile(source, path)
        self._file = path.open("ab")
        self._file.truncate(sum(map(len, _lines_up_to(path, -1 if resume_step is None else resume_step))))

    def write(self, record: Metrics) -> None:
        """Append `record` as one line and flush it; infinities and NaN, which JSON does not have, become null."""
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        self._file.write(json.dumps(finite).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()


def _lines_up_to(path: Path, last_step: int) -> Iterator[bytes]:
    """The lines up to the first that is of a later step or that a kill or a power cut left unreadable."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    return
            except (ValueError, TypeError, KeyError):
                return
            yield line


def one_series_per_rank(metrics: Metrics) -> dict[str, float]:
    """`metrics` with each list spread out: memory/host_peak_bytes/rank0, .../rank1 and so on, and .../max of them."""
    series: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Sequence):
            series |= {f"{name}/rank{rank}": number for rank, number in enumerate(value)}
            series[f"{name}/max"] = max(value)
        else:
            series[name] = value
    return series
