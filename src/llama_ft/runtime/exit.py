"""How a run that fails or is stopped ends: one message, printed once, and every process gone.

When a rank leaves, torchrun ends the others at once (SIGTERM, and SIGKILL 30 s later). So the first rank to write under
one key of the store prints its message before it leaves, and the others wait to be ended. A rank whose peer has died
sees only a broken connection: it lets the rank that knows the cause go first.
"""

import errno
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import torch.distributed as dist

from llama_ft import restarts
from llama_ft.errors import LostRank, RunFailure, UserError
from llama_ft.masking import printable
from llama_ft.runtime.out_of_memory import KILLED, KILLED_BY, shortage
from llama_ft.runtime.status import RunStatus

FAILURE_KEY = "llama_ft/failure"
SECONDS_FOR_THE_CAUSE = 3.0
SECONDS_TO_SEE_AN_END = 0.3  # torchrun reaps a rank within 0.1 s of its end
SECONDS_TO_BE_ENDED = 20.0
COMMUNICATION_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")
_LEAVING = threading.Lock()


class Stop(NamedTuple):
    """Why a run stops before its end."""

    exit_code: int
    reason: str  # as in "stopped by SIGTERM"


class Stopped(SystemExit):
    """Ends a run that was asked to stop. All ranks raise it after the same step, with the checkpoint that was saved, or
    one for itself without a step."""

    def __init__(self, stop: Stop, step: int | None = None, checkpoint: Path | None = None) -> None:
        super().__init__(stop.exit_code)
        self.exit_code, self.agreed = stop.exit_code, step is not None
        way_on = f"To go on: --resume {checkpoint}" if checkpoint else "Nothing was saved."
        self.message = f"stopped by {stop.reason}" + (f" after step {step}. {way_on}" if self.agreed else "")


class Explainer(Protocol):
    """Knows what a run was meant to need: plan.oom_report.MemoryReport, which the recipe gives its Runtime."""

    def describe(self, error: BaseException) -> str: ...
    def advise(self, error: BaseException) -> str: ...
    def describe_kill(self) -> str: ...
    def last_end(self, run: Path) -> str: ...


def exit_process(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    status: RunStatus | None,
    told_to_end: threading.Event,
    describe_lost: Callable[[], str] = str,
    explainer: Explainer | None = None,
) -> NoReturn:
    """End this process after `error`, and print it if `rank` is the one to do so.

    Args:
        error: what ended the run.
        rank: this process's.
        store: what all ranks share; None before they have met.
        status: the run's status file, when the run has a directory.
        told_to_end: set once a signal has asked this process to end (runtime.signals).
        describe_lost: which other rank has ended, if that can be seen (runtime.watchdog).
        explainer: explains what has to do with memory; None if the run has not come so far.
    """
    _LEAVING.acquire()  # and never released: a thread that watches the run may end it, too
    is_agreed = isinstance(error, Stopped) and error.agreed
    if _is_broken(error) or (isinstance(error, Stopped) and not is_agreed):  # by torchrun, if another rank has failed
        time.sleep(SECONDS_TO_SEE_AN_END)
        if lost := describe_lost():
            error = LostRank(f"lost contact with another rank: {lost}")
    is_mistake = isinstance(error, UserError) and not isinstance(error, LostRank)
    is_stop, memory = isinstance(error, KeyboardInterrupt | Stopped), shortage(error)
    exit_code = error.exit_code if isinstance(error, Stopped) else 130 if is_stop else 1
    if is_mistake and not isinstance(error, RunFailure):
        exit_code = 2
    # What would happen again: a mistake, a full disk, a loss that is not finite, too little memory for the first step.
    is_final = is_mistake or (memory is not None and (status is None or status.step == 0))
    failure = f"{'final' if is_final else ''} {'advises' if memory and explainer else ''} {rank}"
    if store is None:  # the others see what rank 0 sees; if nothing has ended this one by then, they do not
        prints = rank == 0 or not told_to_end.wait(SECONDS_TO_BE_ENDED)
    else:
        knows_the_cause = rank == 0 if is_mistake else not _is_broken(error)
        prints = rank == 0 if is_agreed else _is_first(store, failure, 0 if knows_the_cause else SECONDS_FOR_THE_CAUSE)
    if prints:
        _print(text := _message(error, rank, explainer, status), status, is_stop, exit_code)
        if memory is not None and explainer is not None:  # takes minutes
            advice = _indented(_explained(partial(explainer.advise, error), "No advice"))
            _print(advice, status, is_stop, exit_code, before=f"{text}\n")
        if status is not None:
            status.at_end()
        if is_final:
            restarts.end_restarts()  # which ends this process, too
    elif not is_stop:  # a signal reaches every rank: nobody has to be waited for
        with suppress(RuntimeError, ConnectionError):  # the store went down with its host
            failure = store.get(FAILURE_KEY).decode() if store is not None and store.check([FAILURE_KEY]) else ""
        is_final = "final" in failure
        is_ended = told_to_end.wait(150.0 if "advises" in failure else 5.0 if is_final else SECONDS_TO_BE_ENDED)
        if not is_ended and is_final and os.environ.get("LOCAL_RANK") == "0":
            restarts.end_restarts()  # the rank that failed has ended its own node's
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)  # as destructors of a broken process group can wait for peers that are gone


