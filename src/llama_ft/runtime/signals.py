"""How a run is asked to stop: SIGTERM, SIGHUP, Ctrl-C or --stop_after; the training loop ends between two steps.

Outside the loop a signal ends the process at once. Inside, it is noted; every rank puts `asked()` among the numbers
that are gathered once per step, and `agreed()` of that column is the same on all of them.

Python runs signal handlers in the main thread between bytecodes: a rank that waits for others inside gloo or NCCL does
not see its own. So a thread reads the numbers of signals from a socket that CPython's C handler writes to. It ends the
process by itself if the main thread cannot: when another rank is gone (NCCL may then wait for ever), and at a second
Ctrl-C.

What torchrun 2.13 sends: ranks have sessions of their own, so a terminal's Ctrl-C reaches torchrun alone, which sends
SIGINT on, and SIGTERM at a second one (`run` in torch/distributed/elastic/agent/server/api.py); so with the SIGHUP of a
terminal that goes away, which it takes even under nohup. When a rank has died and was reaped, the others get SIGTERM.
SIGKILL follows 30 s later, or after torchrun's --shutdown-timeout.
"""

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from llama_ft.config import parse_duration
from llama_ft.errors import LostRank
from llama_ft.runtime.exit import Stop, Stopped
from llama_ft.runtime.out_of_memory import KILLED, explain_kill, kernel_kills

SIGNALS: dict[int, Stop] = {
    signal.SIGTERM: Stop(143, "SIGTERM"),
    signal.SIGINT: Stop(130, "Ctrl-C"),
    signal.SIGHUP: Stop(129, "SIGHUP"),
}
TIME_IS_UP = 0.5  # in the gathered column; smaller than the number of any signal (SIGHUP is 1), which goes first
TORCHRUN_GRACE_SECONDS = 30
SECONDS_OF_ONE_CTRL_C = 0.5  # launchers may deliver the same Ctrl-C twice
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_SEE_AN_END = 0.3  # torchrun reaps a rank, and its exit code with it, within 0.1 s of its end
SECONDS_TO_REACT, SECONDS_TO_CLOSE = 2.0, 20.0  # outside the loop: to leave C++, and then to close trackers
_IMPORTED = time.monotonic()


