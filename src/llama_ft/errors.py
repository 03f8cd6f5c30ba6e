"""The exceptions for users, and what the exceptions of libraries say, on one line."""

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llama_ft.masking import mask_urls, printable
from llama_ft.processes import end_restarts

SECONDS_TO_BE_ENDED = 20
NO_ANSWER = {socket.gaierror: "host not found", ConnectionRefusedError: "connection refused", TimeoutError: "timed out"}


class UserError(Exception):
    """A mistake the user can mend: printed as `error: ...` without a traceback, exit code 2.

    Args:
        *messages: one text per mistake: first where and what is wrong, then, on further lines, what would be right.
    """

    def __init__(self, *messages: str) -> None:
        self.messages = tuple(mask_urls(message) for message in messages)  # terminals are logged and shared
        super().__init__(*self.messages)

    def __str__(self) -> str:
        return printable("\n".join("error: " + message.replace("\n", "\n       ") for message in self.messages))


class RunFailure(UserError):
    """A run that cannot go on although nobody made a mistake (loss no longer finite, disk full): told the same way,
    exit code 1."""


class LostRank(RunFailure):
    """Another rank is gone or hangs. Unlike after the others, torchrun may start the ranks again: it can go well."""


def counted(count: int, noun: str) -> str:
    """Return such as `1 sample` or `2,214 samples`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def reason(error: BaseException) -> str:
    """What an exception of any library says, on one line and without a full stop."""
    cause: BaseException | None = error
    for _ in range(20):
        for kind, why in NO_ANSWER.items():
            if isinstance(cause, kind):
                return f"the host does not answer ({why})"
        cause = cause and (cause.__cause__ or cause.__context__)
    if type(error) is FileNotFoundError:
        return "no such file"  # fsspec says nothing but the name again
    if isinstance(error, KeyError):
        return f"{error} is missing"
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    first, *rest = str(text).splitlines()
    return (f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first).rstrip(".")


@contextmanager
def before_imports() -> Iterator[None]:
    """`exit_on_error` around what is answered before the imports of torch and transformers, which take 6 s, and would
    take 8 with garbage collection: it stays off until `runtime.configure_console`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a recipe may have set one that says more
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback out of an import; runtime.start takes it over
    with exit_on_error():
        yield
    gc.disable()


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print the user's errors once per node, and exit with code 2; torchrun does not try again.

    All ranks of a node see the same errors. Those behind the first wait to be ended: if one of them left first,
    torchrun would end the first before it has printed them.
    """
    try:
        yield
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SECONDS_TO_BE_ENDED)
        print(error, file=sys.stderr, flush=True)
        end_restarts()
        sys.exit(2)


def rank() -> int:
    """Return this process's rank as torchrun tells it, 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)