def _is_broken(error: BaseException) -> bool:
    """Whether the connection to another rank broke, which NCCL's being out of memory is not."""
    if shortage(error) is not None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in COMMUNICATION_SIGNS)


def _is_first(store: dist.Store, failure: str, seconds: float) -> bool:
    """Whether no other rank has written its failure within some seconds; this one's is in the store then."""
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError, ConnectionError):
        while not store.check([FAILURE_KEY]) and time.monotonic() < deadline:
            time.sleep(0.1)  # store.wait prints warnings of its own when its time is up
        return store.compare_set(FAILURE_KEY, "", failure).decode() == failure
    return True  # the store went down with its host: better said twice than not at all


def _message(error: BaseException, rank: int, explainer: Explainer | None, status: RunStatus | None) -> str:
    run, way_on = (status.path.parent if status is not None else None), ""
    if isinstance(error, KeyboardInterrupt | Stopped):
        message = error.message if isinstance(error, Stopped) else "stopped by Ctrl-C"
        is_whole = status is None or not status.step or "after step" in message
        return message if is_whole else f"{message}. To go on: --output_dir {run} --resume auto"
    if explainer is not None and KILLED in str(error):
        way_on = f"\n{_explained(explainer.describe_kill)}"
    if run is not None and any((run / "checkpoints").glob("step-*")):
        way_on += f"\nThe same command goes on from the last complete checkpoint with --output_dir {run} --resume auto"
    if isinstance(error, UserError):
        return str(error) + (_indented(way_on) if isinstance(error, LostRank) else "")
    if isinstance(error, FileNotFoundError) and run is not None and not run.exists():
        return f"error: {run} was deleted or moved during the run, which cannot go on without it."
    if (kind := shortage(error)) is not None:
        what = f"ran out of {'host' if kind == 'host' else 'GPU'} memory: {str(error).strip() or type(error).__name__}"
        what = _explained(partial(explainer.describe, error), what) if explainer is not None else what
    elif _is_broken(error):
        what = f"lost contact with another rank, whose exit code is in torchrun's report: {error}\n{KILLED_BY}{way_on}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"could not write {error.filename or run or 'a file'}: {error.strerror}.{way_on}"
    else:
        trace = "".join(traceback.format_exception(error))
        return f"{trace}error: rank {rank} failed: {type(error).__name__}: {error}"
    return str(RunFailure(f"rank {rank} {what}"))


def _print(text: str, status: RunStatus | None, is_stop: bool, exit_code: int, before: str = "") -> None:
    """Print a message, and write it to status.json after what was printed before."""
    if status is not None:
        status.write("stopped" if is_stop else "failed", exit_code, before + text)
    with suppress(OSError):  # nobody reads it any more. In one piece, as torchrun writes there, too
        print(f"{printable(text)}\n", end="", file=sys.__stderr__ or sys.stderr, flush=True)


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 7)


def _explained(explain: Callable[[], str], otherwise: str = "") -> str:
    """What `explain` says; if it fails, that must not take the message's place."""
    try:
        return explain()
    except Exception as error:
        return f"{otherwise}\n(It could not be explained: {type(error).__name__}: {error})".lstrip("\n")
