"""How a failing run ends: one message, shown once, and every process gone.

When a rank leaves, torchrun ends the others within a tenth of a second (SIGTERM, and SIGKILL 30 s later). Which rank's
message is the real one has to be settled before that: the first rank to write its number under one key of the
rendezvous store speaks, the others wait to be ended. A rank whose peer has died sees only a broken connection, so it
lets the rank that knows the cause go first.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime.status import RunStatus

FAILURE_KEY = "llama_ft/failed_rank"
SECONDS_TO_LET_THE_CAUSE_SPEAK = 3.0
SECONDS_TO_BE_ENDED = 20.0
COMMUNICATION_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")


def leave(error: BaseException, rank: int, store: dist.Store | None, status: RunStatus | None) -> NoReturn:
    """End this process after `error`, printing it if this rank is the one to speak.

    Args:
        error: what ended the run. UserError and KeyboardInterrupt are told without a traceback.
        rank: this process's rank.
        store: the rendezvous store all ranks share; None before the process group exists, and on one process.
        status: the run's status file, when the run has a directory.
    """
    # torchrun's SIGTERM must not cut the message off, and must not be lost on a rank that is about to wait for it.
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_code = _exit_code(error)
    if _may_speak(error, rank, store, told_to_end):
        message = _message(error, rank)
        if status is not None:
            _write_status(status, exit_code, message)
        print(message, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches every rank: nobody has to be waited for
        _wait_to_be_ended(told_to_end)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of a broken process group can wait for peers that are gone.
    os._exit(exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 1 if isinstance(error, RunFailure) else 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _wait_to_be_ended(told_to_end: list[int]) -> bool:
    """Wait for SIGTERM, for SECONDS_TO_BE_ENDED at most; whether it came."""
    deadline = time.monotonic() + SECONDS_TO_BE_ENDED
    while not told_to_end and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    return bool(told_to_end)


def _may_speak(error: BaseException, rank: int, store: dist.Store | None, told_to_end: list[int]) -> bool:
    """Whether this rank's message is the one to show; takes up to SECONDS_TO_LET_THE_CAUSE_SPEAK."""
    knows_the_cause = rank == 0 if isinstance(error, UserError) else not _is_communication_error(error)
    if store is None:
        # The other ranks see the same mistake as rank 0; if nothing has ended this one by then, rank 0 does not see it.
        return rank == 0 or not _wait_to_be_ended(told_to_end)
    try:
        if not knows_the_cause:
            try:
                store.wait([FAILURE_KEY], timedelta(seconds=SECONDS_TO_LET_THE_CAUSE_SPEAK))
            except dist.DistStoreError:
                pass  # nobody has spoken
        return store.compare_set(FAILURE_KEY, "", str(rank)).decode() == str(rank)
    except (RuntimeError, ConnectionError):
        return True  # the store went down with its host: better said twice than not at all


def _is_communication_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in COMMUNICATION_SIGNS)


def _message(error: BaseException, rank: int) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if _is_communication_error(error):
        # Without the build paths and asides that gloo puts around it.
        what = re.search(r"connection [\w ]+|broken pipe|timed? ?out", str(error), re.IGNORECASE)
        return (
            f"error: rank {rank} lost contact with another rank ({what[0] if what else type(error).__name__}).\n"
            "       Which one ended first, and how, stands in torchrun's report; exit code -9 there usually\n"
            "       means that the machine ran out of host memory."
        )
    trace = "".join(traceback.format_exception(error))
    return f"{trace}error: rank {rank} failed: {type(error).__name__}: {error}"


def _write_status(status: RunStatus, exit_code: int, message: str) -> None:
    try:
        status.write("stopped" if exit_code == 130 else "failed", exit_code, message)
    except OSError as error:  # a full disk must not hide the message itself
        print(f"warning: {status.path} could not be written: {error}", file=sys.stderr)
