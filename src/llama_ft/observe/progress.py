"""How far a run is: a bar on a terminal, now and then a line in a log file."""

import math
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llama_ft.observe.metrics import Metrics
from llama_ft.runtime.console import console as rank0_console

WIDE_COLUMNS = 110  # terminals from here on have room for everything
SPEED_WINDOW_SECONDS = 300.0  # steps take much the same time; rich's own 30 s hold no two steps of a big model


class ProgressBar:
    """Shows step, losses, learning rate and speed; a context manager. For rank 0 only.

    Where the console, above whose bar log lines appear, is no terminal, the first and the last update are printed and,
    between them, one every so many seconds. A resumed run has `steps_done` already.
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
        self._console, self._seconds_between_lines = console, seconds_between_lines
        self._last_line_at, self._waiting_line = -math.inf, ""
        self._latest: Metrics = {}
        self._validation = ""
        self._wide = wide = console.width >= WIDE_COLUMNS
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                *(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=30 if wide else 10)),
                TextColumn("{task.fields[numbers]}", markup=False),
                *([TimeElapsedColumn()] if wide else []),
                *(TextColumn("left"), TimeRemainingColumn()),
                console=console,
                speed_estimate_period=SPEED_WINDOW_SECONDS,
                refresh_per_second=2,  # each refresh takes the interpreter from the training thread
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=steps_done, numbers="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._waiting_line:  # a run that ended early has not printed its last step yet
            self._console.print(self._waiting_line)

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that `step` is done. `metrics` has the keys of metrics.jsonl; what is missing is left out."""
        self._latest = metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._numbers())
            return
        self._waiting_line = "  ".join([f"step {step}/{self.total_steps}", *_describe(metrics)])
        if time.monotonic() - self._last_line_at >= self._seconds_between_lines or step >= self.total_steps:
            self._console.print(self._waiting_line)
            self._last_line_at, self._waiting_line = time.monotonic(), ""

    def note_evaluation(self, step: int, loss: float, perplexity: float) -> None:
        """Print the validation loss after `step` as a line of its own, and keep it beside the bar."""
        self._validation = f"{'held-out' if self._wide else 'val'} {_number(loss, 3)}"
        numbers = f"held-out loss {_number(loss, 3)}  perplexity {_number(perplexity, 2)}"
        self._console.print(f"step {step}/{self.total_steps}  {numbers}")
        if self._bar is not None:
            self._bar.update(self._task, numbers=self._numbers())

    def _numbers(self) -> str:
        first, *rest = _describe(self._latest, brief=not self._wide) or [""]
        return "  ".join(part for part in (first, self._validation, *rest) if part)


def _describe(metrics: Metrics, brief: bool = False) -> list[str]:
    """The numbers that are there; `brief` has no more than an 80-column terminal has room for."""
    has_mfu = "perf/mfu" in metrics
    shown: dict[str, Callable[[Any], str]] = {
        "train/loss": lambda loss: f"loss {_number(loss, 3)}",
        "train/lr": lambda lr: f"lr {lr:.1e}",
        "train/grad_norm": lambda norm: f"grad_norm {_number(norm, 2)}",
        "perf/tokens_per_second": lambda speed: f"{speed:,.0f} {'tok/s' if brief else 'tokens/s'}",
        f"perf/{'mfu' if has_mfu else 'matmul_utilization'}": lambda it: f"{'MFU' if has_mfu else 'matmul'} {it:.0%}",
        "perf/step_seconds": lambda s: f"{s:.1f} s/step" if s >= 1 else f"{s * 1000:.0f} ms/step",
    }
    keys = ("train/loss", "perf/tokens_per_second") if brief else tuple(shown)
    return [shown[key](metrics[key]) for key in keys if key in metrics]


def _number(value: float, digits: int) -> str:
    """Fixed digits while they say something: 6.213, but 4.1e-04 and 3.2e+07; nan and inf as they are."""
    return f"{value:.{digits}f}" if value == 0 or 10**-digits <= abs(value) < 1e6 else f"{value:.1e}"
