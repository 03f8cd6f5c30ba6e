"""Requests to stop a run: SIGTERM, SIGHUP, Ctrl-C or --stop_after. The training loop stops between
two steps.

Outside the loop a signal ends the process at once. Inside the loop it is only stored: every rank
gathers `asked()` with its other numbers once per step, and `agreed()` of the gathered column gives
the same answer on all ranks. An evaluation gathers it between batches, and sample answers between
tokens (Runtime.check_stop).

A rank that waits for others inside gloo or NCCL does not run Python's signal handlers. So a thread
reads the signal numbers from a socket that CPython's C handler writes to. The thread ends the
process if the main thread cannot, and at a second Ctrl-C.
"""

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from llama_ft.config import parse_duration
from llama_ft.runtime.console import log
from llama_ft.runtime.exit import Stop, Stopped

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
SIGNALS: dict[int, Stop] = {number: Stop(128 + number, name) for number, name in NAMES.items()}
# in the gathered column; a signal wins, because its number is larger (SIGHUP is 1)
TIME_IS_UP = 0.5
SECONDS_OF_ONE_CTRL_C = 0.5  # launchers may deliver one Ctrl-C twice
SECONDS_BETWEEN_LOOKS = 0.25
# outside the loop: time to return from C++, then to close trackers
SECONDS_TO_REACT = 2.0
SECONDS_TO_CLOSE = 20.0


class StopSignals:
    """The requests to stop this process."""

    def __init__(self) -> None:
        self.end_requested = threading.Event()  # set by the first signal
        self._phase: Literal["at once", "between steps", "closing"] = "at once"
        self._error: BaseException | None = None  # the error that is ending this process
        self._signal = 0
        self._signal_time = math.inf
        self._stop_after = ""
        self._deadline = math.inf
        self._saves = True

    @contextmanager
    def listening(self, end: Callable[[BaseException], NoReturn]) -> Iterator[None]:
        """Handle SIGNALS while the block runs. `end` ends the process after an error; a thread may
        call it."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # by nohup
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        handlers = {
            number: signal.signal(number, self._interrupt) for number in SIGNALS.keys() - ignored
        }
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def forget() -> None:  # a forked process must not report its signals through our socket
            if reader.fileno() >= 0:
                signal.set_wakeup_fd(-1)
                for number in handlers:
                    signal.signal(
                        number,
                        signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                    )

        os.register_at_fork(after_in_child=forget)
        thread = threading.Thread(
            target=self._watch, args=(reader, end), name="stopping", daemon=True
        )
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
    def between_steps(self, stop_after: str | None, saves: bool = True) -> Iterator[None]:
        """Until the block ends, a signal or --stop_after does not interrupt: it waits for the next
        call of `agreed`. `saves`: then a checkpoint is saved."""
        self._saves = saves
        if stop_after is not None:
            self._stop_after = stop_after
            self._deadline = time.monotonic() + parse_duration(stop_after) - seconds_running()
        self._phase = "between steps"
        try:
            yield
        except BaseException as error:
            self.closing(error)
            raise
        self._phase = "at once"
        if self._signal:
            self._interrupt(self._signal)

    def asked(self) -> float:
        """Return a number to gather from all ranks: the request to stop this rank, or 0 if there is
        none."""
        return self._signal or (TIME_IS_UP if time.monotonic() > self._deadline else 0)

    def agreed(self, asked: torch.Tensor) -> Stop | None:
        """Return why all ranks must stop after this step, or None. `asked` holds every rank's
        `asked()`, [world_size]."""
        number = float(asked.max())
        return (
            None
            if number == 0
            else SIGNALS.get(int(number)) or Stop(0, f"--stop_after {self._stop_after}")
        )

    def closing(self, error: BaseException) -> None:
        """Stop interrupting the main thread, which is ending with an error."""
        self._error = error
        self._phase = "closing"

    def _interrupt(self, number: int, *_: object) -> None:
        """Handle any of SIGNALS in the main thread."""
        if self._phase == "at once" and self._error is None:
            self._error = (
                KeyboardInterrupt() if number == signal.SIGINT else Stopped(SIGNALS[number])
            )
            raise self._error

    def _watch(self, signals: socket.socket, end: Callable[[BaseException], NoReturn]) -> None:
        while True:
            is_ready = select.select(
                [signals], [], [], SECONDS_BETWEEN_LOOKS if self._signal else None
            )[0]
            numbers = signals.recv(64) if is_ready else b""
            if is_ready and not numbers:
                return
            waited = time.monotonic() - self._signal_time  # -inf before the first signal
            for number in SIGNALS.keys() & set(numbers):  # the socket also gets other signals
                if not self._signal:
                    self._signal = number
                    self._signal_time = time.monotonic()
                    # set last: a thread that waits for it may then read which signal it was
                    self.end_requested.set()
                    # SIGTERM can also mean that another rank has died: then nothing can be saved.
                    if self._phase == "between steps" and number == signal.SIGINT:
                        # in a thread: this one must see a second Ctrl-C, also if the output blocks
                        saves = "saves a checkpoint" if self._saves else "saves no checkpoint"
                        text = (
                            f"Ctrl-C: the run finishes the current step, {saves} and exits. "
                            "A second Ctrl-C exits at once without saving."
                        )
                        threading.Thread(target=log.warning, args=(text,), daemon=True).start()
                # A healthy rank may get SIGTERM twice. After Ctrl-C it means that torchrun got a
                # second Ctrl-C.
                elif signal.SIGINT in (number, self._signal) and waited > SECONDS_OF_ONE_CTRL_C:
                    end(self._error or Stopped(Stop(130, "a second Ctrl-C, without saving")))
            if self._phase == "at once" and waited > (
                SECONDS_TO_REACT if self._error is None else SECONDS_TO_CLOSE
            ):
                end(self._error or Stopped(SIGNALS[self._signal]))


def seconds_running() -> float:
    """Return the seconds since torchrun started (restarts do not reset them), or since this process
    started."""
    process = os.getppid() if dist.is_torchelastic_launched() else os.getpid()
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
