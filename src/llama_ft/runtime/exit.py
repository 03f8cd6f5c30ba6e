"""How a run that fails or is stopped ends: one message, printed once, and every process gone.

When a rank leaves, torchrun ends the others within a tenth of a second (SIGTERM, and SIGKILL 30 s later). Which rank's
message is the real one is settled before that: the first rank to write under one key of the rendezvous store prints
its message, the others wait to be ended. A rank whose peer has died sees only a broken connection, so it lets the rank
that knows the cause go first.
"""

import errno
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from llama_ft import restarts
from llama_ft.errors import LostRank, RunFailure, UserError
from llama_ft.masking import printable
from llama_ft.runtime.out_of_memory import KILLED, KILLED_BY, host_memory, shortage
from llama_ft.runtime.status import RunStatus, State

FAILURE_KEY = "llama_ft/failure"
SECONDS_TO_LET_THE_CAUSE_SPEAK = 3.0
SECONDS_TO_BE_ENDED = 20.0
SECONDS_TO_EXPLAIN = 150.0
COMMUNICATION_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")
_LEAVING = threading.Lock()


@dataclass(frozen=True)
class Stop:
    """Why a run stops before its end."""

    exit_code: int
    reason: str  # as in "stopped by SIGTERM"


class Stopped(SystemExit):
    """Ends a run that was asked to stop. All ranks raise it after the same step, or one for itself without a step.

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


class Explainer(Protocol):
    """Knows what a run was meant to need; the recipe gives its Runtime one."""

    def describe(self, error: BaseException) -> str:
        """The message of an out-of-memory error, without `error: rank 0` before it."""

    def advise(self, error: BaseException) -> str:
        """What would fit; may take SECONDS_TO_EXPLAIN."""

    def describe_kill(self) -> str:
        """What to add if a rank was killed; at once."""

    def last_end(self, run: Path) -> str:
        """How the run in a directory ended, if it was killed; else ""."""


def exit_process(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    status: RunStatus | None,
    told_to_end: threading.Event,
    about_lost: Callable[[], str] = str,
    explainer: Explainer | None = None,
) -> NoReturn:
    """End this process after `error`, and print it if this rank is the one to do so.

    Args:
        error: what ended the run. UserError, Stopped and KeyboardInterrupt are printed without a traceback.
        rank: this process's rank.
        store: the rendezvous store all ranks share; None before the process group exists, and on one process.
        status: the run's status file, when the run has a directory.
        told_to_end: set once a signal has asked this process to end (runtime.signals).
        about_lost: which other rank has ended and how, if that can be seen; called after a broken connection.
        explainer: explains what has to do with memory; None if the run has not come so far.
    """
    _LEAVING.acquire()  # and never released: a thread that watches the run may end it, too
    exit_code, memory, lost = _exit_code(error), shortage(error), about_lost() if _is_broken(error) else ""
    is_mistake = isinstance(error, UserError) and not isinstance(error, LostRank)
    is_stop = isinstance(error, KeyboardInterrupt | Stopped)
    advises = memory is not None and explainer is not None
    # What would happen again: a mistake, a full disk, a loss that is not finite, too little memory for the first step.
    is_final = is_mistake or (memory is not None and (status is None or status.step == 0))
    knows_the_cause = rank == 0 if is_mistake else KILLED in lost or not _is_broken(error)
    failure = json.dumps({"rank": rank, "node": _node(), "is_final": is_final, "advises": advises})
    if _may_speak(error, rank, store, told_to_end, failure, knows_the_cause):
        message = _message(error, rank, lost, explainer, status.path.parent if status is not None else None)
        if is_stop and status is not None and status.step and "after step" not in message:
            message += f". To go on: --output_dir {status.path.parent} --resume auto"
        _tell(message, "stopped" if is_stop else "failed", exit_code, status)
        if advises and explainer is not None:
            advice = _indented(_explained(partial(explainer.advise, error), "No advice"))
            _tell(advice, "failed", exit_code, status, after=message)
        if status is not None:
            status.at_end()
        if is_final:
            restarts.end_restarts()  # which ends this process, too
    elif not is_stop:  # a signal reaches every rank: nobody has to be waited for
        wait_to_be_ended(store, told_to_end)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Not sys.exit: destructors of a broken process group can wait for peers that are gone.
    os._exit(exit_code)


def wait_to_be_ended(store: dist.Store | None, until: threading.Event) -> None:
    """Wait for torchrun, which ends this rank when the rank that has failed has left.

    Args:
        store: with that rank's failure.
        until: ends the waiting.
    """
    failure: dict[str, Any] = {}
    with suppress(RuntimeError, ConnectionError):  # the store went down with its host
        if store is not None and store.check([FAILURE_KEY]):
            failure = json.loads(store.get(FAILURE_KEY))
    if failure.get("is_final") and failure["node"] != _node() and os.environ.get("LOCAL_RANK") == "0":
        restarts.end_restarts()  # each node has an agent of its own
    until.wait(SECONDS_TO_BE_ENDED + (SECONDS_TO_EXPLAIN if failure.get("advises") else 0))


def write_status(status: RunStatus, state: State, exit_code: int, message: str) -> None:
    """Write status.json, or a warning if that is not possible: a full disk must not hide the message itself."""
    try:
        status.write(state, exit_code, message)
    except OSError as error:
        print(f"warning: {status.path} could not be written: {error}", file=sys.stderr)


def _node() -> str | None:
    return os.environ.get("GROUP_RANK")


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 1 if isinstance(error, RunFailure) else 2
    if isinstance(error, Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_broken(error: BaseException) -> bool:
    """Whether the connection to another rank broke, which NCCL's being out of memory is not."""
    if shortage(error) is not None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in COMMUNICATION_SIGNS)


