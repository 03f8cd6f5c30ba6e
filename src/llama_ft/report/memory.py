"""Predicted memory beside measured, as tables, bars and plots of the report."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy

from llama_ft.phases import MEMORY_CATEGORIES, PHASES
from llama_ft.report.plot import Plot, Series
from llama_ft.report.run import Run

MIB = 2**20
TRAINING_PHASES = ("forward", "backward", "optimizer step")
TITLES = {  # of the kinds in facts.json, and of the lists in metrics.jsonl
    "memory/device_peak_bytes": "device, whole run",
    "memory/host_peak_bytes": "host (RSS), whole run",
    "device_reserved_bytes": "reserved, at most",
    "device_fragmented_bytes": "fragmented, at most",
    "anonymous_peak_bytes": "host, anonymous, at most",
}


@dataclass(frozen=True)
class Bar:
    """A row of bars: predicted and measured bytes; None where unknown. Shares are of the largest of all rows."""

    name: str
    predicted: float | None
    measured: float | None
    predicted_share: float
    measured_share: float


def measured_peak(run: Run) -> tuple[float, str]:
    """The fullest rank's peak, and of what; NaN and "" where nothing was measured."""
    if peaks := run.rank_peaks.get("memory/device_peak_bytes"):
        return max(peaks), "GPU memory"
    if found := _phase_peaks(run):
        return max(found.values()), "anonymous memory"
    peaks = run.rank_peaks.get("memory/host_peak_bytes", [])
    return (max(peaks), "host memory (RSS)") if peaks else (math.nan, "")


def predicted_peak(run: Run) -> float:
    """Of the plan's tensors, NaN without a plan."""
    return max((peak["bytes"] for peak in run.plan.get("peaks", [])), default=math.nan)


def is_like_for_like(run: Run) -> bool:
    """Whether what was measured is what the plan counts; on the CPU, Python and its libraries are measured too."""
    return "memory/device_peak_bytes" in run.rank_peaks


def phase_bars(run: Run) -> list[Bar]:
    """The peak of each phase; measured is the fullest rank's."""
    predicted = {peak["phase"]: float(peak["bytes"]) for peak in run.plan.get("peaks", [])}
    return _bars(PHASES, predicted, _phase_peaks(run))


def holder_bars(run: Run) -> tuple[str, list[Bar]]:
    """What holds memory at the largest peak of training, predicted: its phase, and a bar for each holder."""
    peaks = run.plan.get("peaks", [])
    peaks = [peak for peak in peaks if peak["phase"] in TRAINING_PHASES] or peaks
    if not peaks:
        return "", []
    largest: dict[str, Any] = max(peaks, key=lambda peak: peak["bytes"])
    return str(largest["phase"]), [bar for bar in _bars(MEMORY_CATEGORIES, largest["holders"], {}) if bar.predicted]


def held_bars(run: Run) -> list[Bar]:
    """What the step leaves on the fullest rank, measured on the tensors themselves, and the same of the plan."""
    measured: dict[str, float] = {}
    for rank in _memory(run).get("holders", []):
        measured |= {name: max(measured.get(name, 0.0), float(size)) for name, size in rank.items()}
    peaks = run.plan.get("peaks", [])
    held: dict[str, float] = next((peak["holders"] for peak in peaks if peak["phase"] == "optimizer step"), {})
    return _bars(MEMORY_CATEGORIES, {name: held[name] for name in measured if held.get(name)}, measured)


def rank_table(run: Run) -> dict[str, list[dict[str, Any]]]:
    """What each rank measured: column -> a cell for each rank, with its size, its share of the largest, and whether it
    is over 5 % more than is usual."""
    columns: dict[str, Sequence[float | None]]
    columns = {TITLES[key]: run.rank_peaks[key] for key in list(TITLES)[:2] if key in run.rank_peaks}
    phases, main = _phases(run), _main_kind(run)
    columns |= {phase: [rank.get(main) for rank in ranks] for phase, ranks in phases.items()}
    for kind in dict.fromkeys(kind for ranks in phases.values() for rank in ranks for kind in rank if kind != main):
        by_phase = [[rank.get(kind) or 0 for rank in ranks] for ranks in phases.values()]
        columns[TITLES.get(kind, kind)] = [max(sizes) for sizes in zip(*by_phase, strict=False)]
    holders = _memory(run).get("holders", [])
    for name in dict.fromkeys(name for rank in holders for name in rank):
        columns[f"holds: {name}"] = [rank.get(name) for rank in holders]
    ranks = max(map(len, columns.values()), default=0)
    return {name: _cells(name, [*column, *[None] * (ranks - len(column))]) for name, column in columns.items()}


def _cells(name: str, column: Sequence[float | None]) -> list[dict[str, Any]]:
    sizes = [size if size is not None and math.isfinite(size) else None for size in column]
    known = [size or 0 for size in sizes]
    usual = median_low(known)
    # Tensors are counted exactly; of host memory Python and its libraries take what they like.
    most = max(1.05 * usual, usual + (MIB if name.startswith(("holds", "device")) else 128 * MIB))
    largest = max(known) or 1
    return [{"size": size, "share": (size or 0) / largest, "is_odd": (size or 0) > most} for size in sizes]


def step_plot(run: Run) -> Plot:
    """Predicted memory over one step, units gathered and freed."""
    timeline = run.plan.get("timeline", [])
    labels = [moment["label"].replace(" the model", " model") for moment in timeline]
    x, total = numpy.arange(len(timeline)), numpy.array([float(moment["bytes"]) for moment in timeline])
    gathered = numpy.array([float(moment["gathered_bytes"]) for moment in timeline])
    bands, place = list[tuple[float, float, str]](), 0
    for phase, group in itertools.groupby(labels, key=_phase_of):
        count = len(list(group))
        bands.append((max(place - 0.5, 0), min(place + count - 0.5, len(labels) - 1), phase))
        place += count
    series = [Series("all", x, total, "area", 0), Series("without gathered units", x, total - gathered, "area", 2)]
    title = "Memory over one step, predicted"
    return Plot(title, series, "bytes", from_zero=True, labels=labels, bands=bands, width=1180, height=290)


def _phase_of(label: str) -> str:
    return {"forward": "forward", "backward": "backward", "recompute": "backward"}.get(label.split()[0], label)


def _memory(run: Run) -> dict[str, Any]:
    memory = run.facts.get("memory", {})
    return memory if isinstance(memory, dict) else {}


def _phases(run: Run) -> dict[str, list[dict[str, Any]]]:
    phases = _memory(run).get("phases", {})
    return {phase: phases[phase] for phase in PHASES if phases.get(phase)}


def _main_kind(run: Run) -> str:
    """What of a rank's measured peaks the plan predicts: tensors on CUDA, on the CPU memory with no file behind it."""
    found = {kind for ranks in _phases(run).values() for rank in ranks for kind in rank if rank[kind]}
    return next((kind for kind in ("device_peak_bytes", "anonymous_peak_bytes") if kind in found), "")


def _phase_peaks(run: Run) -> dict[str, float]:
    kind = _main_kind(run)
    sizes = {phase: [float(rank.get(kind) or 0) for rank in ranks] for phase, ranks in _phases(run).items()}
    return {phase: max(found) for phase, found in sizes.items() if any(found)}


def _bars(names: Sequence[str], predicted: dict[str, float], measured: dict[str, float]) -> list[Bar]:
    most = max([*predicted.values(), *measured.values()], default=0) or 1
    return [
        Bar(n, predicted.get(n), measured.get(n), predicted.get(n, 0) / most, measured.get(n, 0) / most)
        for n in names
        if n in predicted or n in measured
    ]
