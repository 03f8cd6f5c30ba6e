"""Predicted memory beside measured, as tables, bars and plots of the report."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from llama_ft.phases import HOLDERS, PHASES
from llama_ft.report.plot import Plot, Series
from llama_ft.report.run import Run

# Of what a rank measures in a phase, what the plan predicts: tensors on CUDA, on the CPU memory with no file behind it.
MEASURED_PEAKS = ("device_peak_bytes", "anonymous_peak_bytes")
TRAINING_PHASES = ("forward", "backward", "optimizer step")
WORDS = {
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
    found = [bytes for _, bytes in _phase_peaks(run)]
    if found:
        return max(found), "anonymous memory"
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
    return _bars(PHASES, predicted, dict(_phase_peaks(run)))


def holder_bars(run: Run) -> tuple[str, list[Bar]]:
    """What holds memory at the largest peak of training, predicted: its phase, and a bar for each holder."""
    peaks = run.plan.get("peaks", [])
    peaks = [peak for peak in peaks if peak["phase"] in TRAINING_PHASES] or peaks
    if not peaks:
        return "", []
    largest: dict[str, Any] = max(peaks, key=lambda peak: peak["bytes"])
    return str(largest["phase"]), [bar for bar in _bars(HOLDERS, largest["holders"], {}) if bar.predicted]


def held_bars(run: Run) -> list[Bar]:
    """What the step leaves on the fullest rank, measured on the tensors themselves, and the same of the plan."""
    measured: dict[str, float] = {}
    for rank in _memory(run).get("holders", []):
        measured |= {name: max(measured.get(name, 0.0), float(size)) for name, size in rank.items()}
    held: dict[str, float] = next(
        (p["holders"] for p in run.plan.get("peaks", []) if p["phase"] == "optimizer step"), {}
    )
    return _bars(HOLDERS, {name: held[name] for name in measured if held.get(name)}, measured)


def holder_table(run: Run) -> tuple[list[str], list[tuple[str, list[float], float]]]:
    """Predicted: the holders that hold anything, and for each phase their bytes and the sum."""
    peaks = run.plan.get("peaks", [])
    holders: list[str] = [name for name in HOLDERS if any(peak["holders"].get(name) for peak in peaks)]
    return holders, [
        (str(peak["phase"]), [float(peak["holders"].get(name, 0)) for name in holders], float(peak["bytes"]))
        for peak in peaks
    ]


def rank_table(run: Run) -> tuple[list[str], list[list[float | None]]]:
    """What each rank measured: the columns' names, and a row for each rank."""
    columns: dict[str, list[float | None]] = {}
    titles = {"memory/device_peak_bytes": "device, whole run", "memory/host_peak_bytes": "host (RSS), whole run"}
    for key, title in titles.items():
        if key in run.rank_peaks:
            columns[title] = [float(size) if math.isfinite(size) else None for size in run.rank_peaks[key]]
    phases, main = _phases(run), _main_kind(run)
    columns |= {phase: [_size(rank.get(main)) for rank in ranks] for phase, ranks in phases}
    kinds = dict.fromkeys(kind for _, ranks in phases for rank in ranks for kind in rank if kind != main)
    for kind in kinds:
        by_phase = [[_size(rank.get(kind)) or 0 for rank in ranks] for _, ranks in phases]
        columns[WORDS.get(kind, kind)] = [max(sizes) for sizes in zip(*by_phase, strict=False)]
    holders = _memory(run).get("holders", [])
    for name in dict.fromkeys(name for rank in holders for name in rank):
        columns[f"holds: {name}"] = [_size(rank.get(name)) for rank in holders]
    count = max(map(len, columns.values()), default=0)
    rows = [[column[rank] if rank < len(column) else None for column in columns.values()] for rank in range(count)]
    return list(columns), rows