def _may_speak(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    told_to_end: threading.Event,
    failure: str,
    knows_the_cause: bool,
) -> bool:
    """Whether this rank's message is the one to print; takes up to SECONDS_TO_LET_THE_CAUSE_SPEAK. `failure` is this
    rank's value for FAILURE_KEY."""
    if isinstance(error, Stopped) and error.agreed:
        return rank == 0
    if store is None:
        # The other ranks see the same mistake as rank 0; if nothing has ended this one by then, rank 0 does not see it.
        return rank == 0 or not told_to_end.wait(SECONDS_TO_BE_ENDED)
    try:
        deadline = time.monotonic() + (0 if knows_the_cause else SECONDS_TO_LET_THE_CAUSE_SPEAK)
        while not store.check([FAILURE_KEY]) and time.monotonic() < deadline:
            time.sleep(0.1)  # store.wait prints warnings of its own when its time is up
        return store.compare_set(FAILURE_KEY, "", failure).decode() == failure
    except (RuntimeError, ConnectionError):
        return True  # the store went down with its host: better said twice than not at all


def _message(error: BaseException, rank: int, lost: str, explainer: Explainer | None, run: Path | None) -> str:
    way_on = ""
    if run is not None and any((run / "checkpoints").glob("step-*")):
        way_on = f"\nThe same command goes on from the last complete checkpoint with --output_dir {run} --resume auto"
    if isinstance(error, Stopped):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if explainer is not None and KILLED in f"{error}{lost}":
        way_on = f"\n{_explained(explainer.describe_kill)}{way_on}"
    if isinstance(error, UserError):
        return str(error) + (_indented(way_on).strip(" ") if isinstance(error, LostRank) else "")
    if (kind := shortage(error)) is not None:
        what = f"ran out of {'host' if kind == 'host' else 'GPU'} memory: {str(error).strip() or type(error).__name__}"
        what = _explained(partial(explainer.describe, error), what) if explainer is not None else what
    elif _is_broken(error):
        # Without the build paths and asides that gloo puts around it.
        found = re.search(r"connection [\w ]+|broken pipe|timed? ?out", str(error), re.IGNORECASE)
        what = found[0].strip() if found else type(error).__name__
        lost = lost or f"torchrun's report has its exit code. {KILLED_BY} {host_memory() or ''}"
        what = f"lost contact with another rank ({what}): {lost}{way_on}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"could not write {error.filename or run or 'a file'}: {error.strerror}.{way_on}"
    elif isinstance(error, FileNotFoundError) and run is not None and not run.exists():
        return f"error: {run} was deleted or moved during the run, which cannot go on without it."
    else:
        trace = "".join(traceback.format_exception(error))
        return f"{trace}error: rank {rank} failed: {type(error).__name__}: {error}"
    return f"error: rank {rank} {_indented(what).lstrip()}"


def _tell(text: str, state: State, exit_code: int, status: RunStatus | None, after: str = "") -> None:
    """Print a message, and write it to status.json behind what came before it."""
    if status is not None:
        write_status(status, state, exit_code, f"{after}\n{text}".lstrip("\n"))
    stderr = sys.__stderr__ or sys.stderr  # another thread may have redirected the latter
    with suppress(OSError):  # nobody reads it any more
        print(f"{printable(text)}\n", end="", file=stderr, flush=True)  # in one piece: torchrun writes there, too


def _explained(explain: Callable[[], str], otherwise: str = "") -> str:
    """What `explain` says; if it fails, that must not take the message's place."""
    try:
        return explain()
    except Exception as error:
        return f"{otherwise}\n(It could not be explained: {type(error).__name__}: {error})".lstrip("\n")


def _indented(text: str) -> str:
    return "       " + text.replace("\n", "\n       ")
