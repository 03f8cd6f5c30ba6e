"""Detect out-of-memory errors, and how much memory the host has.

On a GPU the allocator raises an error. On the host Linux promises more memory than it has. When the
memory runs out, Linux kills a process with SIGKILL, and torchrun reports exit code -9.
"""

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from llama_ft.config.messages import size_text

Shortage = Literal["device", "host"]
KILLED = "killed (exit code -9)"  # part of every message about a rank that was ended by SIGKILL
KILLED_BY = (
    "Exit code -9 is the kernel's if host memory ran out (dmesg says so), or somebody's kill -9."
)
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Messages of torch's CPU allocator, C++ and the kernel; then those of torch's CUDA allocator, CUDA,
# NCCL, cuBLAS, cuDNN.
HOST_SIGNS = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|not enough memory", re.IGNORECASE
)
DEVICE_SIGNS = re.compile(r"out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)


def shortage(error: BaseException) -> Shortage | None:
    """Return which memory ran out according to `error`; None if it is another error."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    return (
        "host"
        if HOST_SIGNS.search(str(error))
        else "device"
        if DEVICE_SIGNS.search(str(error))
        else None
    )


class HostMemory(NamedTuple):
    """Memory of this machine, or of its smallest control group: used and still available to its
    processes, in bytes."""

    bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return (
            f"Host memory: {size_text(self.bytes)}, {size_text(self.available_bytes)} of it free."
        )


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """Return the machine's memory, or that of the control group (v2) with the smallest limit; None
    without /proc."""
    try:
        kilobytes = dict(
            re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
        )
        group = (proc / "self" / "cgroup").read_text()
    except OSError:
        return None
    total = 1024 * int(kilobytes["MemTotal"])
    free = 1024 * int(kilobytes["MemAvailable"])
    own = cgroups / group.rpartition("::/")[2].strip()
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            limit, use = (
                int((folder / file).read_text()) for file in ("memory.max", "memory.current")
            )
            if limit < total:
                total = limit
                free = max(0, min(limit - use, free))
    return HostMemory(total, free)
