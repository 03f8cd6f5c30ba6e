"""Memory that ran out: how an error shows it, and how much the host has.

A GPU's allocator raises an error. The host's mostly does not: Linux hands out more memory than it has, and when that
comes to light it kills a process with SIGKILL, which torchrun reports as exit code -9.
"""

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from llama_ft.config.messages import size_text

Shortage = Literal["device", "host"]
KILLED = "killed (exit code -9)"  # in every message about a rank that SIGKILL has ended
KILLED_BY = "Exit code -9 is the kernel's if host memory ran out (dmesg says so), or somebody's kill -9."
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of torch's CPU allocator, C++ and the kernel; of torch's CUDA allocator, CUDA, NCCL, cuBLAS and cuDNN.
HOST_SIGNS = re.compile(r"can't allocate memory|cannot allocate memory|bad_alloc|not enough memory", re.IGNORECASE)
DEVICE_SIGNS = re.compile(r"out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)


def shortage(error: BaseException) -> Shortage | None:
    """Which memory an error says has run out; None: it is another error."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    return "host" if HOST_SIGNS.search(str(error)) else "device" if DEVICE_SIGNS.search(str(error)) else None


class HostMemory(NamedTuple):
    """What the processes of this machine, or of its smallest control group, may use together and may still take."""

    bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return f"Host memory: {size_text(self.bytes)}, {size_text(self.available_bytes)} of it free."


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """The machine's memory, or the smallest limit of a control group (v2) below it; None without /proc."""
    try:
        kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE))
        group = (proc / "self" / "cgroup").read_text()
    except OSError:
        return None
    total, free = 1024 * int(kilobytes["MemTotal"]), 1024 * int(kilobytes["MemAvailable"])
    own = cgroups / group.rpartition("::/")[2].strip()
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            limit, use = (int((folder / file).read_text()) for file in ("memory.max", "memory.current"))
            if limit < total:
                total, free = limit, max(0, min(limit - use, free))
    return HostMemory(total, free)
