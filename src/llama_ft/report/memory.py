"""Predicted memory beside measured, as tables and bars of the report."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_ft.phases import MEMORY_CATEGORIES, PHASES
from llama_ft.report.run import Run

TRAINING_PHASES = ("forward", "backward", "optimizer step")


class Bar(NamedTuple):
    """A row of bars: predicted and measured bytes; None where unknown. Shares are of the largest of all rows."""

    name: str
    predicted: float | None
    measured: float | None
    predicted_share: float
    measured_share: float


class MemoryFacts:
    """What a run's directory tells of its memory.

    Attributes:
        measured: the phases' peaks on the rank with the highest.
        predicted: the plan's, NaN without a plan.
        is_like_for_like: whether both count the same; on the CPU, Python and its libraries are measured too.
    """

    def __init__(self, run: Run) -> None:
        self._run, memory = run, run.facts.get("memory", {})
        phases = memory.get("phases", {})
        self._phases: dict[str, list[dict[str, Any]]] = {phase: phases[phase] for phase in PHASES if phases.get(phase)}
        self._holders: list[dict[str, float]] = memory.get("holders", [])
        kinds = {kind for ranks in self._phases.values() for rank in ranks for kind in rank if rank[kind]}
        self._kind = "device_peak_bytes" if "device_peak_bytes" in kinds else "anonymous_peak_bytes"
        peaks = {name: [rank.get(self._kind) or 0 for rank in ranks] for name, ranks in self._phases.items()}
        self.measured = {phase: float(max(sizes)) for phase, sizes in peaks.items() if any(sizes)}
        self._plan: list[dict[str, Any]] = run.plan.get("peaks", [])
        self.predicted = max((float(peak["bytes"]) for peak in self._plan), default=math.nan)
        self.is_like_for_like = "memory/device_peak_bytes" in run.rank_peaks

    def measured_peak(self) -> tuple[float, str]:
        """The highest rank's peak, and of what; NaN and "" where nothing was measured."""
        if peaks := self._run.rank_peaks.get("memory/device_peak_bytes"):
            return max(peaks), "GPU memory"
        if self.measured:
            return max(self.measured.values()), "anonymous memory"
        peaks = self._run.rank_peaks.get("memory/host_peak_bytes", [])
        return (max(peaks), "host memory (RSS)") if peaks else (math.nan, "")

    def phase_bars(self) -> list[Bar]:
        """The peak of each phase."""
        return _bars(PHASES, {peak["phase"]: float(peak["bytes"]) for peak in self._plan}, self.measured)

    def holder_bars(self) -> tuple[str, list[Bar]]:
        """What holds memory at the largest peak of training, predicted: its phase, and a bar for each category."""
        peaks = [peak for peak in self._plan if peak["phase"] in TRAINING_PHASES] or self._plan
        nothing: dict[str, Any] = {"phase": "", "holders": {}}
        largest = max(peaks, key=lambda peak: peak["bytes"], default=nothing)
        held = {name: size for name, size in largest["holders"].items() if size}
        return str(largest["phase"]), _bars(MEMORY_CATEGORIES, held, {})

    def held_bars(self) -> list[Bar]:
        """What the step leaves on the highest rank, measured on the tensors themselves, and the same of the plan."""
        names = dict.fromkeys(name for rank in self._holders for name in rank)
        measured = {name: float(max(rank.get(name, 0.0) for rank in self._holders)) for name in names}
        held: dict[str, float] = next((peak["holders"] for peak in self._plan if peak["phase"] == "optimizer step"), {})
        return _bars(MEMORY_CATEGORIES, {name: held[name] for name in names if held.get(name)}, measured)

    def rank_table(self) -> dict[str, list[Any]]:
        """What each rank measured, by phase and holder: column -> bytes of each rank."""
        columns: dict[str, list[Any]] = dict(self._run.rank_peaks)
        columns |= {phase: [rank.get(self._kind) for rank in ranks] for phase, ranks in self._phases.items()}
        names = dict.fromkeys(name for rank in self._holders for name in rank)
        return columns | {f"holds: {name}": [rank.get(name) for rank in self._holders] for name in names}


def _bars(names: Sequence[str], predicted: dict[str, float], measured: dict[str, float]) -> list[Bar]:
    most = max([*predicted.values(), *measured.values()], default=0) or 1
    return [
        Bar(n, predicted.get(n), measured.get(n), predicted.get(n, 0) / most, measured.get(n, 0) / most)
        for n in names
        if n in predicted or n in measured
    ]
