"""End a run that fails or is stopped: exactly one rank prints the message, and all processes end.

When a rank exits, torchrun ends the others: SIGTERM at once, SIGKILL 30 s later. So the first rank
that writes to one key of the store prints its message before it exits, and the other ranks wait to
be ended. If a rank dies, its peers see only a broken connection. They wait, so that a rank that
knows the cause can write first.
"""

import errno
import json
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, Protocol

import torch.distributed as dist

from llama_ft.errors import LostRank, RunFailure, UserError
from llama_ft.masking import printable
from llama_ft.processes import end_restarts, replace_text
from llama_ft.runtime.out_of_memory import KILLED, KILLED_BY, shortage

FAILURE_KEY = "llama_ft/failure"
SECONDS_FOR_THE_CAUSE = 3.0
SECONDS_FOR_THE_STORE = 5.0  # until a rank leaves without its answer
SECONDS_TO_SEE_AN_END = 0.3  # torchrun notices the end of a rank within 0.1 s
# how long the other ranks wait
SECONDS_TO_BE_ENDED = 20.0
SECONDS_WHEN_FINAL = 5.0
SECONDS_OF_ADVICE = 150.0
SECONDS_BETWEEN_STEPS = 5.0  # one write per step would be too many for the file system of a cluster
COMMUNICATION_SIGNS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "broken pipe",
    "tcpstore",
)
INDENT = " " * len("error: ")
State = Literal["running", "finished", "stopped", "failed"]
_LEAVING = threading.Lock()


class Stop(NamedTuple):
    """Why a run stops before its end."""

    exit_code: int
    reason: str  # such as "SIGTERM", for the message "stopped by SIGTERM"


class Stopped(SystemExit):
    """Ends a run that was asked to stop. All ranks raise it after the same step, with the
    checkpoint that was saved. Without a step, a rank raises it for itself, or all of them raise it
    in an evaluation, which is abandoned."""

    def __init__(self, stop: Stop, step: int | None = None, checkpoint: Path | None = None) -> None:
        super().__init__(stop.exit_code)
        self.stop = stop
        self.exit_code = stop.exit_code
        self.agreed = step is not None
        self.message = f"stopped by {stop.reason}"
        if step is not None:
            moment = f"after step {step}" if step else "before step 1"
            hint = f"To resume: --resume {checkpoint}" if checkpoint else "Nothing was saved."
            self.message = f"{self.message} {moment}. {hint}"


class RunStatus:
    """Writes output_dir/status.json, the state of the run. Scripts need it, since torchrun always
    exits with 0 or 1.

    Args:
        output_dir: the run's directory, which must exist.
        at_end: called after the final state was written and printed; it must not raise.
        step: the last completed optimizer step.
    """

    def __init__(
        self, output_dir: Path, at_end: Callable[[], None] = lambda: None, step: int = 0
    ) -> None:
        self.path = output_dir / "status.json"
        self.step = step
        self.at_end = at_end
        self._written = 0.0

    def write(self, state: State, exit_code: int | None = None, message: str = "") -> None:
        """Replace the file if possible. An error, such as a full disk, is ignored: it must not hide
        the message."""
        record = {"state": state, "step": self.step, "exit_code": exit_code, "message": message}
        with suppress(OSError):
            replace_text(self.path, json.dumps(record) + "\n")

    def note_step(self, step: int, writes: bool) -> None:
        """Count a completed step, and sometimes write it, unless another rank has already written
        how the run ended."""
        self.step = step
        if writes and time.monotonic() - self._written > SECONDS_BETWEEN_STEPS:
            self._written = time.monotonic()
            if self.path.exists() and '"state": "running"' in self.path.read_text():
                self.write("running")


class Explainer(Protocol):
    """Explains errors about memory: plan.oom_report.MemoryReport, which the recipe sets on its
    Runtime."""

    def describe(self, error: BaseException) -> str: ...
    def advise(self, error: BaseException) -> str: ...
    def describe_kill(self) -> str: ...


