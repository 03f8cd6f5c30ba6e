"""A thread on each rank that finds ranks which hang or have ended, and ends the job with a message
that names them.

A rank that waits in a collective can be recognized: its main thread does not move and starts no
further collective. Every two seconds the watchdog writes what it sees to the rendezvous store; a
training step does nothing for it. If a rank has waited for the timeout, its watchdog reads the
other reports. If a report is old, that rank is stopped or dead. If a rank does not wait, it hangs
in its own code, at the line in its report.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llama_ft.errors import LostRank
from llama_ft.runtime.ends.exit import FAILURE_KEY
from llama_ft.runtime.ends.out_of_memory import KILLED, KILLED_BY, host_memory
from llama_ft.runtime.shared_memory import SharedMemory

POLL_SECONDS = 2.0
SILENCE_SECONDS = 5.0
# NCCL's own timeout ends a process with a dump that does not name the missing rank
SECONDS_AFTER_WATCHDOG = 60.0
TORCH = str(Path(torch.__file__).parent) + os.sep
RUNTIME = str(Path(__file__).parent.parent) + os.sep
GLOO = str(Path(__file__).parent.parent.parent / "cpu" / "gloo.py")
# A rank waits for others where the innermost line is in one of these.
COLLECTIVES = (f"{TORCH}distributed{os.sep}", f"{RUNTIME}shared_memory.py", GLOO)
# beginnings of file names whose lines are not the cause of a hang
SKIPPED_FRAMES = (TORCH, RUNTIME, GLOO, contextlib.__file__, "<frozen")


class Report(NamedTuple):
    """What the watchdog of a rank sees, and when."""

    time: float
    host: str
    pid: int
    waits: bool  # its main thread waits
    collectives: int  # collectives started and signals sent so far
    place: str  # source line of its main thread


class Watchdog(threading.Thread):
    """Watches this process's main thread inside a `with` block. Every rank has one.

    Args:
        store: this attempt's store.
        mesh: the mesh whose process groups are watched.
        seconds: how long a rank may wait for others.
        end: ends this process after an error; any thread may call it.
    """

    def __init__(
        self,
        store: dist.Store,
        mesh: DeviceMesh,
        seconds: float,
        end: Callable[[BaseException], NoReturn],
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._store = store.clone()  # type: ignore[attr-defined]  # the main thread may be waiting on the other one
        # for the report of a rank that has ended before its first one
        self._store.set_timeout(timedelta(seconds=seconds + SECONDS_AFTER_WATCHDOG))
        # by name, because a mesh of all ranks uses the world's group
        groups = dict[str, dist.ProcessGroup]()
        for group in (dist.group.WORLD, *mesh.get_all_groups()):
            if group:
                groups[group.group_name] = group
        self._groups = list(groups.values())
        # This thread's own current GPU would be number 0.
        self._gpu = torch.cuda.current_device() if mesh.device_type == "cuda" else None
        self._seconds = seconds
        self._end = end
        self._processes = dict[int, int]()  # rank of this node -> process id
        self._watched = threading.get_ident()  # usually the main thread
        self._ended = threading.Event()
        self._state = object()
        self._since = time.monotonic()  # when this state was first seen

    def __enter__(self) -> None:
        self._look()
        first = dist.get_rank() - int(os.environ.get("LOCAL_RANK", 0))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        for rank in range(first, first + count):
            self._processes[rank] = self._report(rank).pid
        self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the thread. Python aborts a process that exits while a thread is inside the store's
        C++ code."""
        self._ended.set()
        self.join(SILENCE_SECONDS)

    def run(self) -> None:
        """Check every two seconds until the store and its host are gone; then torchrun ends this
        rank."""
        with contextlib.suppress(RuntimeError, ConnectionError):
            while not self._ended.wait(min(POLL_SECONDS, self._seconds / 10)):
                self._look()
                # NCCL does not tell a rank that waits on its GPU about a peer's end
                lost = self.describe_lost()
                has_failed = bool(lost) or self._store.check([FAILURE_KEY])
                if has_failed and not self._ended.is_set():
                    self._end(LostRank(f"lost contact with another rank: {lost}"))

    def describe_lost(self) -> str:
        """Return a message about a rank of this node that has ended; "" if none has."""
        for rank, pid in self._processes.items():
            if _has_ended(pid):
                why = f"most likely {KILLED}. {KILLED_BY}\n{host_memory() or ''}"
                return f"rank {rank} (process {pid}) has ended, {why}"
        return ""

    def _look(self) -> None:
        """Write this rank's report to the store, and end the process if it has waited for too
        long."""
        now = time.monotonic()
        frame = sys._current_frames()[self._watched]
        rank = dist.get_rank()
        collectives = SharedMemory.signals_sent
        for group in self._groups:
            collectives += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        state = self._state_at(frame, collectives)
        if state != self._state:
            self._state = state
            self._since = now
        waited_seconds = now - self._since
        report = Report(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            waits=waited_seconds > self._seconds / 2,
            collectives=collectives,
            place=place(frame),
        )
        self._store.set(f"watchdog/{rank}", json.dumps(report))
        if waited_seconds > self._seconds:
            reports = [self._report(rank) for rank in range(dist.get_world_size())]
            self._end(LostRank(describe_hang(reports, rank, self._seconds)))

    def _report(self, rank: int) -> Report:
        return Report(*json.loads(self._store.get(f"watchdog/{rank}")))

    def _state_at(self, frame: FrameType | None, collectives: int) -> object:
        """Return a state that stays equal only while this rank waits.

        CUDA collectives are queued, and the host waits for them at any line that reads a number. So
        with CUDA the state is the current line and the number of allocations: any computation
        allocates memory.
        """
        # a line of `threading` waits for a thread, not for the device
        is_on_gpu = self._gpu is not None
        if frame and is_on_gpu and frame.f_code.co_filename != threading.__file__:
            allocations = torch.cuda.memory_stats(self._gpu).get("allocation.all.allocated", 0)
            return collectives, allocations, id(frame), frame.f_lasti
        while frame is not None and frame.f_code.co_filename.startswith((TORCH, *COLLECTIVES)):
            if frame.f_code.co_filename.startswith(COLLECTIVES):
                return collectives
            frame = frame.f_back
        return object()