def step_plots(run: Run) -> list[Plot]:
    """Memory over one step, units gathered and freed: predicted, and measured in the same plot where both count the
    same and are told module by module."""
    plots, timeline = [], run.plan.get("timeline", [])
    measured, unit = _memory(run).get("step", []), _memory(run).get("unit", "device")
    own_labels, sizes = [_module(m["label"]) for m in measured], numpy.array([float(m["bytes"]) for m in measured])
    if timeline:
        labels = [_module(moment["label"]) for moment in timeline]
        total = numpy.array([float(moment["bytes"]) for moment in timeline])
        rest = total - numpy.array([float(moment["gathered_bytes"]) for moment in timeline])
        x = numpy.arange(len(timeline))
        series = [Series("predicted", x, total, "area", 0), Series("without gathered units", x, rest, "area", 2)]
        places = _aligned(own_labels, labels) if unit == "device" else []
        if places:
            series.append(
                Series("measured", numpy.array([x for x, _ in places]), sizes[[n for _, n in places]], "line", 1)
            )
            measured = []
        title = "Memory over one step" + (", predicted" if not places else "")
        plots.append(_step_plot(title, labels, series, from_zero=True))
    if measured:
        what = "tensors on the GPU" if unit == "device" else "anonymous host memory"
        series = [Series("measured", numpy.arange(len(sizes)), sizes, "line", 1)]
        plots.append(_step_plot(f"Memory over one step, measured: {what}", own_labels, series, unit == "device"))
    return plots


def _step_plot(title: str, labels: Sequence[str], series: list[Series], from_zero: bool) -> Plot:
    bands, place = [], 0
    for phase, group in itertools.groupby(labels, key=lambda label: _phase_of(label)):
        count = len(list(group))
        bands.append((max(place - 0.5, 0), min(place + count - 0.5, len(labels) - 1), phase))
        place += count
    return Plot(title, series, "bytes", from_zero=from_zero, labels=labels, bands=bands, width=1180, height=330)


def _module(label: str) -> str:
    """The whole model is called so everywhere."""
    return label.replace(" the model", " model")


def _phase_of(label: str) -> str:
    first = label.partition(" ")[0]
    names = {"forward": "forward", "backward": "backward", "recompute": "backward", "step": "optimizer step"}
    return names.get(first, label)


def _aligned(labels: Sequence[str], onto: Sequence[str]) -> list[tuple[int, int]]:
    """(place in `onto`, place in `labels`) of labels that follow each other in both; none if most do not."""
    pairs, place = [], 0
    for n, label in enumerate(labels):
        try:
            found = onto.index(label, place)
        except ValueError:
            continue
        pairs.append((found, n))
        place = found + 1
    return pairs if len(pairs) > 0.8 * len(labels) else []


def _memory(run: Run) -> dict[str, Any]:
    memory = run.facts.get("memory", {})
    return memory if isinstance(memory, dict) else {}


def _phases(run: Run) -> list[tuple[str, list[dict[str, Any]]]]:
    phases = _memory(run).get("phases", {})
    return [(phase, phases[phase]) for phase in PHASES if phases.get(phase)]


def _phase_peaks(run: Run) -> list[tuple[str, float]]:
    kind = _main_kind(run)
    sizes = [(phase, [float(rank[kind]) for rank in ranks if rank.get(kind)]) for phase, ranks in _phases(run)]
    return [(phase, max(found)) for phase, found in sizes if found]


def _main_kind(run: Run) -> str:
    """What of a rank's measured peaks is the one of its device."""
    known = [kind for kind in MEASURED_PEAKS if any(rank.get(kind) for _, ranks in _phases(run) for rank in ranks)]
    return known[0] if known else ""


def _bars(names: Sequence[str], predicted: dict[str, float], measured: dict[str, float]) -> list[Bar]:
    most = max([*predicted.values(), *measured.values()], default=0) or 1
    return [
        Bar(n, predicted.get(n), measured.get(n), predicted.get(n, 0) / most, measured.get(n, 0) / most)
        for n in names
        if n in predicted or n in measured
    ]


def _size(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
