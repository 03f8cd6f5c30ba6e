"""Memory as the kernel and the CUDA allocator count it, now and at its peak.

Peaks are read, never polled: a thread that samples memory costs a multiple of the step and still misses the peak.
Source: VmHWM, RssAnon and clear_refs in `man 5 proc`; torch.cuda.memory_stats.
"""

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
PROC_MEMINFO = Path("/proc/meminfo")
RESET_PEAK_RSS = b"5"  # sets VmHWM to the present resident size
FIELDS = re.compile(rb"\n(VmHWM|RssAnon|RssFile|RssShmem|MemAvailable):\s+(\d+) kB")


@dataclass(frozen=True)
class MemoryUse:
    """What a process holds, in bytes; peaks are since `reset_peaks`. 0 is what is not told, or not there.

    Attributes:
        anonymous: resident host memory no file stands behind.
        mapped: resident pages of files and shared memory.
        resident_peak: largest sum of both.
        device: tensors on the CUDA device.
        device_peak: the most of them.
        device_reserved_peak: most that the CUDA allocator held, free blocks included.
    """

    anonymous: int = 0
    mapped: int = 0
    resident_peak: int = 0
    device: int = 0
    device_peak: int = 0
    device_reserved_peak: int = 0


def memory_use(device: torch.device) -> MemoryUse:
    """What this process holds; took 80 to 125 us on busy cores, and waits for no kernel on the device."""
    host = _kernel_bytes(PROC_STATUS)
    counts = (host.get("RssAnon", 0), host.get("RssFile", 0) + host.get("RssShmem", 0), host.get("VmHWM", 0))
    if device.type != "cuda":
        return MemoryUse(*counts)
    told = torch.cuda.memory_stats_as_nested_dict(device)  # memory_stats sorts all of them first
    if not told:  # nothing was ever allocated
        return MemoryUse(*counts)
    allocated = told["allocated_bytes"]["all"]
    return MemoryUse(*counts, allocated["current"], allocated["peak"], told["reserved_bytes"]["all"]["peak"])


def reset_peaks(device: torch.device) -> None:
    """Start a new phase: peaks read from here on count from the present use.

    Where clear_refs cannot be written (macOS, some containers) the host peak stays that of the whole process.
    """
    with contextlib.suppress(OSError):
        file = os.open(PROC_CLEAR_REFS, os.O_WRONLY)
        try:
            os.write(file, RESET_PEAK_RSS)
        finally:
            os.close(file)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_unused_heap() -> None:
    """Have the C library give back the pages it keeps for later, so that what is resident is in use."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def host_available_bytes() -> int | None:
    """What the host could still give to processes; None where the kernel does not tell."""
    return _kernel_bytes(PROC_MEMINFO).get("MemAvailable")


def _kernel_bytes(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc; Path.read_text would take twice as long."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return {name.decode(): int(size) * 1024 for name, size in FIELDS.findall(os.read(file, 16384))}
    finally:
        os.close(file)


def memory_metrics(peaks: torch.Tensor) -> dict[str, list[int]]:
    """Metrics keys from every rank's host and device peak, [ranks, 2] in bytes; 0 was not measured."""
    host, device = peaks[:, 0].long().tolist(), peaks[:, 1].long().tolist()
    measured = {"memory/host_peak_bytes": host, "memory/device_peak_bytes": device}
    return {key: ranks for key, ranks in measured.items() if any(ranks)}