def exit_process(
    error: BaseException,
    rank: int,
    store: dist.Store | None,
    status: RunStatus | None,
    end_requested: threading.Event,
    describe_lost: Callable[[], str] = str,
    explainer: Explainer | None = None,
) -> NoReturn:
    """End this process after `error`. One rank prints the message.

    Args:
        error: the reason for the end of the run.
        rank: rank of this process.
        store: the store of all ranks; None before the process group exists.
        status: the run's status file; None before the run has a directory.
        end_requested: set when a signal has asked this process to end (runtime.signals).
        describe_lost: returns a text about another rank that has ended, or "" (runtime.watchdog).
        explainer: explains errors about memory; None at the start of a run.
    """
    _LEAVING.acquire()  # never released: another thread that watches the run may call this, too
    is_stop = isinstance(error, KeyboardInterrupt | Stopped)
    is_agreed = isinstance(error, Stopped) and error.agreed
    if _is_broken(error) or (isinstance(error, Stopped) and not is_agreed):  # SIGTERM by torchrun
        time.sleep(SECONDS_TO_SEE_AN_END)
        if lost := describe_lost():
            error = LostRank(f"lost contact with another rank: {lost}")
            is_stop = False
    is_mistake = isinstance(error, UserError) and not isinstance(error, LostRank)
    memory = shortage(error)
    exit_code = 2 if is_mistake and not isinstance(error, RunFailure) else 130 if is_stop else 1
    exit_code = error.exit_code if isinstance(error, Stopped) else exit_code
    # A restart would repeat it: a user's error, a full disk, a loss that is not finite, an OOM in
    # the first step.
    is_final = is_mistake or (memory is not None and (status is None or status.step == 0))
    seconds = SECONDS_WHEN_FINAL if is_final else SECONDS_TO_BE_ENDED
    first = failure = f"{rank} {SECONDS_OF_ADVICE if memory and explainer else seconds} {is_final}"
    # other ranks see the same error as rank 0; if this one still runs then, they did not
    if store is None:
        prints = rank == 0 or not end_requested.wait(SECONDS_TO_BE_ENDED)
    elif is_agreed:
        prints = rank == 0
    else:
        knows_the_cause = rank == 0 if is_mistake else not _is_broken(error)
        first = _first_failure(store, failure, 0 if knows_the_cause else SECONDS_FOR_THE_CAUSE)
        prints = first == failure
    if prints:
        said = ""
        for text in _messages(error, rank, explainer, status):
            said += f"{text}\n"
            if status is not None:
                status.write("stopped" if is_stop else "failed", exit_code, said.rstrip("\n"))
            # the output is closed. One write, because torchrun writes there, too
            with suppress(OSError):
                print(f"{printable(text)}\n", end="", file=sys.__stderr__ or sys.stderr, flush=True)
        if status is not None:
            status.at_end()
        if is_final:
            end_restarts()  # also ends this process
    elif not is_stop:  # a signal reaches every rank, so nothing has to be waited for
        _, patience, final = first.split()
        if (
            not end_requested.wait(float(patience))
            and final == "True"
            and os.environ.get("LOCAL_RANK") == "0"
        ):
            end_restarts()  # the failing rank has already ended the restarts of its own node
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)  # destructors of a broken process group can wait for dead peers


def _is_broken(error: BaseException) -> bool:
    """Return whether the connection to another rank broke. NCCL running out of memory does not
    count."""
    if shortage(error) is not None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(
        sign in str(error).lower() for sign in COMMUNICATION_SIGNS
    )


def _first_failure(store: dist.Store, failure: str, seconds: float) -> str:
    """Return the message of the first rank that fails. It is `failure` if no other rank writes
    within `seconds`, or if the store does not answer: printing a message twice is better than not
    at all."""
    found = [failure]
    deadline = time.monotonic() + seconds

    def ask() -> None:
        with suppress(RuntimeError, ConnectionError):
            # A client serves one call at a time. In the original the main thread may be waiting,
            # such as in new_group.
            own = store.clone()  # type: ignore[attr-defined]
            while not own.check([FAILURE_KEY]) and time.monotonic() < deadline:
                time.sleep(0.1)  # store.wait would print its own warnings after a timeout
            found[0] = own.compare_set(FAILURE_KEY, "", failure).decode()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + SECONDS_FOR_THE_STORE)  # its host may be suspended or lost
    return found[0]


def _messages(
    error: BaseException, rank: int, explainer: Explainer | None, status: RunStatus | None
) -> Iterator[str]:
    """Yield the message about the end of a run and, for an OOM, advice, which can take minutes to
    compute."""
    run = status.path.parent if status is not None else None
    has_checkpoint = run is not None and any((run / "checkpoints").glob("step-*"))
    if isinstance(error, KeyboardInterrupt | Stopped):
        message = error.message if isinstance(error, Stopped) else "stopped by Ctrl-C"
        is_whole = isinstance(error, Stopped) and error.agreed
        resume = f". To resume: --output_dir {run} --resume auto"
        yield message if is_whole or not has_checkpoint else message + resume
        return
    hint = (
        f"\n{_explained(explainer.describe_kill)}"
        if explainer is not None and KILLED in str(error)
        else ""
    )
    if has_checkpoint:
        hint += f"\nTo resume from the last complete checkpoint, add --output_dir {run} --resume auto to the command."
    if isinstance(error, UserError):
        yield str(error) + (textwrap.indent(hint, INDENT) if isinstance(error, LostRank) else "")
    elif (kind := shortage(error)) is not None:
        what = f"ran out of {'host' if kind == 'host' else 'GPU'} memory: {str(error).strip() or type(error).__name__}"
        what = (
            _explained(partial(explainer.describe, error), what) if explainer is not None else what
        )
        yield str(RunFailure(f"rank {rank} {what}"))
        if explainer is not None:
            yield textwrap.indent(_explained(partial(explainer.advise, error), "No advice"), INDENT)
    elif _is_broken(error):
        what = f"lost contact with another rank, whose exit code is in torchrun's report: {error}\n{KILLED_BY}{hint}"
        yield str(RunFailure(f"rank {rank} {what}"))
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or run or "a file"
        yield str(RunFailure(f"rank {rank} could not write {place}: {error.strerror}.{hint}"))
    else:
        yield f"{''.join(traceback.format_exception(error))}error: rank {rank} failed: {type(error).__name__}: {error}"


def _explained(explain: Callable[[], str], otherwise: str = "") -> str:
    """Return what `explain` returns. If it raises, return `otherwise` and a note on that error."""
    try:
        return explain()
    except Exception as error:
        return f"{otherwise}\n(It could not be explained: {type(error).__name__}: {error})".lstrip(
            "\n"
        )
