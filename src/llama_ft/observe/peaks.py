"""The peak of each phase of a run, on this rank."""

import threading
from typing import Self

import torch

from llama_ft.observe.memory import MemoryUse, memory_use, reset_peaks
from llama_ft.phases import Phase

# These map checkpoints into memory or write them. The kernel keeps the peak of all resident pages only, in which pages
# of files that are long unmapped at the phase's end cannot be told from tensors.
MAPS_FILES: tuple[Phase, ...] = ("load", "save")
SECONDS_BETWEEN_SAMPLES = 0.01
HOST = torch.device("cpu")


class PhasePeaks:
    """A PhaseWatch: at each `enter` it reads the peaks since the last one, keeps the largest by phase, and resets them.

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
        """See PhaseWatch."""
        self._before = self.leave()
        self.phase = phase
        reset_peaks(self._device)
        if phase in MAPS_FILES:
            self._sampler = _Sampler().started()

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

    def started(self) -> Self:
        self.start()
        return self

    def run(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_SAMPLES):
            self._peak = max(self._peak, memory_use(HOST).anonymous)

    def stop(self) -> int:
        """The largest it saw."""
        self._done.set()
        self.join()
        return self._peak
