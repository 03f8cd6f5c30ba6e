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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch.distributed as dist

from llama_ft import restarts
from llama_ft.errors import LostRank, RunFailure, UserError
from llama_ft.masking import printable
from llama_ft.runtime.out_of_memory import KILLED, host_memory, shortage
from llama_ft.runtime.status import RunStatus, State

FAILURE_KEY = "llama_ft/failed_rank"
FINAL = " would fail again, node "  # under FAILURE_KEY between the numbers of the rank and its node
EXPLAINS = " explains"  # as well: this rank finds out what would fit, for which it needs more time
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


class Explainer(Protocol):
    """Knows what a run was meant to need; the recipe gives its Runtime one."""

    def describe(self, error: BaseException) -> str:
        """The message of an out-of-memory error, without `error: rank 0` before it."""

    def advise(self, error: BaseException, told_to_end: threading.Event) -> str:
        """What would fit; may take SECONDS_TO_EXPLAIN, but no longer than until `told_to_end`."""

    def describe_kill(self) -> str:
        """What to add where a rank was killed; at once."""

    def last_end(self, run: Path) -> str:
        """How the run in a directory ended, if that was without a word."""


def leave(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    status: RunStatus | None,
    told_to_end: threading.Event,
    about_lost: Callable[[], str] = str,
    explainer: Explainer | None = None,
) -> NoReturn:
    """End this process after `error`, printing it if this rank is the one to speak.

    Args:
        error: what ended the run. UserError, Stopped and KeyboardInterrupt are told without a traceback.
        rank: this process's rank.
        store: the rendezvous store all ranks share; None before the process group exists, and on one process.
        status: the run's status file, when the run has a directory.
        told_to_end: set once a signal has asked this process to end (runtime.stopping); none may cut it off here.
        about_lost: tells which other rank has ended and how, if that can be seen; asked when contact is lost.
        explainer: explains what has to do with memory; None where the run has not come so far.
    """
    _LEAVING.acquire()  # and never released: a thread that watches the run may end it, too
    exit_code = _exit_code(error)
    is_broken = _is_communication_error(error)
    lost = about_lost() if is_broken else ""
    is_memory = shortage(error) is not None
    is_final = _would_come_again(error) or (is_memory and (status is None or status.step == 0))
    knows_the_cause = rank == 0 if isinstance(error, UserError) else KILLED in lost or not is_broken
    sign = f"{rank}{EXPLAINS if is_memory and explainer is not None else ''}"
    sign += f"{FINAL}{os.environ.get('GROUP_RANK')}" if is_final else ""
    if _may_speak(error, rank, store, told_to_end, sign, knows_the_cause):
        run = status.path.parent if status is not None else None
        message = _message(error, rank, lost, explainer, run)
        if isinstance(error, LostRank) or is_broken:
            message += _way_on(run)
        stderr = sys.__stderr__ or sys.stderr  # another thread may have redirected the latter
        if status is not None:
            stopped = isinstance(error, KeyboardInterrupt | Stopped)
            if stopped and "after step" not in message and status.step:
                message += f". To go on: --output_dir {status.path.parent} --resume auto"
            write_status(status, "stopped" if stopped else "failed", exit_code, message)
        with suppress(OSError):  # nobody reads it any more
            told = f"{printable(message)}\n"  # in one piece: torchrun writes there, too
            print(told, end="", file=stderr, flush=True)
        if status is not None:
            status.at_end()
        if is_memory and explainer is not None:
            advice = _indented(_tell(partial(explainer.advise, error, told_to_end), ""))
            with suppress(OSError):
                print(f"{advice}\n", end="", file=stderr, flush=True)
            if status is not None:
                write_status(status, "failed", exit_code, f"{message}\n{advice}")
                status.at_end()
        if is_final:
            restarts.end_restarts()  # which ends this process, too
    elif not isinstance(error, KeyboardInterrupt | Stopped):  # these reach every rank: nobody has to be waited for
        if os.environ.get("LOCAL_RANK") == "0" and is_final_elsewhere(store):
            restarts.end_restarts()
        told_to_end.wait(SECONDS_TO_BE_ENDED + (SECONDS_TO_EXPLAIN if is_memory else 0))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Not sys.exit: destructors of a broken process group can wait for peers that are gone.
    os._exit(exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 1 if isinstance(error, RunFailure) else 2
    if isinstance(error, Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _may_speak(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    told_to_end: threading.Event,
    sign: str,
    knows_the_cause: bool,
) -> bool:
    """Whether this rank's message is the one to show; takes up to SECONDS_TO_LET_THE_CAUSE_SPEAK. `sign` is this rank's
    value for FAILURE_KEY."""
    if isinstance(error, Stopped) and error.agreed:
        return rank == 0
    if store is None:
        # The other ranks see the same mistake as rank 0; if nothing has ended this one by then, rank 0 does not see it.
        return rank == 0 or not told_to_end.wait(SECONDS_TO_BE_ENDED)
    try:
        if not knows_the_cause:
            deadline = time.monotonic() + SECONDS_TO_LET_THE_CAUSE_SPEAK
            while not store.check([FAILURE_KEY]) and time.monotonic() < deadline:
                time.sleep(0.1)  # store.wait prints warnings of its own when its time is up
        return store.compare_set(FAILURE_KEY, "", sign).decode() == sign
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


def seconds_to_be_ended(store: dist.Store) -> float:
    """How long to wait for the end when another rank has failed, which is known to be so."""
    return SECONDS_TO_BE_ENDED + (SECONDS_TO_EXPLAIN if EXPLAINS in store.get(FAILURE_KEY).decode() else 0)


def _is_communication_error(error: BaseException) -> bool:
    if shortage(error) is not None:  # NCCL's, too
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in COMMUNICATION_SIGNS)


def _message(error: BaseException, rank: int, lost: str, explainer: Explainer | None, run: Path | None) -> str:
    if isinstance(error, LostRank) and KILLED in str(error) and explainer is not None:
        return f"{error}\n{_indented(_tell(explainer.describe_kill, ''))}"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Stopped):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if (kind := shortage(error)) is not None:
        what = f"ran out of {'host' if kind == 'host' else 'GPU'} memory: {str(error).strip() or type(error).__name__}"
        if explainer is not None:
            what = _tell(partial(explainer.describe, error), what)
        elif kind == "host" and (host := host_memory()) is not None:
            what += f"\n{host}"
        return f"error: rank {rank} {_indented(what).lstrip()}"
    if _is_communication_error(error):
        # Without the build paths and asides that gloo puts around it.
        found = re.search(r"connection [\w ]+|broken pipe|timed? ?out", str(error), re.IGNORECASE)
        what = found[0].strip() if found else type(error).__name__
        if lost:
            if explainer is not None and KILLED in lost:
                lost += f"\n{_tell(explainer.describe_kill, '')}"
            return f"error: rank {rank} {_indented(f'lost contact with another rank ({what}): {lost}').strip()}"
        return (
            f"error: rank {rank} lost contact with another rank ({what}).\n"
            "       Which one ended first, and how, stands in torchrun's report; exit code -9 there usually\n"
            "       means that the machine ran out of host memory."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f": {error.filename}" if error.filename else f" (perhaps under {run})" if run else ""
        how = "\n       With room there, --resume auto goes on from the last complete checkpoint." if run else ""
        return f"error: rank {rank}: {error.strerror}{where}.{how}"
    if isinstance(error, FileNotFoundError) and run is not None and not run.exists():
        return f"error: {run} was deleted or moved during the run, which cannot go on without it."
    trace = "".join(traceback.format_exception(error))
    return f"{trace}error: rank {rank} failed: {type(error).__name__}: {error}"


def _way_on(run: Path | None) -> str:
    """What a run that lost a rank can be started again with."""
    if run is None or not any((run / "checkpoints").glob("step-*")):
        return ""
    return f"\n       The same command goes on from the last complete checkpoint with --output_dir {run} --resume auto"


def _tell(explain: Callable[[], str], otherwise: str) -> str:
    """What `explain` says; where it fails, that must not take the message's place."""
    try:
        return explain()
    except Exception as problem:
        return f"{otherwise}\n(It could not be explained further: {type(problem).__name__}: {problem})".lstrip("\n")


def _indented(text: str) -> str:
    return "       " + text.replace("\n", "\n       ")


def write_status(status: RunStatus, state: State, exit_code: int, message: str) -> None:
    """Write status.json, or a warning where that is not possible."""
    try:
        status.write(state, exit_code, message)
    except OSError as error:  # a full disk must not hide the message itself
        print(f"warning: {status.path} could not be written: {error}", file=sys.stderr)
