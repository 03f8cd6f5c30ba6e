"""End a run that fails or is stopped: exactly one rank prints the message, and all processes end.

When a rank exits, torchrun ends the others: SIGTERM at once, SIGKILL 30 s later. So the first rank
that writes to one key of the store prints its message before it exits, and the other ranks wait to
be ended. If a rank dies, its peers see only a broken connection. They wait, so that a rank that
knows the cause can write first.
"""

import json
import os
import resource
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, Protocol

import torch.distributed as dist

from llama_ft.errors import LostRank, RunFailure, StopRequest, UserError, is_disk_full, text_of
from llama_ft.masking import printable
from llama_ft.processes import end_restarts, replace_text
from llama_ft.runtime.ends.out_of_memory import KILLED, KILLED_BY, shortage
from llama_ft.runtime.run_lock import RunLock

FAILURE_KEY = "llama_ft/failure"
# how long a rank that sees only a broken connection lets others, who know the cause, write first
CAUSE_GRACE_SECONDS = 3.0
SECONDS_FOR_THE_STORE = 5.0  # until a rank leaves without its answer
AGENT_POLL_SECONDS = 0.3  # torchrun notices the end of a rank within 0.1 s
# How long the other ranks wait to be ended: usually; if a restart would fail again, after which
# each node's first rank ends the restarts itself; and while advice on memory is computed.
EXIT_GRACE_SECONDS = 20.0
FINAL_GRACE_SECONDS = 5.0
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
FILE_LIMIT = "too many open files"
INDENT = " " * len("error: ")
State = Literal["running", "finished", "stopped", "failed"]
_LEAVING = threading.Lock()


class Stop(NamedTuple):
    """Why a run stops before its end."""

    exit_code: int
    reason: str  # such as "SIGTERM", for the message "stopped by SIGTERM"