class Peers:
    """The other ranks of this node: whether one has ended; and how, until torchrun reaps it.

    Args:
        rank: this process's.
        world_size: of the job.
        store: which all ranks share; every rank makes its Peers at the same point.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        node = os.environ.get("GROUP_RANK") or socket.gethostname()  # torchrun's number of its agent
        store.set(f"process/{rank}", f"{os.getpid()} {node}")
        others = [number for number in range(world_size) if number != rank]
        places = [text.decode().split(" ", 1) for text in store.multi_get([f"process/{n}" for n in others])]
        self._pids = {n: int(pid) for n, (pid, place) in zip(others, places, strict=True) if place == node}

    def gone(self) -> str:
        """Which rank has ended, for people; "" if none has."""
        for rank, pid in self._pids.items():
            if end := _end_of(pid):
                return f"rank {rank} (process {pid}) {end}"
        return ""


class StopSignals:
    """Whether this process is asked to stop.

    Attributes:
        told_to_end: set by the first of SIGNALS.
        peers: the other ranks; None on one process.
    """

    def __init__(self) -> None:
        self.told_to_end = threading.Event()
        self.peers: Peers | None = None
        self._earlier_kills = kernel_kills()
        self._phase: Literal["at once", "between steps", "closing"] = "at once"
        self._error: BaseException | None = None  # what this process is ending with
        self._signal, self._signal_time = 0, math.inf
        self._stop_after, self._deadline = "", math.inf

    @contextmanager
    def listening(self, end: Callable[[BaseException], NoReturn]) -> Iterator[None]:
        """Take SIGNALS while the block runs; from its thread, `end` ends the process after an error."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}  # by nohup
        handlers = {number: signal.signal(number, self._interrupt) for number in SIGNALS.keys() - ignored}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def forget() -> None:  # a forked process must not report its own signals through our socket
            if reader.fileno() >= 0:
                signal.set_wakeup_fd(-1)
                for number in handlers:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

        os.register_at_fork(after_in_child=forget)
        thread = threading.Thread(target=self._watch, args=(reader, end), name="stopping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            writer.close()
            thread.join()
            reader.close()

    @contextmanager
    def between_steps(self, stop_after: str | None) -> Iterator[None]:
        """Let what asks to stop wait for `agreed` while the block, the training loop, runs.

        Args:
            stop_after: --stop_after. The run stops at the end of the first step that ends later; the time counts from
                the start of torchrun, or of this process without it. Writing the checkpoint comes on top.
        """
        if stop_after is not None:
            self._stop_after = stop_after
            self._deadline = time.monotonic() + parse_duration(stop_after) - seconds_running()
        self._phase = "between steps"
        try:
            yield
        except BaseException as error:
            if isinstance(error, Stopped):
                dist.barrier()  # a rank that leaves earlier would be taken for one that died during the save
            self._error, self._phase = error, "closing"
            raise
        self._phase = "at once"
        if self._signal:
            self._interrupt(self._signal, None)

    def asked(self) -> float:
        """What asks this rank to stop, as a number to gather from all ranks; 0: nothing."""
        return self._signal or (TIME_IS_UP if time.monotonic() > self._deadline else 0)

    def agreed(self, asked: torch.Tensor) -> Stop | None:
        """Why all ranks stop after this step, if they do.

        Args:
            asked: every rank's `asked()`.
        """
        number = float(asked.max())
        return None if number == 0 else SIGNALS.get(int(number)) or Stop(0, f"--stop_after {self._stop_after}")

    def closing(self, error: BaseException) -> BaseException:
        """From now on nothing interrupts the main thread, which ends with what is returned."""
        if self._phase == "at once" and isinstance(error, Stopped) and self.peers and (gone := self.peers.gone()):
            error = self._lost(gone)  # SIGTERM is how torchrun says that another rank has failed
        self._error, self._phase = error, "closing"
        return error

    def about_lost(self) -> str:
        """Which rank has ended and how, after a connection broke; "" if no rank of this node has."""
        deadline = time.monotonic() + SECONDS_TO_SEE_AN_END
        while self.peers is not None and time.monotonic() < deadline:
            if gone := self.peers.gone():
                return self._describe(gone)
            time.sleep(0.01)
        return ""

    def _describe(self, gone: str) -> str:
        if KILLED not in gone and kernel_kills() > self._earlier_kills:
            gone += f", most likely {KILLED}"
        where = "" if KILLED in gone else "Its exit code is in torchrun's report. "
        return f"{gone}.\n{where}{explain_kill(self._earlier_kills)}"

    def _lost(self, gone: str) -> LostRank:
        return LostRank(f"lost contact with another rank: {self._describe(gone)}")

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        """The handler of all SIGNALS, in the main thread."""
        if self._phase == "at once" and self._error is None:
            self._error = KeyboardInterrupt() if number == signal.SIGINT else Stopped(SIGNALS[number])
            raise self._error

    def _watch(self, signals: socket.socket, end: Callable[[BaseException], NoReturn]) -> None:
        looks_without_peer = 0
        while True:
            if select.select([signals], [], [], SECONDS_BETWEEN_LOOKS if self._signal else None)[0]:
                numbers = signals.recv(64)
                if not numbers:
                    return
                for number in SIGNALS.keys() & set(numbers):  # whatever else has a handler in Python comes here, too
                    self._note(number, end)
            if self._phase == "at once":
                limit = SECONDS_TO_REACT if self._error is None else SECONDS_TO_CLOSE
                if self._signal and time.monotonic() > self._signal_time + limit:
                    end(self._error or Stopped(SIGNALS[self._signal]))
            elif self._phase == "between steps" and self._signal and self.peers is not None:
                gone = self.peers.gone()
                looks_without_peer = looks_without_peer + 1 if gone else 0
                if looks_without_peer == 2:  # at one look, all may be leaving the loop
                    end(self._lost(gone))

    def _note(self, number: int, end: Callable[[BaseException], NoReturn]) -> None:
        if not self._signal:
            self._signal, self._signal_time = number, time.monotonic()
            self.told_to_end.set()  # the last: who waits for it may ask which signal it was
            return
        # SIGTERM may come twice to a healthy rank: from a batch system and, forwarded, from torchrun.
        after_ctrl_c = self._signal == signal.SIGINT and dist.is_torchelastic_launched()
        is_person = number == signal.SIGINT or after_ctrl_c
        if is_person and time.monotonic() > self._signal_time + SECONDS_OF_ONE_CTRL_C:
            end(self._error or Stopped(Stop(130, "a second Ctrl-C, without saving")))


def seconds_running() -> float:
    """Since torchrun started, whose restarts of the ranks take from the same time; without it, since this process."""
    process = os.getppid() if dist.is_torchelastic_launched() else os.getpid()
    try:
        started = int(_stat(process)[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:  # no /proc
        return time.monotonic() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def grace_warning(seconds: float) -> str | None:
    """What to tell people whose saves take so many seconds, if torchrun would kill ranks in the middle of one."""
    given = bool({"PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"} & os.environ.keys())
    with suppress(OSError):
        given |= "--shutdown" in Path(f"/proc/{os.getppid()}/cmdline").read_text()
    if seconds < TORCHRUN_GRACE_SECONDS or given or not dist.is_torchelastic_launched():
        return None
    return (
        f"A save took {seconds:.0f} s, but torchrun kills its ranks {TORCHRUN_GRACE_SECONDS} s after it was told to "
        "stop:\nthe checkpoint of a run stopped by SIGTERM, SIGHUP or Ctrl-C would be lost.\n"
        f"torchrun --shutdown-timeout {math.ceil(2 * seconds / 10) * 10} gives it time (torch 2.12 or newer)."
    )


def _stat(process: int) -> list[str]:
    """Fields of /proc/<process>/stat from the third, the state, on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _end_of(process: int) -> str:
    """How a process has ended; "" if it has not, or without /proc."""
    try:
        state, *_, status = _stat(process)
    except OSError:
        return "has ended" if Path("/proc/self").exists() else ""
    if state not in "ZX":
        return ""
    # Dead, and not yet reaped by torchrun. The last field is what wait() will say; 0 to other users.
    return f"was {KILLED}" if int(status) & 0x7F == signal.SIGKILL else "has ended"
