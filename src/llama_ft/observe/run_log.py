"""Log each step to metrics.jsonl, the trackers and the progress bar with one call."""

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_ft.config.settings.output_settings import TrackingConfig
from llama_ft.errors import plural, reason
from llama_ft.masking import mask_secrets
from llama_ft.observe.progress import ProgressBar
from llama_ft.observe.trackers import Tracker, start_trackers
from llama_ft.processes import replace_text
from llama_ft.runtime.console import log

METRICS_FILE = "metrics.jsonl"
Metrics = Mapping[str, float | Sequence[float]]  # a sequence holds one value per rank


@dataclass(frozen=True)
class ResumedLog:
    """The log of the run that a run resumes.

    Attributes:
        step: optimizer steps of the resumed checkpoint.
        directory: of the resumed run.
        tracker_ids: run ids of the trackers from the checkpoint. Without them, or if the new run
            has another directory, the trackers start a new run.
    """

    step: int
    directory: Path
    tracker_ids: Mapping[str, str]


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """metrics.jsonl, trackers and progress of one run; a context manager.

    Leaving the block closes all of them. An exception marks the run as failed in the trackers, or
    as stopped if it has an `exit_code`. Of a resumed run, the trackers also get earlier steps that
    they lack.

    Args:
        output_dir: the run's directory, which must exist.
        tracking: which trackers to start.
        resolved: the run's configuration as plain values, for the trackers.
        total_steps: the last step of the run.
        rank: the log works on rank 0 and does nothing on other ranks.
        resumed: the log of the resumed run; None for a new run.

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
        resumed: ResumedLog | None = None,
    ) -> None:
        resume_step = None
        source = None
        self.tracker_ids = dict[str, str]()
        if resumed is not None:
            resume_step = resumed.step
            if resumed.directory.resolve() == output_dir.resolve():
                self.tracker_ids = dict(resumed.tracker_ids)
            else:
                source = resumed.directory / METRICS_FILE
        self._is_main = rank == 0
        self._trackers = list[Tracker]()
        if not self._is_main:
            return
        self._trackers = start_trackers(
            tracking, output_dir, resolved, resume_step, self.tracker_ids
        )
        for tracker in self._trackers:
            if tracker.run_id:
                self.tracker_ids[tracker.key] = tracker.run_id
        path = output_dir / METRICS_FILE
        self._metrics_log = MetricsLog(path, resume_step, source)
        self._progress = ProgressBar(total_steps, resume_step or 0, is_quiet=tracking.quiet)
        if self._trackers:
            self._log_earlier_steps(path)

    def add_tracker(self, tracker: Tracker) -> None:
        """Add a tracker on rank 0. It gets the steps from now on."""
        self._trackers.append(tracker)

    def _log_earlier_steps(self, path: Path) -> None:
        """Give the steps of metrics.jsonl to the trackers that lack them."""
        for line in path.read_text().splitlines():
            metrics: dict[str, Any] = json.loads(line)
            step = metrics.pop("step")
            for key, value in metrics.items():
                if value is None:  # JSON has no NaN
                    metrics[key] = math.nan
            self._log_to_trackers(step, metrics)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_main:
            self._metrics_log.close()
        # set if the run was asked to stop; such a run can be resumed
        stop_code = getattr(error, "exit_code", None)
        is_stopped = stop_code is not None
        if stop_code is not None:
            exit_code = stop_code
        else:
            exit_code = 0 if error is None else 1
        for tracker in self._trackers:
            with _continue_without(tracker, "could not be closed."):
                tracker.finish(exit_code, stopped=is_stopped)

    def training(self) -> contextlib.AbstractContextManager[object]:
        """Show the progress bar during the block, in which steps are logged."""
        return self._progress if self._is_main else contextlib.nullcontext()

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics.jsonl after `step` optimizer steps, and pass it to trackers and
        progress bar. After an evaluation, `metrics` also holds eval/loss and related keys, because
        a step has only one line."""
        if self._is_main:
            self._metrics_log.write({"step": step, **metrics})
            self._log_to_trackers(step, metrics)
            self._progress.update(step, metrics)

    def log_result(
        self,
        folder: Path,
        outcome: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Upload the final model or adapter in `folder` to the trackers that want it, in at most
        `seconds`. A failure is only a warning. `outcome` has `weights_of`, the step of these
        weights, and `best_step`."""
        step = outcome["weights_of"]
        best_step = outcome["best_step"]  # 0 without a validation loss
        is_best = best_step > 0 and step == best_step
        failure = f"did not accept the final model, which is in {folder}."

        def upload() -> None:
            for tracker in self._trackers:
                if tracker.uploads_result:
                    with _continue_without(tracker, failure):
                        tracker.log_result(folder, step, is_best)

        # in a thread: an upload cannot be interrupted, but a daemon ends with the process
        thread = threading.Thread(target=upload, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            late = f"The final model was not uploaded within {seconds:.0f} s"
            log.warning(f"{late}; it is in {folder}.")

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
    except Exception as error:  # any error: a plot is not worth a training run
        tracker.has_failed = True
        log.warning(f"{tracker.name} {what} ({mask_secrets(reason(error))})")


class MetricsLog:
    """Appends records to a file of JSON lines.

    Lines of an earlier attempt after the resumed step are removed, including a line that a kill cut
    short. So the file has each step once. Steps only grow, so the lines to keep are the beginning
    of the file. One system call truncates the rest: a kill leaves either the old or the new file.

    Args:
        path: the file.
        resume_step: keep the lines up to this step; None for a new run, which keeps none.
        source: metrics.jsonl of the resumed run, if it is another file: its lines are copied.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None = None,
        source: Path | None = None,
    ) -> None:
        earlier = source if source is not None and source.is_file() else path
        last_step = -1 if resume_step is None else resume_step
        lines = list[bytes]()
        corrupted = 0
        if earlier.exists():
            lines, corrupted = _lines_up_to(earlier, last_step)
        if corrupted:
            what = f"{earlier}: {plural(corrupted, 'line')} of earlier steps cannot be read"
            log.warning(f"{what}, so the plots lack these steps.")
        if corrupted or earlier != path:  # at once, so that no reader sees later steps
            replace_text(path, b"".join(lines).decode())
        kept_bytes = sum(len(line) for line in lines)
        self._file = path.open("ab")
        self._file.truncate(kept_bytes)

    def write(self, record: Metrics) -> None:
        """Append `record` as one line and flush it. Infinities and NaN become null, because JSON
        does not have them."""
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        self._file.write(json.dumps(finite).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        self._file.close()


def _lines_up_to(path: Path, last_step: int) -> tuple[list[bytes], int]:
    """Return the lines up to a step, and the number of unreadable lines between them. Unreadable
    lines at the end were left by a kill."""
    lines = list[bytes]()
    corrupted = 0
    unreadable = 0  # since the last line that was kept
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = json.loads(line.decode("ascii"))["step"]
            is_kept = line.endswith(b"\n") and step <= last_step
        except (ValueError, TypeError, LookupError, RecursionError):
            unreadable += 1
            continue
        if is_kept:
            lines.append(line)
            corrupted += unreadable
            unreadable = 0
    return lines, corrupted


def one_series_per_rank(metrics: Metrics) -> dict[str, float]:
    """Return `metrics` with each list split into memory/host_peak_bytes/rank0, .../rank1, ... and
    their .../max."""
    series: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Sequence):
            for rank, number in enumerate(value):
                series[f"{name}/rank{rank}"] = number
            series[f"{name}/max"] = max(value)
        else:
            series[name] = value
    return series
