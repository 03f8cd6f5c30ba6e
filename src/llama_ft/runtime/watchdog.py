"""A thread on each rank that finds ranks which hang or have ended, and ends the job naming them.

A rank that waits in a collective shows it: its main thread stays where it is and it begins no further collective. Every
two seconds each rank's watchdog writes to the rendezvous store what it sees, and nothing is done per step. When a rank
has waited for the time-out, its watchdog reads what the others have written. A rank whose watchdog writes no more is
stopped or gone; one that does not wait hangs in its own code, at the line that its watchdog wrote.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llama_ft.errors import LostRank
from llama_ft.runtime.exit import FAILURE_KEY
from llama_ft.runtime.out_of_memory import KILLED, KILLED_BY, host_memory

SECONDS_BETWEEN_LOOKS, SECONDS_OF_SILENCE = 2.0, 5.0
TORCH = str(Path(torch.__file__).parent) + os.sep
SKIPPED_FRAMES = (TORCH, str(Path(__file__).parent) + os.sep, contextlib.__file__, "<frozen")  # whose lines say nothing


class Report(NamedTuple):
    """What a rank's watchdog sees, and when."""

    time: float
    host: str
    pid: int
    waits: bool  # its main thread
    collectives: int  # begun so far
    place: str  # of its main thread


class Watchdog(threading.Thread):
    """Watches this process's main thread inside a `with` block; every rank has one.

    Args:
        store: this attempt's store.
        mesh: on whose process groups ranks wait for each other.
        seconds: how long a rank may wait for others.
        end: ends this process after an error, from any thread.
    """

    def __init__(
        self, store: dist.Store, mesh: DeviceMesh, seconds: float, end: Callable[[BaseException], NoReturn]
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._store = store.clone()  # type: ignore[attr-defined]  # the main thread may be waiting on the other one
        groups = {group.group_name: group for group in (dist.group.WORLD, *mesh.get_all_groups()) if group}
        self._groups, self._device, self._seconds, self._end = [*groups.values()], mesh.device_type, seconds, end
        self._processes, self._ended = dict[int, int](), threading.Event()
        self._state, self._since = object(), time.monotonic()  # when it was first seen

    def __enter__(self) -> None:
        self._look()
        first = dist.get_rank() - int(os.environ.get("LOCAL_RANK", 0))
        here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self._processes = {rank: self._report(rank).pid for rank in here}  # of this node
        self.start()

    def __exit__(self, *_: object) -> None:
        """Python aborts a process that ends while a thread is inside the store's C++."""
        self._ended.set()
        self.join(SECONDS_OF_SILENCE)

    def run(self) -> None:
        """Look again and again, until the store is gone with its host: then torchrun ends the rank."""
        with contextlib.suppress(RuntimeError, ConnectionError):
            while not self._ended.wait(min(SECONDS_BETWEEN_LOOKS, self._seconds / 10)):
                self._look()
                lost = self.describe_lost()  # a rank that waits on its GPU for others hears nothing of their end
                if (lost or self._store.check([FAILURE_KEY])) and not self._ended.is_set():
                    self._end(LostRank(f"lost contact with another rank: {lost}"))

    def describe_lost(self) -> str:
        """Which rank of this node has ended, for people; "" if none has."""
        for rank, pid in self._processes.items():
            if not Path(f"/proc/{pid}").exists():
                why = f"most likely {KILLED}. {KILLED_BY}\n{host_memory() or ''}"
                return f"rank {rank} (process {pid}) has ended, {why}"
        return ""

    def _look(self) -> None:
        now, frame, rank = time.monotonic(), sys._current_frames()[threading.main_thread().ident or 0], dist.get_rank()
        collectives = sum(group._get_sequence_number_for_group() for group in self._groups)  # type: ignore[attr-defined]
        if (state := self._state_at(frame, collectives)) != self._state:
            self._state, self._since = state, now
        waits = now - self._since
        report = (time.time(), socket.gethostname(), os.getpid(), waits > self._seconds / 2, collectives, place(frame))
        self._store.set(f"watchdog/{rank}", json.dumps(report))
        if waits > self._seconds:
            reports = [self._report(rank) for rank in range(dist.get_world_size())]
            self._end(LostRank(describe_hang(reports, rank, self._seconds)))

    def _report(self, rank: int) -> Report:
        return Report(*json.loads(self._store.get(f"watchdog/{rank}")))

    def _state_at(self, frame: FrameType | None, collectives: int) -> object:
        """What stays equal only while this rank waits.

        With CUDA collectives are queued, and waited for at any line that needs a number on the host: so there it is the
        line, and that no memory has been allocated meanwhile, which all computing does.
        """
        if frame and self._device == "cuda" and frame.f_code.co_filename != threading.__file__:  # for a thread
            allocations = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
            return collectives, allocations, id(frame), frame.f_lasti
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            if frame.f_code.co_filename.startswith(f"{TORCH}distributed{os.sep}"):
                return collectives
            frame = frame.f_back
        return object()


def describe_hang(reports: Sequence[Report], asker: int, seconds: float) -> str:
    """The message that names the ranks which did not arrive, by every rank's newest report; rank `asker` waits."""
    furthest = max(report.collectives for report in reports)
    missing = [rank for rank, report in enumerate(reports) if not report.waits]
    # If each waits for another, those with fewer collectives have not come as far as the others.
    missing = missing or [rank for rank, report in enumerate(reports) if report.collectives < furthest]
    names = ", ".join(map(str, missing))
    head = f"rank {names} did not arrive; the others have waited" if missing else "all ranks wait"
    lines = [f"{head} for {seconds:g} s (--collective_timeout).", f"rank {asker} waits at {reports[asker].place}"]
    for rank in (missing or [rank for rank in range(len(reports)) if rank != asker])[:8]:
        report = reports[rank]
        is_silent = report.time < reports[asker].time - SECONDS_OF_SILENCE
        state = "does not respond: it is suspended or has ended" if is_silent else f"is at {report.place}"
        lines.append(f"rank {rank} ({report.host}, pid {report.pid}) {state}")
    return "\n".join(lines)


def place(frame: FrameType | None) -> str:
    """The innermost line outside torch and the runtime, as `file:line in function`."""
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED_FRAMES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown line"
