"""A thread on each rank that finds ranks which hang, and ends the job naming them.

A rank that waits in a collective shows it: its main thread stays where it is and it begins no further collective. Every
two seconds each rank's watchdog writes to the rendezvous store what it sees, and nothing is done per step. When a rank
has waited for the time-out, its watchdog reads what the others write. A rank whose watchdog writes no more is stopped
or gone; one that does not wait hangs in its own code, at the line that its watchdog wrote.
"""

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from llama_ft.errors import LostRank
from llama_ft.runtime.exit import FAILURE_KEY, wait_to_be_ended

SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_TO_ANSWER = 5.0
MOST_NAMED = 8
TORCH = str(Path(torch.__file__).parent) + os.sep
SKIPPED_FRAMES = (TORCH, str(Path(__file__).parent) + os.sep, contextlib.__file__, "<frozen")  # whose lines say nothing


@dataclass(frozen=True)
class Report:
    """What a rank's watchdog sees: whether the main thread waits, after how many collectives, and where it is; and how
    often the watchdog has looked."""

    waits: bool
    collectives: int
    place: str
    looks: int = 0


class Watchdog(threading.Thread):
    """Watches this process's main thread inside a `with` block; every rank has one.

    Args:
        store: this attempt's store.
        groups: the process groups whose collectives count.
        device: where this process computes.
        seconds: how long a rank may wait for others.
        end: ends this process after an error, from any thread.
    """

    def __init__(
        self,
        store: dist.Store,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        seconds: float,
        end: Callable[[BaseException], NoReturn],
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        # A connection of its own: the main thread may be waiting on the other one.
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._groups, self._device, self._seconds, self._end = groups, device, seconds, end
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._ended = threading.Event()
        self._state: object = None
        self._since = time.monotonic()  # when `_state` was first seen
        self._looks, self._asked = 0, math.inf
        self._earlier: dict[int, Report] | None = None  # what the others had written at `_asked`
        self._store.set(f"who/{self._rank}", f"{socket.gethostname()}, pid {os.getpid()}")

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        """Python aborts a process that ends while a thread is inside the store's C++."""
        self._ended.set()
        self.join(SECONDS_TO_ANSWER)

    def run(self) -> None:
        """Look again and again, until the store is gone with its host: then torchrun ends the rank."""
        with contextlib.suppress(RuntimeError, ConnectionError):
            while not self._ended.wait(min(SECONDS_BETWEEN_LOOKS, self._seconds / 10)):
                self._look()
                # A rank that waits on its GPU for ranks of another node hears nothing of their end.
                if self._store.underlying_store.check([FAILURE_KEY]):
                    wait_to_be_ended(self._store.underlying_store, self._ended)
                    if not self._ended.is_set():
                        os._exit(1)

    def _look(self) -> None:
        now, frame = time.monotonic(), sys._current_frames()[threading.main_thread().ident or 0]
        state = self._state_at(frame)
        if state != self._state:
            self._state, self._since = state, now
        self._looks += 1
        report = Report(now - self._since > self._seconds / 2, self._collectives(), place(frame), self._looks)
        self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
        if now - self._since <= self._seconds:
            self._earlier = None
        elif self._earlier is None:
            self._earlier, self._asked = self._reports(), now
        elif now - self._asked > SECONDS_TO_ANSWER:
            reports = {rank: it for rank, it in self._reports().items() if it != self._earlier.get(rank)}
            who = [self._store.get(f"who/{rank}").decode() for rank in range(self._world_size)]
            self._end(LostRank(describe_hang(reports, who, self._rank, self._seconds)))

    def _state_at(self, frame: FrameType) -> object:
        """What stays equal only while this rank waits.

        With CUDA collectives are queued, and waited for at any line that needs a number on the host: so there it is the
        line, and that no memory has been allocated meanwhile, which all computing does.
        """
        if self._device.type == "cuda" and frame.f_code.co_filename != threading.__file__:  # waiting for a thread
            allocations = torch.cuda.memory_stats(self._device).get("allocation.all.allocated", 0)
            return self._collectives(), allocations, id(frame), frame.f_lasti
        return self._collectives() if _is_in_collective(frame) else object()

    def _collectives(self) -> int:
        return sum(group._get_sequence_number_for_group() for group in self._groups)  # type: ignore[attr-defined]

    def _reports(self) -> dict[int, Report]:
        keys = {rank: f"report/{rank}" for rank in range(self._world_size)}
        return {
            rank: Report(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }


def describe_hang(reports: dict[int, Report], who: Sequence[str], asker: int, seconds: float) -> str:
    """The message that names the ranks which did not arrive.

    Args:
        reports: by rank; of a rank that is not in it nothing was heard.
        who: host and process of every rank.
        asker: the rank that waits.
        seconds: how long.
    """
    missing = [rank for rank in range(len(who)) if rank not in reports or not reports[rank].waits]
    if not missing:  # each waits for another: those with fewer collectives have not come as far as the others
        furthest = max(report.collectives for report in reports.values())
        missing = [rank for rank, report in reports.items() if report.collectives < furthest]
    time_out = f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"
    names = ", ".join(map(str, missing))
    head = f"rank {names} did not arrive; the others have waited" if missing else "all ranks wait"
    lines = [f"{head} for {time_out} (--collective_timeout).", f"rank {asker} waits at {reports[asker].place}"]
    for rank in (missing or [rank for rank in reports if rank != asker])[:MOST_NAMED]:
        told = f"is at {reports[rank].place}" if rank in reports else "does not answer: it is stopped or gone"
        lines.append(f"rank {rank} ({who[rank]}) {told}")
    return "\n".join(lines)


def place(frame: FrameType | None) -> str:
    """The innermost line outside torch and the runtime, as `file:line in function`."""
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED_FRAMES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown line"


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost lines, those inside torch, are in torch.distributed."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        if frame.f_code.co_filename.startswith(f"{TORCH}distributed{os.sep}"):
            return True
        frame = frame.f_back
    return False