def _has_ended(pid: int) -> bool:
    """Return whether there is no such process. (/proc may be hidden.)"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user
        return False
    return False


def describe_hang(reports: Sequence[Report], asker: int, seconds: float) -> str:
    """Return a message that names the missing ranks, from the reports of all ranks. Rank `asker` is
    waiting."""
    furthest = max(report.collectives for report in reports)
    missing = [rank for rank, report in enumerate(reports) if not report.waits]
    if not missing:
        # All ranks wait. Those with fewer collectives are behind the others.
        missing = [rank for rank, report in enumerate(reports) if report.collectives < furthest]
    if missing:
        names = ", ".join(map(str, missing))
        head = f"rank {names} did not arrive; the others have waited"
        described = missing
    else:
        head = "all ranks wait"
        described = [rank for rank in range(len(reports)) if rank != asker]
    lines = [
        f"{head} for {seconds:g} s (--collective_timeout).",
        f"rank {asker} waits at {reports[asker].place}",
    ]
    for rank in described[:8]:
        report = reports[rank]
        is_silent = report.time < reports[asker].time - SILENCE_SECONDS
        if is_silent:
            state = "does not respond: it is suspended or has ended"
        else:
            state = f"is at {report.place}"
        lines.append(f"rank {rank} ({report.host}, pid {report.pid}) {state}")
    return "\n".join(lines)


def place(frame: FrameType | None) -> str:
    """Return the innermost line outside torch and the runtime, as `file:line in function`."""
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED_FRAMES):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
