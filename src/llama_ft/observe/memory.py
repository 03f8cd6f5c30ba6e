"""Memory as the kernel and the CUDA allocator count it: now, at its peak, at the peak of each phase of a run.

Peaks are read, not polled: a thread that samples memory costs a multiple of the step and still misses the peak.
Source: VmHWM, RssAnon and clear_refs in `man 5 proc`; torch.cuda.memory_stats.
"""

import contextlib
import ctypes
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_ft.phases import Phase

PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = b"5"  # sets VmHWM to the present resident size
# These map checkpoints into memory or write them. The kernel keeps the peak of all resident pages only, in which pages
# of files that are long unmapped at the phase's end cannot be told from tensors.
MAPS_FILES: tuple[Phase, ...] = ("load", "save")
SECONDS_BETWEEN_SAMPLES = 0.01
SNAPSHOT_STEPS = 3  # of this process: the second has all optimizer states, the third repeats it
# The last ones of them: some steps of an 8B model. Beyond that a snapshot is too large for the viewer's browser.
MOST_EVENTS = 100_000
FIELDS = re.compile(rb"\n(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB")


@dataclass(frozen=True)
class MemoryUse:
    """What a process holds, in bytes; peaks are since `reset_peaks`. 0 is what is not known, or not there.

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


class PhasePeaks:
    """A PhaseMonitor: each `enter` reads the peaks since the last one, keeps the largest per phase, and resets them.

    Entering took about 0.1 ms on busy cores, and waits for nothing on the device.

    The kernel has a peak of resident memory (VmHWM), not of its anonymous part. That is taken as VmHWM less the mapped
    pages at the phase's end, and at least what was anonymous at both ends. While files are mapped and unmapped that
    would be wrong by gigabytes: there RssAnon is sampled every 10 ms instead, and a shorter spike is missed.

    Attributes:
        phase: the present one; None outside of any.
        by_phase: the peaks in bytes, as facts.json has them; fragmented is what the CUDA allocator held at its peak
            more than tensors did at theirs.
        resident: largest VmHWM of the phases since `start_over`.
        device: largest sum of tensors on the CUDA device since then.
    """

    def __init__(self, device: torch.device) -> None:
        self.phase: Phase | None = None
        self.by_phase: dict[Phase, dict[str, int]] = {}
        self.resident = self.device = 0
        self._device = device
        self._before = MemoryUse()
        self._sampler: _Sampler | None = None

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self._before = self.leave()
        self.phase = phase
        reset_peaks(self._device)
        if phase in MAPS_FILES:
            self._sampler = _Sampler()
            self._sampler.start()

    def leave(self) -> MemoryUse:
        """End the present phase; returns the use right now."""
        sampled = 0
        if self._sampler is not None:
            sampled, self._sampler = self._sampler.stop(), None
        now = memory_use(self._device)
        self.resident, self.device = max(self.resident, now.resident_peak), max(self.device, now.device_peak)
        if self.phase is None:
            return now
        anonymous = sampled if self.phase in MAPS_FILES else now.resident_peak - now.mapped
        peaks = {"anonymous_peak_bytes": max(anonymous, self._before.anonymous, now.anonymous)}
        if self._device.type == "cuda":
            peaks["device_peak_bytes"] = now.device_peak
            peaks["device_reserved_bytes"] = now.device_reserved_peak
            peaks["device_fragmented_bytes"] = now.device_reserved_peak - now.device_peak
        kept = self.by_phase.setdefault(self.phase, {})
        kept.update({name: max(kept.get(name, 0), peak) for name, peak in peaks.items()})
        self.phase = None
        return now

    def start_over(self) -> None:
        """Begin anew with `resident` and `device`, of which loading is no part."""
        self.leave()
        self.resident = self.device = 0
        reset_peaks(self._device)


class _Sampler(threading.Thread):
    """Reads RssAnon until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="memory of a phase", daemon=True)
        self._peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_SAMPLES):
            self._peak = max(self._peak, _kernel_bytes(PROC_STATUS).get("RssAnon", 0))

    def stop(self) -> int:
        """The largest it saw."""
        self._done.set()
        self.join()
        return self._peak


def record_memory() -> None:
    """Have torch record who allocates what on the current CUDA device; 2 us an allocation, torch says."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_EVENTS)


def write_snapshot(run: Path, rank: int, moment: str) -> Path:
    """Write run/memory/rank-0-step-3.pickle, for pytorch.org/memory_viz. It holds sizes, times, and the lines of code
    that allocated, with their paths; no content of any tensor.

    Args:
        run: the run's directory.
        rank: this process's.
        moment: the end of the name.
    """
    file = run / "memory" / f"rank-{rank}-{moment}.pickle"
    file.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
