"""Peak memory as the kernel and the CUDA allocator counted it.

Peaks are read, never polled: a thread that samples memory costs a multiple of the step and still misses the peak.
Source: VmHWM, RssAnon and clear_refs in `man 5 proc`.
"""

import contextlib
import re
from pathlib import Path

import torch

PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = "5"  # sets VmHWM to the present resident size


def reset_peaks(device: torch.device) -> None:
    """Start a new phase: peaks read from here on count from the present use.

    Where clear_refs cannot be written (macOS, some containers) the host peak stays that of the whole process.
    """
    with contextlib.suppress(OSError):
        PROC_CLEAR_REFS.write_text(RESET_PEAK_RSS)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def host_peak_bytes() -> int | None:
    """Largest resident size of this process since `reset_peaks`; None where the kernel does not tell."""
    return _status_bytes("VmHWM", PROC_STATUS)


def host_anonymous_bytes() -> int | None:
    """Resident memory no file stands behind: tensors, but not memory-mapped checkpoints; None where not told."""
    return _status_bytes("RssAnon", PROC_STATUS)


def device_peak_bytes(device: torch.device) -> int | None:
    """Largest sum of tensors on a CUDA device since `reset_peaks`; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _status_bytes(field: str, status: Path) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def memory_metrics(peaks: torch.Tensor) -> dict[str, list[int]]:
    """Metrics keys from every rank's host and device peak, [ranks, 2] in bytes; 0 was not measured."""
    host, device = peaks[:, 0].long().tolist(), peaks[:, 1].long().tolist()
    measured = {"memory/host_peak_bytes": host, "memory/device_peak_bytes": device}
    return {key: ranks for key, ranks in measured.items() if any(ranks)}
