"""Every tensor that is alive, by what holds it: the bookkeeping of a plan."""

import weakref
from collections.abc import Iterable
from dataclasses import replace

import torch

from llama_ft.phases import MEMORY_CATEGORIES, MemoryCategory, Phase
from llama_ft.plan.torch_internals import local_part, storage_key
from llama_ft.plan.types import Moment, Peak


class MemoryLedger:
    """Storages that are alive, their bytes and holders, and the peak of each phase.

    Attributes:
        now: bytes of all.
        holders: the same by holder.
        holder: who holds what is allocated from now on.
        phase: which peak is being measured; None: none.
        peaks: of each phase.
        module: the module at work, for the peaks.
        timeline: moments that were marked.
        events: every change, (storage, bytes more or fewer), in order; see plan/cuda_allocator.py.
    """

    def __init__(self) -> None:
        self.now = 0
        self.holders: dict[MemoryCategory, int] = dict.fromkeys(MEMORY_CATEGORIES, 0)
        self.holder: MemoryCategory = "temporaries"
        self.phase: Phase | None = None
        self.peaks: dict[Phase, Peak] = {}
        self.module = ""
        self.timeline: list[Moment] = []
        self.events: list[tuple[int, int]] = []
        self._alive: dict[int, tuple[int, int, MemoryCategory]] = {}
        self._numbered = 0

    def begin(self, phase: Phase, holder: MemoryCategory) -> None:
        """Measure the peak of a phase; what is allocated belongs to `holder`."""
        self.phase, self.holder, self.module = phase, holder, ""
        self._note_peak()
        self.mark(phase)

    def note(self, storage: torch.UntypedStorage) -> None:
        """A storage that may be new or may have been resized."""
        key, nbytes = storage_key(storage), storage.nbytes()
        number, before, holder = self._alive.get(key, (0, 0, self.holder))
        if key not in self._alive:
            self._numbered = number = self._numbered + 1
            weakref.finalize(storage, self._drop, key)
        if nbytes != before:
            self._change(number, nbytes - before, holder)
        self._alive[key] = (number, nbytes, holder)

    def note_temporary(self, nbytes: int) -> None:
        """Memory that an operator takes and gives back before it returns."""
        if nbytes:
            number = self.note_kept(nbytes)
            self._change(number, -nbytes, "temporaries")

    def note_kept(self, nbytes: int) -> int:
        """Memory that a library takes and keeps; returns its number."""
        self._numbered += 1
        self._change(self._numbered, nbytes, "temporaries")
        return self._numbered

    def assign(self, tensors: Iterable[torch.Tensor], holder: MemoryCategory) -> None:
        """Say who holds tensors that are alive already; of DTensors this rank's part."""
        for tensor in tensors:
            key = storage_key(local_part(tensor).untyped_storage())
            if key in self._alive:
                number, nbytes, before = self._alive[key]
                self._alive[key] = (number, nbytes, holder)
                self.holders[before] -= nbytes
                self.holders[holder] += nbytes

    def settle(self, phase: Phase, holder: MemoryCategory, others: Iterable[MemoryCategory]) -> None:
        """At the peak of a phase, what `others` hold now was counted as `holder`'s: they had not been assigned yet."""
        peak = self.peaks[phase]
        moved = {other: self.holders[other] for other in others}
        holders = {**peak.holders, **moved, holder: peak.holders[holder] - sum(moved.values())}
        self.peaks[phase] = replace(peak, holders=holders)

    def mark(self, label: str) -> None:
        """Put a moment on the timeline."""
        self.timeline.append(Moment(label, self.now, self.holders["gathered units"]))

    def _note_peak(self) -> None:
        if self.phase is not None and (self.phase not in self.peaks or self.now > self.peaks[self.phase].bytes):
            self.peaks[self.phase] = Peak(self.phase, self.now, dict(self.holders), self.module)

    def _change(self, number: int, more: int, holder: MemoryCategory) -> None:
        self.now += more
        self.holders[holder] += more
        self.events.append((number, more))
        if more > 0:
            self._note_peak()

    def _drop(self, key: int) -> None:
        number, nbytes, holder = self._alive.pop(key)
        if nbytes:
            self._change(number, -nbytes, holder)
