"""How fast rows are tokenized: a bar on a terminal, now and then a line in a log file, and a last one in both."""

import logging
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llama_ft.runtime.console import console, log

SECONDS_BETWEEN_LINES = 10.0


class Rate:
    """Counts rows and tokens while they are made; a context manager. It speaks where the logger does, on rank 0.

    Args:
        processes: that tokenize.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._rows = self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if console.is_terminal and log.isEnabledFor(logging.INFO):
            # Of how many rows nobody knows before they are read: the bar only shows that it goes on.
            columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=10), TimeElapsedColumn()
            self._bar = Progress(*columns, console=console, refresh_per_second=2, transient=True)
            self._task = self._bar.add_task("tokenizing", total=None)
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            log.info(f"tokenized {self._line()}")

    def update(self, rows: int, tokens: int) -> None:
        """So many more are done."""
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        if self._bar is not None:
            per_second = self._tokens / (time.monotonic() - self._started)
            brief = f"tokenizing: {self._rows:,} rows  {per_second:,.0f} tokens/s"
            self._bar.update(self._task, description=brief)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            log.info(f"tokenizing: {self._line()}")

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 0.001)
        where = f" on {self._processes} processes" if self._processes > 1 else ""
        return (
            f"{self._rows:,} rows, {self._tokens:,} tokens in {seconds:.1f} s: "
            f"{self._rows / seconds:,.0f} rows/s, {self._tokens / seconds:,.0f} tokens/s{where}"
        )
