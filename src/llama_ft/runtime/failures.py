"""How a run that fails or is stopped ends: one message, shown once, and every process gone.

When a rank leaves, torchrun ends the others within a tenth of a second (SIGTERM, and SIGKILL 30 s later). Which rank's
message is the real one has to be settled before that: the first rank to write its number under one key of the
rendezvous store speaks, the others wait to be ended. A rank whose peer has died sees only a broken connection, so it
lets the rank that knows the cause go first.
"""

import errno
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from llama_ft import restarts
from llama_ft.errors import LostRank, RunFailure, UserError
from llama_ft.runtime.status import RunStatus, State

FAILURE_KEY = "llama_ft/failed_rank"
FINAL = " would fail again, node "  # under FAILURE_KEY between the numbers of the rank and its node
SECONDS_TO_LET_THE_CAUSE_SPEAK = 3.0
SECONDS_TO_BE_ENDED = 20.0
COMMUNICATION_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")
_LEAVING = threading.Lock()


@dataclass(frozen=True)
class Stop:
    """Why a run stops before its end."""

    exit_code: int
    reason: str  # as in "stopped by SIGTERM"


class Stopped(SystemExit):
    """Ends a run that was asked to stop. Raised on all ranks after the same step, or, without a step, by one for
    itself.

    Args:
        stop: why.
        step: optimizer steps done.
        checkpoint: what was saved; None: nothing.
    """

    def __init__(self, stop: Stop, step: int | None = None, checkpoint: Path | None = None) -> None:
        super().__init__(stop.exit_code)
        self.exit_code, self.agreed = stop.exit_code, step is not None
        self.message = f"stopped by {stop.reason}"
        if step is not None:
            way_on = f"To go on: --resume {checkpoint}" if checkpoint else "Nothing was saved."
            self.message += f" after step {step}. {way_on}"


def leave(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    status: RunStatus | None,
    told_to_end: threading.Event,
) -> NoReturn:
    """End this process after `error`, printing it if this rank is the one to speak.

    Args:
        error: what ended the run. UserError, Stopped and KeyboardInterrupt are told without a traceback.
        rank: this process's rank.
        store: the rendezvous store all ranks share; None before the process group exists, and on one process.
        status: the run's status file, when the run has a directory.
        told_to_end: set once a signal has asked this process to end (runtime.stopping); none may cut it off here.
    """
    _LEAVING.acquire()  # and never released: a thread that watches the run may end it, too
    exit_code = _exit_code(error)
    if _may_speak(error, rank, store, told_to_end):
        message = _message(error, rank)
        if status is not None:
            stopped = isinstance(error, KeyboardInterrupt | Stopped)
            if stopped and "after step" not in message and status.step:
                message += f". To go on: --output_dir {status.path.parent} --resume auto"
            write_status(status, "stopped" if stopped else "failed", exit_code, message)
        print(message, file=sys.stderr, flush=True)
        if _would_come_again(error):
            restarts.end_restarts()
    elif not isinstance(error, KeyboardInterrupt | Stopped):  # these reach every rank: nobody has to be waited for
        if os.environ.get("LOCAL_RANK") == "0" and is_final_elsewhere(store):
            restarts.end_restarts()
        told_to_end.wait(SECONDS_TO_BE_ENDED)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of a broken process group can wait for peers that are gone.
    os._exit(exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 1 if isinstance(error, RunFailure) else 2
    if isinstance(error, Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _may_speak(error: BaseException, rank: int, store: dist.Store | None, told_to_end: threading.Event) -> bool:
    """Whether this rank's message is the one to show; takes up to SECONDS_TO_LET_THE_CAUSE_SPEAK."""
    if isinstance(error, Stopped) and error.agreed:
        return rank == 0
    knows_the_cause = rank == 0 if isinstance(error, UserError) else not _is_communication_error(error)
    if store is None:
        # The other ranks see the same mistake as rank 0; if nothing has ended this one by then, rank 0 does not see it.
        return rank == 0 or not told_to_end.wait(SECONDS_TO_BE_ENDED)
    try:
        if not knows_the_cause:
            deadline = time.monotonic() + SECONDS_TO_LET_THE_CAUSE_SPEAK
            while not store.check([FAILURE_KEY]) and time.monotonic() < deadline:
                time.sleep(0.1)  # store.wait prints warnings of its own when its time is up
        own = f"{rank}{FINAL}{os.environ.get('GROUP_RANK')}" if _would_come_again(error) else str(rank)
        return store.compare_set(FAILURE_KEY, "", own).decode() == own
    except (RuntimeError, ConnectionError):
        return True  # the store went down with its host: better said twice than not at all


def _would_come_again(error: BaseException) -> bool:
    """Whether torchrun need not try again: a user's mistake, a full disk, a loss that is not finite."""
    return isinstance(error, UserError) and not isinstance(error, LostRank)


def is_final_elsewhere(store: dist.Store | None) -> bool:
    """Whether a rank of another node, which has another agent, has failed in a way that would come again."""
    try:
        failure = store.get(FAILURE_KEY).decode() if store is not None and store.check([FAILURE_KEY]) else ""
    except (RuntimeError, ConnectionError):
        return False
    return FINAL in failure and failure.split(FINAL)[1] != os.environ.get("GROUP_RANK")


def _is_communication_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in COMMUNICATION_SIGNS)


def _message(error: BaseException, rank: int) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Stopped):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if _is_communication_error(error):
        # Without the build paths and asides that gloo puts around it.
        found = re.search(r"connection [\w ]+|broken pipe|timed? ?out", str(error), re.IGNORECASE)
        what = found[0].strip() if found else type(error).__name__
        return (
            f"error: rank {rank} lost contact with another rank ({what}).\n"
            "       Which one ended first, and how, stands in torchrun's report; exit code -9 there usually\n"
            "       means that the machine ran out of host memory."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f": {error.filename}" if error.filename else ""
        return (
            f"error: rank {rank}: {error.strerror}{where}.\n"
            "       With room there, --resume auto goes on from the last complete checkpoint."
        )
    trace = "".join(traceback.format_exception(error))
    return f"{trace}error: rank {rank} failed: {type(error).__name__}: {error}"


def write_status(status: RunStatus, state: State, exit_code: int, message: str) -> None:
    """Write status.json, or a warning where that is not possible."""
    try:
        status.write(state, exit_code, message)
    except OSError as error:  # a full disk must not hide the message itself
        print(f"warning: {status.path} could not be written: {error}", file=sys.stderr)