class Stopped(StopRequest):
    """Ends a run that was asked to stop. All ranks raise it after the same step, with the
    checkpoint that was saved. Without a step, a rank raises it for itself, or all of them raise it
    in an evaluation, which is abandoned."""

    def __init__(
        self,
        stop: Stop,
        step: int | None = None,
        checkpoint: Path | None = None,
    ) -> None:
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
        lock: of the directory, if this process has it. After another run has taken the directory,
            the file is that run's.
    """

    def __init__(
        self,
        output_dir: Path,
        at_end: Callable[[], None] = lambda: None,
        step: int = 0,
        lock: RunLock | None = None,
    ) -> None:
        self._lock = lock
        self.path = output_dir / "status.json"
        self.step = step
        self.at_end = at_end
        self._written = 0.0

    def write(
        self,
        state: State,
        exit_code: int | None = None,
        message: str = "",
    ) -> None:
        """Replace the file if possible. An error, such as a full disk, is ignored: it must not hide
        the message."""
        if self._lock is not None and self._lock.taken_by():
            return
        record = {"state": state, "step": self.step, "exit_code": exit_code, "message": message}
        with suppress(OSError):
            replace_text(self.path, json.dumps(record) + "\n")

    def record_step(self, step: int, writes: bool) -> None:
        """Count a completed step, and sometimes write it, unless another rank has already written
        how the run ended."""
        self.step = step
        seconds_since = time.monotonic() - self._written
        if writes and seconds_since > SECONDS_BETWEEN_STEPS:
            self._written = time.monotonic()
            if self.path.exists() and '"state": "running"' in self.path.read_text():
                self.write("running")


class Explainer(Protocol):
    """Explains errors about memory: plan.oom_report.MemoryReport, which the recipe sets on its
    Ranks."""

    def describe(self, error: BaseException) -> str: ...
    def advise(self, error: BaseException) -> str: ...
    def describe_kill(self) -> str: ...


@dataclass(frozen=True)
class ExitContext:
    """What a process knows about its run when it must end.

    Attributes:
        rank: rank of this process.
        store: the store of all ranks; None before the process group exists.
        status: the run's status file; None before the run has a directory.
        end_requested: set when a signal has asked this process to end (runtime.signals).
        describe_lost: returns a text about another rank that has ended, or "" (runtime.watchdog).
        explainer: explains errors about memory; None at the start of a run.
        leads_disk: this rank writes the status file of its disk; see Ranks.
    """

    rank: int
    store: dist.Store | None
    status: RunStatus | None
    end_requested: threading.Event
    describe_lost: Callable[[], str] = str
    explainer: Explainer | None = None
    leads_disk: bool = False


class Claim(NamedTuple):
    """What a rank writes to the store when it fails. The rank of the first claim prints, and the
    others act on it."""

    rank: int
    patience_seconds: float  # how long the other ranks wait to be ended
    is_final: bool  # torchrun must not restart the ranks


def exit_process(error: BaseException, context: ExitContext) -> NoReturn:
    """End this process after `error`. One rank prints the message."""
    _LEAVING.acquire()  # never released: another thread that watches the run may call this, too
    error = _find_cause(error, context)
    is_stop = isinstance(error, KeyboardInterrupt | Stopped)
    exit_code = _exit_code(error)
    claim = _claim(error, context)
    first = claim
    if context.store is None:
        # Other ranks see the same error as rank 0 and are ended after it. If this one still runs
        # then, they did not see it.
        prints = context.rank == 0 or not context.end_requested.wait(EXIT_GRACE_SECONDS)
    elif isinstance(error, Stopped) and error.agreed:
        prints = context.rank == 0  # all ranks stop after the same step
    else:
        grace_seconds = 0.0 if _knows_cause(error, context.rank) else CAUSE_GRACE_SECONDS
        first = _first_claim(context.store, claim, grace_seconds)
        prints = first == claim
    if prints:
        _print_messages(error, exit_code, context)
        if context.status is not None:
            context.status.at_end()
        if claim.is_final:
            end_restarts()  # also ends this process
    elif isinstance(error, Stopped) and context.leads_disk and context.rank != 0:
        if context.status is not None:  # rank 0 does not see this disk's file
            context.status.write("stopped", exit_code, error.message)
    elif not is_stop:  # a signal reaches every rank, so nothing has to be waited for
        is_ended = context.end_requested.wait(first.patience_seconds)
        is_first_of_node = os.environ.get("LOCAL_RANK") == "0"
        if not is_ended and first.is_final and is_first_of_node:
            end_restarts()  # the failing rank has already ended the restarts of its own node
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)  # destructors of a broken process group can wait for dead peers


def _find_cause(error: BaseException, context: ExitContext) -> BaseException:
    """Return a LostRank instead of `error` if another rank of this node has ended.

    Then the connections to it break, and torchrun sends SIGTERM to this rank.
    """
    is_signal = isinstance(error, Stopped) and not error.agreed
    if not is_signal and not _is_broken(error):
        return error
    time.sleep(AGENT_POLL_SECONDS)
    lost = context.describe_lost()
    if lost:
        return LostRank(f"lost contact with another rank: {lost}")
    return error


def _is_diagnosed(error: BaseException) -> bool:
    """Return whether the message of `error` says what was wrong: of the user, the disk or the loss.
    A lost rank only saw that another rank failed."""
    return isinstance(error, UserError) and not isinstance(error, LostRank)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, UserError) and not isinstance(error, RunFailure):
        return 2
    return 1


def _claim(error: BaseException, context: ExitContext) -> Claim:
    """Return what this rank writes to the store."""
    is_out_of_memory = shortage(error) is not None
    is_first_step = context.status is None or context.status.step == 0
    # A restart would repeat it: a user's error, a full disk, a loss that is not finite, an OOM in
    # the first step.
    is_final = _is_diagnosed(error) or (is_out_of_memory and is_first_step)
    if is_out_of_memory and context.explainer is not None:
        patience_seconds = SECONDS_OF_ADVICE
    elif is_final:
        patience_seconds = FINAL_GRACE_SECONDS
    else:
        patience_seconds = EXIT_GRACE_SECONDS
    return Claim(context.rank, patience_seconds, is_final)


def _knows_cause(error: BaseException, rank: int) -> bool:
    """Return whether this rank may write its claim at once. All ranks may have the same error of
    the user, so rank 0 writes first. A broken connection is only the effect of another error."""
    if _is_diagnosed(error):
        return rank == 0
    return not _is_broken(error)


def _print_messages(error: BaseException, exit_code: int, context: ExitContext) -> None:
    """Print the messages to standard error and write them to status.json, each one as soon as it is
    known."""
    status = context.status
    is_stop = isinstance(error, KeyboardInterrupt | Stopped)
    state: State = "stopped" if is_stop else "failed"
    printed = ""
    for text in _messages(error, context):
        printed += f"{text}\n"
        if status is not None:
            status.write(state, exit_code, printed.rstrip("\n"))
        # the output may be closed. One write, because torchrun writes there, too
        with suppress(OSError):
            line = f"{printable(text)}\n"
            print(line, end="", file=sys.__stderr__ or sys.stderr, flush=True)


def _is_broken(error: BaseException) -> bool:
    """Return whether the connection to another rank broke. NCCL running out of memory does not
    count."""
    if shortage(error) is not None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = text_of(error).lower()
    if FILE_LIMIT in text:  # the cause, although gloo reports it
        return False
    return any(sign in text for sign in COMMUNICATION_SIGNS)


def _first_claim(store: dist.Store, claim: Claim, seconds: float) -> Claim:
    """Return the claim of the first rank that fails. It is `claim` if no other rank writes within
    `seconds`, or if the store does not answer: printing a message twice is better than not at
    all."""
    first = claim
    deadline = time.monotonic() + seconds

    def write_unless_written() -> None:
        nonlocal first
        with suppress(RuntimeError, ConnectionError):
            # A client serves one call at a time. In the original the main thread may be waiting,
            # such as in new_group.
            connection = store.clone()  # type: ignore[attr-defined]
            while not connection.check([FAILURE_KEY]) and time.monotonic() < deadline:
                time.sleep(0.1)  # store.wait would print its own warnings after a timeout
            # writes only if no other rank has written, and returns what is there then
            text = connection.compare_set(FAILURE_KEY, "", json.dumps(claim)).decode()
            first = Claim(*json.loads(text))

    thread = threading.Thread(target=write_unless_written, daemon=True)
    thread.start()
    thread.join(seconds + SECONDS_FOR_THE_STORE)  # its host may be suspended or lost
    return first


def _messages(error: BaseException, context: ExitContext) -> Iterator[str]:
    """Yield the message about the end of a run and, for an OOM, advice, which can take minutes to
    compute."""
    rank = context.rank
    explainer = context.explainer
    run = context.status.path.parent if context.status is not None else None
    has_checkpoint = run is not None and any((run / "checkpoints").glob("step-*"))
    if isinstance(error, KeyboardInterrupt | Stopped):
        message = error.message if isinstance(error, Stopped) else "stopped by Ctrl-C"
        names_checkpoint = isinstance(error, Stopped) and error.agreed
        if has_checkpoint and not names_checkpoint:
            message += f". To resume: --output_dir {run} --resume auto"
        yield message
        return
    hint = ""
    if explainer is not None and KILLED in str(error):
        hint += f"\n{_explained(explainer.describe_kill)}"
    if has_checkpoint:
        hint += f"\nTo resume from the last complete checkpoint, add --output_dir {run} --resume auto to the command."
    kind = shortage(error)
    if isinstance(error, LostRank):
        yield str(error) + textwrap.indent(hint, INDENT)
    elif isinstance(error, UserError):
        yield str(error)
    elif kind is not None:
        memory = "host" if kind == "host" else "GPU"
        what = f"ran out of {memory} memory: {str(error).strip() or type(error).__name__}"
        if explainer is not None:
            what = _explained(partial(explainer.describe, error), what)
        yield str(RunFailure(f"rank {rank} {what}"))
        if explainer is not None:
            advice = _explained(partial(explainer.advise, error), "No advice")
            yield textwrap.indent(advice, INDENT)
    elif _is_broken(error):
        what = f"lost contact with another rank, whose exit code is in torchrun's report: {error}\n{KILLED_BY}{hint}"
        yield str(RunFailure(f"rank {rank} {what}"))
    elif FILE_LIMIT in text_of(error).lower():
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        what = f"has too many open files; the limit is {limit}: {text_of(error)}"
        yield str(RunFailure(f"rank {rank} {what}\nRaise the limit: ulimit -n 65536.{hint}"))
    elif isinstance(error, OSError) and is_disk_full(error):
        place = error.filename or run or "a file"
        yield str(RunFailure(f"rank {rank} could not write {place}: {error.strerror}.{hint}"))
    else:
        lines = "".join(traceback.format_exception(error))
        yield f"{lines}error: rank {rank} failed: {type(error).__name__}: {text_of(error)}"


def _explained(explain: Callable[[], str], otherwise: str = "") -> str:
    """Return what `explain` returns. If it raises, return `otherwise` and a note on that error."""
    try:
        return explain()
    except Exception as error:
        why = f"(It could not be explained: {type(error).__name__}: {error})"
        return f"{otherwise}\n{why}".lstrip("\n")
