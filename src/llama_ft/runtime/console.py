"""The log of a run: one logger, which prints on rank 0 only and above the progress bar."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from llama_ft.masking import printable


class _Console(Console):
    """Removes control characters from printed text. If its output breaks (`| head`, a closed
    terminal, a full disk), it stops printing instead of ending the process."""

    def print(self, *objects: Any, **options: Any) -> None:
        safe = list[Any]()
        for printed in objects:
            if isinstance(printed, str):
                printed = printable(printed)
            elif isinstance(printed, Text):
                # the text keeps its length, so styles stay in place
                printed.plain = printable(printed.plain)
            safe.append(printed)
        super().print(*safe, **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, SystemExit):  # rich raises SystemExit after a broken pipe
            self.quiet = True
            # a later flush would fail again
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())


# rich would otherwise wrap lines, and read [x] and :x: in them as styles and emojis
console = _Console(
    file=sys.stdout,
    soft_wrap=True,
    highlight=False,
    markup=False,
    emoji=False,
)
log = logging.getLogger("llama_ft")


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        next_line = "\n" + " " * len(prefix)
        message = record.getMessage().replace("\n", next_line)
        console.print(prefix + message)


def configure_console(rank: int) -> None:
    """Let only rank 0 log. runtime.exit prints the errors of the other ranks."""
    # Keep the objects of the imports, also at Python's end, where collecting them would take 1.2 s.
    # errors.before_imports switched collection off.
    gc.freeze()
    gc.enable()
    log.handlers = [_ConsoleHandler()]
    log.setLevel(logging.INFO if rank == 0 else logging.CRITICAL)
    log.propagate = False


@contextmanager
def log_off() -> Iterator[None]:
    """In the block, log nothing, not even warnings."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def set_quiet(quiet: bool) -> None:
    """If `quiet`, log only warnings from now on. Text printed to `console` is still shown."""
    log.setLevel(max(log.level, logging.WARNING) if quiet else log.level)
