"""Requests to stop a run: SIGTERM, SIGHUP, Ctrl-C or --stop_after. The training loop stops between
two steps. SIGUSR1 requests a checkpoint without a stop.

Outside the loop a signal ends the process at once. Inside the loop it is only stored: every rank
gathers `request()` with its other numbers once per step, and `agreed()` of the gathered column gives
the same answer on all ranks. An evaluation gathers it between batches, and sample answers between
tokens (Ranks.check_stop).

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
from llama_ft.processes import PARENT
from llama_ft.runtime.console import log
from llama_ft.runtime.ends.exit import Stop, Stopped

# exit codes as shells count them
SIGNALS: dict[int, Stop] = {
    signal.SIGTERM: Stop(128 + signal.SIGTERM, "SIGTERM"),
    signal.SIGINT: Stop(128 + signal.SIGINT, "Ctrl-C"),
    signal.SIGHUP: Stop(128 + signal.SIGHUP, "SIGHUP"),
}
# in the gathered column; a signal wins, because its number is larger (SIGHUP is 1)
STOP_AFTER_CODE = 0.5
_IMPORTED = time.monotonic()
CTRL_C_REPEAT_SECONDS = 0.5  # launchers may deliver one Ctrl-C twice
POLL_SECONDS = 0.25
# outside the loop: time to return from C++, then to close trackers
REACTION_SECONDS = 2.0
SECONDS_TO_CLOSE = 20.0


class StopSignals:
    """The requests to stop this process, or to save."""

    def __init__(self) -> None:
        self.end_requested = threading.Event()  # set by the first signal
        self.save_requested = threading.Event()  # set by SIGUSR1
        # called after the first signal, in a thread; it must not wait
        self.at_request: Callable[[], None] = lambda: None
        self._phase: Literal["at once", "between steps", "closing"] = "at once"
        self._error: BaseException | None = None  # the error that is ending this process
        self._signal = 0
        self._signal_time = math.inf
        self._stop_after = ""
        self._deadline = math.inf
        self._saves = True

    @contextmanager
    def listening(self, end: Callable[[BaseException], NoReturn]) -> Iterator[None]:
        """Handle SIGNALS and SIGUSR1 while the block runs. `end` ends the process after an error; a
        thread may call it. Outside of the main thread, where Ray Train runs a recipe, Python allows
        no handlers, and this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        handled = set(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            handled.remove(signal.SIGHUP)
        earlier = {number: signal.signal(number, self._interrupt) for number in handled}
        earlier[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_save)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def forget() -> None:  # a forked process must not report its signals through our socket
            if reader.fileno() >= 0:
                signal.set_wakeup_fd(-1)
                for number in handled:
                    is_ctrl_c = number == signal.SIGINT
                    default = signal.default_int_handler if is_ctrl_c else signal.SIG_DFL
                    signal.signal(number, default)

        os.register_at_fork(after_in_child=forget)
        thread = threading.Thread(
            target=self._watch, args=(reader, end), name="stopping", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in earlier.items():
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

    def request(self) -> float:
        """Return a number to gather from all ranks: the request to stop this rank, or 0 if there is
        none."""
        if self._signal:
            return self._signal
        return STOP_AFTER_CODE if time.monotonic() > self._deadline else 0

    def agreed(self, requests: torch.Tensor) -> Stop | None:
        """Return why all ranks must stop after this step, or None. `requests` holds every rank's
        `request()`, [world_size]."""
        number = float(requests.max())
        if number == 0:
            return None
        stop_after = Stop(0, f"--stop_after {self._stop_after}")
        return SIGNALS.get(int(number), stop_after)  # int(STOP_AFTER_CODE) is not a signal

    def seconds_left(self, grace_seconds: float) -> float:
        """Return how much of `grace_seconds` is left since the first signal, or all of it."""
        waited = max(0.0, time.monotonic() - self._signal_time)  # 0 without a signal here
        return max(0.0, grace_seconds - waited)

    def closing(self, error: BaseException) -> None:
        """Stop interrupting the main thread, which is ending with an error."""
        self._error = error
        self._phase = "closing"

    def _request_save(self, *_: object) -> None:
        self.save_requested.set()

    def _interrupt(self, number: int, *_: object) -> None:
        """Handle any of SIGNALS in the main thread."""
        if self._phase == "at once" and self._error is None:
            is_ctrl_c = number == signal.SIGINT
            self._error = KeyboardInterrupt() if is_ctrl_c else Stopped(SIGNALS[number])
            raise self._error

    def _watch(
        self,
        signals: socket.socket,
        end: Callable[[BaseException], NoReturn],
    ) -> None:
        """Read signals from the socket until its other end is closed. End the process if the main
        thread does not."""
        while True:
            # Without a signal there is nothing to time, so the thread sleeps.
            timeout = POLL_SECONDS if self._signal else None
            is_ready = select.select([signals], [], [], timeout)[0]
            numbers = signals.recv(64) if is_ready else b""
            if is_ready and not numbers:
                return
            waited = time.monotonic() - self._signal_time  # -inf before the first signal
            for number in SIGNALS.keys() & set(numbers):  # the socket also gets other signals
                if not self._signal:
                    self._record_first(number)
                # A healthy rank may get SIGTERM twice. After Ctrl-C it means that torchrun got a
                # second Ctrl-C.
                elif signal.SIGINT in (number, self._signal) and waited > CTRL_C_REPEAT_SECONDS:
                    end(self._error or Stopped(Stop(130, "a second Ctrl-C, without saving")))
            patience = REACTION_SECONDS if self._error is None else SECONDS_TO_CLOSE
            if self._phase == "at once" and waited > patience:
                end(self._error or Stopped(SIGNALS[self._signal]))

    def _record_first(self, number: int) -> None:
        """Store the first signal, and announce a Ctrl-C that waits for the end of the step."""
        self._signal = number
        self._signal_time = time.monotonic()
        # set last: a thread that waits for it may then read which signal it was
        self.end_requested.set()
        self.at_request()
        # SIGTERM can also mean that another rank has died: then nothing can be saved.
        if self._phase == "between steps" and number == signal.SIGINT:
            saves = "saves a checkpoint" if self._saves else "saves no checkpoint"
            text = (
                f"Ctrl-C: the run finishes the current step, {saves} and exits. "
                "A second Ctrl-C exits at once without saving."
            )
            # in a thread: this one must see a second Ctrl-C, also if the output blocks
            writer = threading.Thread(target=log.warning, args=(text,), daemon=True)
            writer.start()


def seconds_running() -> float:
    """Return the seconds since torchrun started (restarts do not reset them), or since this process
    started."""
    process = PARENT.id if dist.is_torchelastic_launched() else os.getpid()
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # torchrun was killed, or /proc is hidden
        return time.monotonic() - _IMPORTED
    # after the command's name in parentheses; see `man 5 proc`
    fields = stat.rpartition(")")[2].split()
    start_ticks = int(fields[19])  # since boot
    start_seconds = start_ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
