"""Memory that ran out: how an error shows it, how much there is, and what the kernel says of processes it has killed.

A GPU's allocator raises an error. The host's mostly does not: Linux hands out more memory than it has, and when that
comes to light it kills a process with SIGKILL, which torchrun reports as exit code -9.
"""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llama_ft.config.wording import size_text

Shortage = Literal["device", "host"]
KILLED = "killed (exit code -9)"  # in every message about a rank that SIGKILL has ended
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# c10/core/impl/alloc_cpu.cpp, the C++ library's, and the kernel's words for ENOMEM.
HOST_SIGNS = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc|not enough memory", re.IGNORECASE)
# c10/cuda/CUDACachingAllocator.cpp and, from what allocates beside it, CUDA, NCCL, cuBLAS and cuDNN.
DEVICE_SIGNS = re.compile(r"out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)
LIMITS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # cgroup v2, v1
ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNIT_BYTES = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def shortage(error: BaseException) -> Shortage | None:
    """Which memory an error says has run out; None: it is another error."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, RuntimeError):
        return "host" if HOST_SIGNS.search(str(error)) else "device" if DEVICE_SIGNS.search(str(error)) else None
    return None


def asked_bytes(error: BaseException) -> int | None:
    """How much was asked for in vain; None where the error does not say."""
    found = ASKED.search(str(error))
    return int(float(found[1]) * UNIT_BYTES[found[2].lower()]) if found else None


@dataclass(frozen=True)
class HostMemory:
    """What the processes of this machine, container or job may use together.

    Attributes:
        bytes: how much.
        whose: the machine's, or what limits it.
        available_bytes: what the kernel could still give away; None where it does not tell.
        own_bytes: what this process holds that no file stands behind.
        is_per_process: whether each process may use so much.
    """

    bytes: int
    whose: str
    available_bytes: int | None
    own_bytes: int
    is_per_process: bool = False

    def share(self, processes: int) -> int:
        """Bytes for each of so many processes."""
        return self.bytes if self.is_per_process else self.bytes // processes

    def __str__(self) -> str:
        free = "" if self.available_bytes is None else f", {size_text(self.available_bytes)} of it free"
        own = size_text(self.own_bytes)
        return f"Host memory: {size_text(self.bytes)} ({self.whose}){free}; this process holds {own}."


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """The machine's memory, or the smallest limit below it; None where there is no /proc."""
    machine = _kilobytes(proc / "meminfo")
    own = _kilobytes(proc / "self" / "status").get("RssAnon", 0)
    if "MemTotal" not in machine:
        return None
    total, whose, free = machine["MemTotal"], "the machine's", machine.get("MemAvailable")
    for group in _memory_groups(proc, cgroups):
        for limit_file, use_file in LIMITS:
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and limit < total:
                total, whose = limit, "the limit of this job's control group"
                free = None if use is None else max(0, min(limit - use, free if free is not None else limit))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < total:
        room = limit - _kilobytes(proc / "self" / "status").get("VmSize", limit)
        return HostMemory(limit, "ulimit -v of each process", max(0, room), own, is_per_process=True)
    return HostMemory(total, whose, free, own)


class KernelKills:
    """Processes that the kernel has killed for want of host memory since this object was made."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._places = proc, cgroups
        self._before = self._counts()

    def new(self) -> str:
        """Where there are new ones, for people; "" if nothing shows any."""
        for whose, count in self._counts().items():
            more = count - self._before.get(whose, count)
            if more > 0:
                return f"it has counted {more} such kill{'s' if more > 1 else ''} {whose} since the run began"
        return ""

    def _counts(self) -> dict[str, int]:
        proc, cgroups = self._places
        counts = {}
        for group in list(_memory_groups(proc, cgroups))[:1]:
            for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
                with suppress(OSError):
                    if found := re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.MULTILINE):
                        counts["in this job's control group"] = int(found[1])
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", (proc / "vmstat").read_text(), re.MULTILINE):
                counts["on this machine"] = int(found[1])
        return counts


def explain_kill(kills: KernelKills) -> str:
    """Why a process may have ended by SIGKILL, and how much host memory there is."""
    new = kills.new()
    why = (
        f"The kernel killed it for want of host memory: {new}."
        if new
        else "That is what the kernel does when host memory runs out, though it shows no count of it here; the limit\n"
        "of a batch system and somebody's kill -9 look the same."
    )
    host = host_memory()
    return why if host is None else f"{why}\n{host}"


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folder of this process's control group, and those around it that can be seen: cgroup v2, or v1."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = cgroups / "memory" if "memory" in controllers.split(",") else cgroups
            if controllers and base == cgroups:
                continue
            own = base / path.lstrip("/")
            # A container mounts its own group as the root, and may still be told the whole path.
            for folder in (own, *own.parents) if own.is_dir() else (base,):
                yield folder
                if folder == base:
                    break


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _kilobytes(file: Path) -> dict[str, int]:
    """Bytes by name from lines as `MemTotal:   32 kB`."""
    try:
        return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE)}
    except OSError:
        return {}
