"""Memory that ran out: how an error shows it, how much the host has, and how many processes the kernel has killed.

A GPU's allocator raises an error. The host's mostly does not: Linux hands out more memory than it has, and when that
comes to light it kills a process with SIGKILL, which torchrun reports as exit code -9.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llama_ft.config.messages import size_text

Shortage = Literal["device", "host"]
KILLED = "killed (exit code -9)"  # in every message about a rank that SIGKILL has ended
KILLED_BY = "Exit code -9 is the kernel's if host memory ran out, or somebody's kill -9."
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# c10/core/impl/alloc_cpu.cpp, the C++ library's, and the kernel's words for ENOMEM.
HOST_SIGNS = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc|not enough memory", re.IGNORECASE)
# c10/cuda/CUDACachingAllocator.cpp and, from what allocates beside it, CUDA, NCCL, cuBLAS and cuDNN.
DEVICE_SIGNS = re.compile(r"out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)
LIMITS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # cgroup v2, v1


def shortage(error: BaseException) -> Shortage | None:
    """Which memory an error says has run out; None: it is another error."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, RuntimeError):
        return "host" if HOST_SIGNS.search(str(error)) else "device" if DEVICE_SIGNS.search(str(error)) else None
    return None


@dataclass(frozen=True)
class HostMemory:
    """What the processes of this machine, container or job may use together.

    Attributes:
        bytes: how much.
        whose: the machine's, or what limits it.
        available_bytes: what the kernel could still give away.
    """

    bytes: int
    whose: str
    available_bytes: int

    def __str__(self) -> str:
        return f"Host memory: {size_text(self.bytes)} ({self.whose}), {size_text(self.available_bytes)} of it free."


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """The machine's memory, or the smallest limit below it; None without /proc."""
    try:
        kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE))
        total, free = 1024 * int(kilobytes["MemTotal"]), 1024 * int(kilobytes["MemAvailable"])
    except (OSError, KeyError):
        return None
    whose = "the machine's"
    for group in _memory_groups(proc, cgroups):
        for limit_file, use_file in LIMITS:
            with suppress(OSError, ValueError):  # "max": no limit
                limit, use = int((group / limit_file).read_text()), int((group / use_file).read_text())
                if limit < total:
                    total, free, whose = limit, max(0, min(limit - use, free)), "the limit of this job's control group"
    return HostMemory(total, whose, free)


def kernel_kills() -> int:
    """How many processes the kernel has killed for want of host memory since it started, in control groups too."""
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", (PROC / "vmstat").read_text(), re.MULTILINE):
            return int(found[1])
    return 0


def explain_kill(earlier_kills: int) -> str:
    """Why a process may have ended by SIGKILL, and how much host memory there is.

    Args:
        earlier_kills: what `kernel_kills` said before.
    """
    more = kernel_kills() - earlier_kills
    counted = (
        f"The kernel has counted {more} kill{'s' if more > 1 else ''} for want of host memory since the run began."
    )
    return f"{counted if more > 0 else KILLED_BY} {host_memory() or ''}".rstrip()


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
