"""Exceptions for users, and one-line texts for exceptions of libraries."""

import errno
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from llama_ft.masking import mask_secrets, printable
from llama_ft.processes import end_restarts

# in Transformers' message about a model, tokenizer or processor whose class is in its directory
NEEDS_CODE = "`trust_remote_code=True`"
NAME_SHOWN = 60  # characters of a path that is too long
EXIT_GRACE_SECONDS = 20  # how long the other ranks of a node wait to be ended
# kind of an exception -> why the host does not answer
NO_ANSWER = {
    socket.gaierror: "host not found",
    ConnectionRefusedError: "connection refused",
    TimeoutError: "timed out",
}


class UserError(Exception):
    """An error that the user can fix. It is printed as `error: ...` without a traceback, and the
    exit code is 2.

    Args:
        *messages: one text per error. Its first line says where and what is wrong, further lines
            how to fix it.
    """

    def __init__(self, *messages: str) -> None:
        # terminal output is logged and shared
        self.messages = tuple(mask_secrets(message) for message in messages)
        super().__init__(*self.messages)

    def __str__(self) -> str:
        lines = ["error: " + message.replace("\n", "\n       ") for message in self.messages]
        return printable("\n".join(lines))


class RunFailure(UserError):
    """A run fails without an error of the user (loss not finite, disk full). It is printed like a
    UserError; the exit code is 1."""


class StopRequest(SystemExit):
    """A signal has asked this process to stop. A user's function never raises it."""


class LostRank(RunFailure):
    """Another rank died or hangs. torchrun may restart the ranks, because a restart can succeed
    here."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether a file could not be written because its disk, or a quota, is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def plural(count: int, noun: str) -> str:
    """Return a count and its noun, such as `1 sample` or `2,214 samples`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def text_of(error: BaseException) -> str:
    """Return the message of any exception: that of a user's may raise one itself."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message raises {type(second).__name__})"


def reason(error: BaseException) -> str:
    """Return the message of any exception on one line, without a full stop."""
    cause: BaseException | None = error
    for _ in range(20):  # libraries wrap errors of the network; a chain may be a circle
        if cause is None:
            break
        for kind, why in NO_ANSWER.items():
            if isinstance(cause, kind):
                return f"the host does not answer ({why})"
        cause = cause.__cause__ or cause.__context__
    if type(error) is FileNotFoundError:
        return "no such file"  # fsspec's message is only the name
    if isinstance(error, KeyError):
        return f"{error} is missing"
    system_message = getattr(error, "strerror", None)
    text = system_message or text_of(error).strip() or type(error).__name__
    if NEEDS_CODE in text:
        return "it needs Python code of its directory, which --trust_remote_code runs"
    lines = str(text).splitlines()
    line = lines[0]
    if len(lines) > 1 and line.endswith(":"):
        line = f"{line} {lines[1].strip()}"
    return line.rstrip(".")


@contextmanager
def before_imports() -> Iterator[None]:
    """Apply `exit_on_error` to the code before the imports of torch and Transformers. Garbage
    collection is off until `runtime.configure_console`, because the imports take 8 s with it and 6
    s without."""
    # keep a handler that the recipe has set
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # no traceback from an import; `runtime.start` replaces this handler
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = _explain_uncaught
    with exit_on_error():
        from llama_ft.environment import ensure_home  # it imports this module

        ensure_home()
        yield
    gc.disable()


def _explain_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an uncaught exception. If a library lacks a name that is imported here, exit with one
    line per name instead of a traceback."""
    if isinstance(error, ImportError | AttributeError):
        from llama_ft.libraries.names import missing_names

        problems = missing_names()
        if problems:
            with exit_on_error():
                raise UserError(*problems)
    sys.__excepthook__(kind, error, traceback)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print the user's errors once per node, and exit with code 2. torchrun does not restart the
    ranks.

    All ranks of a node get the same errors. All but the first wait to be ended: if one of them
    exited earlier, torchrun would end the first rank before it has printed the errors.
    """
    try:
        with _long_names_explained():
            yield
    except UserError as error:
        # a leftover of a launcher may be any text
        if os.environ.get("LOCAL_RANK", "0").strip("0").isdecimal():
            time.sleep(EXIT_GRACE_SECONDS)
        print(error, file=sys.stderr, flush=True)
        end_restarts()
        sys.exit(2)


@contextmanager
def _long_names_explained() -> Iterator[None]:
    """Turn the system's rejection of a long path, which any look at a file may meet, into a
    UserError."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        shown = f"{error.filename}"[:NAME_SHOWN]
        raise UserError(f"{shown}...: this name is too long for the file system.") from error


def rank() -> int:
    """Return this process's rank from torchrun's environment; 0 without torchrun."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0  # else a leftover, see environment.Launch
