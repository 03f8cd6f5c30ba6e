"""What people read while a run works: one logger, of rank 0 only, that prints above a progress bar."""

import atexit
import gc
import logging
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from llama_ft.masking import printable


class _Console(Console):
    """Prints no control characters of data and files, and falls silent, instead of ending the process, when its reader
    is gone (`| head`, a closed terminal) or its disk full."""

    def print(self, *objects: Any, **options: Any) -> None:
        for it in objects:
            if isinstance(it, Text):
                it.plain = printable(it.plain)  # of the same length, so that the styles stay where they are
        super().print(*(printable(it) if isinstance(it, str) else it for it in objects), **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, SystemExit):  # the latter is rich's answer to a broken pipe
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # what is buffered would fail again


console = _Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False, emoji=False)
log = logging.getLogger("llama_ft")


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        console.print(prefix + record.getMessage().replace("\n", "\n" + " " * len(prefix)))


def configure_console(rank: int) -> None:
    """Let rank 0 log and keep the others silent; runtime.exit prints their errors."""
    gc.freeze()  # what the imports have made stays; collecting was off since errors.before_imports
    atexit.register(gc.unfreeze)  # else libraries (Triton's binding) report what they hold as leaks
    gc.enable()
    log.handlers = [_ConsoleHandler()]
    log.setLevel(logging.INFO if rank == 0 else logging.CRITICAL)
    log.propagate = False


def set_quiet(quiet: bool) -> None:
    """If `quiet`, log warnings only from now on. What is printed to `console` is still shown."""
    log.setLevel(max(log.level, logging.WARNING) if quiet else log.level)
