"""How far a run is: a bar on a terminal, now and then a line in a log file."""

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from llama_ft.observe.metrics import Metrics
from llama_ft.runtime.console import console as rank0_console

WIDE_COLUMNS = 110  # terminals from here on have room for everything
SPEED_WINDOW_SECONDS = 300.0  # steps take much the same time; rich's own 30 s hold no two steps of a big model


class ProgressBar:
    """Shows step, losses, learning rate and speed; a context manager. For rank 0 only.

    Args:
        total_steps: the last step of the run.
        steps_done: steps a resumed run had already done.
        console: where to; log lines through the same console appear above the bar.
        seconds_between_lines: where there is no terminal, the first and the last update are printed and, between
            them, one every so many seconds.
    """

    def __init__(
        self,
        total_steps: int,
        steps_done: int = 0,
        *,
        console: Console = rank0_console,
        seconds_between_lines: float = 2.0,
    ) -> None:
        self.total_steps = total_steps
        self._console = console
        self._seconds_between_lines = seconds_between_lines
        self._last_line_at = -math.inf
        self._waiting_line: str | None = None
        self._latest: Metrics = {}
        self._evaluation_loss: float | None = None
        self._bar = _make_bar(console) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("train", total=total_steps, completed=steps_done, numbers="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._waiting_line is not None:  # a run that ended early has not printed its last step yet
            self._print_line(self._waiting_line)

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that `step` is done. `metrics` has the keys of metrics.jsonl; what is missing is left out."""
        self._latest = metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._numbers_beside_bar())
            return
        line = "  ".join([f"step {step}/{self.total_steps}", *_describe(metrics)])
        due = time.monotonic() - self._last_line_at >= self._seconds_between_lines
        if due or step >= self.total_steps:
            self._print_line(line)
        else:
            self._waiting_line = line

    def note_evaluation(self, step: int, loss: float, perplexity: float) -> None:
        """Print the held-out loss after `step` as a line of its own, and keep it beside the bar."""
        self._evaluation_loss = loss
        numbers = f"held-out loss {_number(loss, 3)}  perplexity {_number(perplexity, 2)}"
        self._console.print(f"step {step}/{self.total_steps}  {numbers}")
        if self._bar is not None:
            self._bar.update(self._task, numbers=self._numbers_beside_bar())

    def _print_line(self, line: str) -> None:
        self._console.print(line)
        self._last_line_at = time.monotonic()
        self._waiting_line = None

    def _numbers_beside_bar(self) -> str:
        wide = self._console.width >= WIDE_COLUMNS
        parts = _describe(self._latest, brief=not wide)
        if self._evaluation_loss is not None:
            name = "held-out" if wide else "val"
            parts.insert(1, f"{name} {_number(self._evaluation_loss, 3)}")
        return "  ".join(parts)


def _make_bar(console: Console) -> RichProgress:
    wide = console.width >= WIDE_COLUMNS
    return RichProgress(
        *(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=30 if wide else 10)),
        TextColumn("{task.fields[numbers]}", markup=False),
        *([TimeElapsedColumn()] if wide else []),
        *(TextColumn("left"), TimeRemainingColumn()),
        console=console,
        speed_estimate_period=SPEED_WINDOW_SECONDS,
        refresh_per_second=2,  # each refresh takes the interpreter from the training thread
    )


def _describe(metrics: Metrics, brief: bool = False) -> list[str]:
    """The numbers that are there; `brief` has no more than an 80-column terminal has room for."""
    values = {key: value for key, value in metrics.items() if not isinstance(value, Sequence)}
    utilization = "perf/mfu" if "perf/mfu" in values else "perf/matmul_utilization"
    shown: dict[str, Callable[[float], str]] = {
        "train/loss": lambda loss: f"loss {_number(loss, 3)}",
        "train/lr": lambda lr: f"lr {lr:.1e}",
        "train/grad_norm": lambda norm: f"grad_norm {_number(norm, 2)}",
        "perf/tokens_per_second": lambda speed: f"{speed:,.0f} {'tok/s' if brief else 'tokens/s'}",
        utilization: lambda share: f"{'MFU' if utilization == 'perf/mfu' else 'matmul'} {share:.0%}",
        "perf/step_seconds": lambda s: f"{s:.1f} s/step" if s >= 1 else f"{s * 1000:.0f} ms/step",
    }
    keys = ("train/loss", "perf/tokens_per_second") if brief else tuple(shown)
    return [shown[key](values[key]) for key in keys if key in values]


def _number(value: float, digits: int) -> str:
    """Fixed digits while they say something: 6.213, but 4.1e-04 and 3.2e+07; nan and inf as they are."""
    return f"{value:.{digits}f}" if value == 0 or 10**-digits <= abs(value) < 1e6 else f"{value:.1e}"
