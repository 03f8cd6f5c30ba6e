"""Progress of a run: a bar on a terminal, or occasional lines in a log file."""

import re
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llama_ft.runtime.console import console as rank0_console

FORMATS = {
    "train/loss": "loss {:.4g}",
    "train/reward": "reward {:.4g}",
    "train/rewards/margins": "margin {:.3g}",
    "train/lr": "lr {:.1e}",
    "train/grad_norm": "grad_norm {:.3g}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.0%}",
    "perf/matmul_utilization": "{:.0%} of the matmul rate",
    "perf/step_seconds": "{:.3g} s/step",
}
# Shown with a validation loss, with two digits after the point.
VALIDATION_NAMES = {
    "eval/perplexity": "perplexity",
    "eval/rewards/accuracies": "accuracy",
    "eval/score": "score",
    "eval/reward": "mean reward",
}
OF_A_SET = re.compile(r"eval/(\w+)/(loss|score)")  # a validation set with a name
# Keys with another beginning were added in the recipe, and are shown as they are.
NAMESPACES = ("train/", "eval/", "perf/", "memory/")
FIRST_LINES = 10  # in a log file, each of the first steps has a line
# Then seconds between lines: 10 during the first 600 seconds, 60 later. A run of 10 hours prints
# 640 lines.
SECONDS_BETWEEN_LINES = 10.0
FREQUENT_SECONDS = 600.0
SECONDS_BETWEEN_LATER_LINES = 60.0
# width of the bar and the step count; numbers that do not fit the terminal are cut off
OTHER_COLUMNS = 45


class ProgressBar:
    """Shows step, losses, learning rate and speed; a context manager for rank 0 only.

    On a terminal it is a bar below the log lines. Otherwise it prints a line for the first ten
    updates and the last one, and fewer lines in between. A resumed run starts at `steps_done`. If
    `is_quiet`, only evaluations are shown.
    """

    def __init__(
        self,
        total_steps: int,
        steps_done: int = 0,
        console: Console = rank0_console,
        is_quiet: bool = False,
    ) -> None:
        self._total_steps = total_steps
        self._console = console
        self._has_lines = not (console.is_terminal or is_quiet)
        self._lines = 0
        self._began_at = console.get_time()
        self._next_line_at = 0.0
        self._validation = ""
        self._bar = Progress(
            *(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=10)),
            TextColumn("{task.fields[numbers]}", markup=False),
            *(TextColumn("left"), TimeRemainingColumn()),
            console=console,
            # rich's default, 30 s, is shorter than two steps of a large model
            speed_estimate_period=300.0,
            refresh_per_second=2,  # each refresh interrupts the training thread
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train", total=total_steps, completed=steps_done, numbers=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` is done. `metrics` has keys of metrics.jsonl; missing ones are not
        shown. A validation loss gets its own line."""
        numbers = []
        for key, text in FORMATS.items():
            if key in metrics:
                numbers.append(text.format(metrics[key]))
        for key, value in metrics.items():
            if "/" in key and not key.startswith(NAMESPACES):
                numbers.append(f"{key} {value:.4g}")
        position = f"step {step}/{self._total_steps}"
        is_last = step >= self._total_steps
        now = self._console.get_time()
        is_due = is_last or self._lines < FIRST_LINES or now >= self._next_line_at
        if self._has_lines and numbers and is_due:
            self._console.print("  ".join([position, *numbers]))
            is_early = now - self._began_at < FREQUENT_SECONDS
            seconds = SECONDS_BETWEEN_LINES if is_early else SECONDS_BETWEEN_LATER_LINES
            self._next_line_at = now + seconds
            self._lines += 1
        if "eval/loss" in metrics:
            loss = metrics["eval/loss"]
            self._validation = f"val {loss:.4g}"
            line = f"{position}  validation loss {loss:.4g}"
            for key, name in VALIDATION_NAMES.items():
                value = metrics.get(key)
                if value is not None:
                    line += f"  {name} {value:.2f}"
            for key, value in metrics.items():
                of_a_set = OF_A_SET.fullmatch(key)
                if of_a_set is not None:
                    line += f"  {of_a_set[1]} {of_a_set[2]} {value:.4g}"
            self._console.print(line)
        # after the loss, because the bar cuts off what does not fit
        shown = list(numbers)
        if self._validation:
            shown.insert(1, self._validation)
        width = max(0, self._console.width - OTHER_COLUMNS)
        line = "  ".join(shown)
        self._bar.update(self._task, completed=step, numbers=line[:width])
