"""Detect out-of-memory errors, and how much memory the host has.

On a GPU the allocator raises an error. On the host Linux promises more memory than it has. When the
memory runs out, Linux kills a process with SIGKILL, and torchrun reports exit code -9.
"""

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from llama_ft.config.wording.messages import size_text
from llama_ft.errors import text_of

Shortage = Literal["device", "host"]
KILLED = "killed (exit code -9)"  # part of every message about a rank that was ended by SIGKILL
KILLED_BY = "Exit code -9 is SIGKILL: the kernel ran out of host memory (see dmesg), or somebody ran kill -9."
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
    if isinstance(error, MemoryError):
        return "host"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    text = text_of(error)
    if HOST_SIGNS.search(text):
        return "host"
    if DEVICE_SIGNS.search(text):
        return "device"
    return None


class HostMemory(NamedTuple):
    """Memory of this machine, or of its smallest control group: used and still available to its
    processes, in bytes."""

    bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return (
            f"Host memory: {size_text(self.bytes)}, {size_text(self.available_bytes)} of it free."
        )


def _cached_bytes(cgroup: Path) -> int:
    """Return the bytes of files that a control group counts as used, but that the kernel drops when
    memory is short: those that were not read for a while, as Kubernetes counts."""
    try:
        text = (cgroup / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(r"^inactive_file (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory | None:
    """Return the machine's memory, or that of the control group (v2) with the smallest limit; None
    without /proc."""
    try:
        meminfo = (proc / "meminfo").read_text()
        cgroup = (proc / "self" / "cgroup").read_text()
    except OSError:
        return None
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE))
    total = 1024 * int(kilobytes["MemTotal"])
    free = 1024 * int(kilobytes["MemAvailable"])
    cgroup_folder = cgroups / cgroup.rpartition("::/")[2].strip()
    for folder in (cgroup_folder, *cgroup_folder.parents):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            limit = int((folder / "memory.max").read_text())
            use = int((folder / "memory.current").read_text())
            if limit < total:
                total = limit
                free = max(0, min(limit - use + _cached_bytes(folder), free))
    return HostMemory(total, free)
