"""Predicted and measured memory of a run, for its report."""

from typing import NamedTuple

from llama_ft.extensions.report.run import Run
from llama_ft.phases import MEMORY_CATEGORIES, PHASES

BASE = "Python and its libraries"
RISE = 1.01  # a phase whose peak is not above this share of an earlier one adds nothing


class Memory(NamedTuple):
    """Predicted and measured memory, both as name -> bytes on the rank with the highest memory.

    Without a GPU, the peaks of tensors cannot be measured: only the whole process can, which is not
    what the plan predicts. Then `phases` is empty.
    """

    # peaks of tensors per phase: (predicted, measured)
    phases: tuple[dict[str, float], dict[str, float]]
    held: tuple[dict[str, float], dict[str, float]]  # tensors that remain after a step, by category
    # without a GPU: host memory before loading, and at the peak of each phase
    process: dict[str, float]
    ranks: dict[str, list[float | None]]  # measured on each rank, by phase and category


def memory_of(run: Run) -> Memory:
    """Return the memory predicted by the plan and the memory measured in facts.json and
    metrics.jsonl."""
    is_gpu = "memory/device_peak_bytes" in run.curves
    kind = "device_peak_bytes" if is_gpu else "anonymous_peak_bytes"
    measured = run.facts.get("memory", {})
    peaks = run.plan.get("peaks", [])
    ranks: dict[str, list[float | None]] = {}
    most: dict[str, float] = {}  # of the rank with the highest memory
    for phase, peaks_of_ranks in measured.get("phases", {}).items():
        sizes = [rank.get(kind) for rank in peaks_of_ranks]
        ranks[phase] = sizes
        most[phase] = max(filter(None, sizes), default=0.0)
    held: dict[str, float] = {}
    for name in MEMORY_CATEGORIES:
        held_by_ranks = [rank.get(name) for rank in measured.get("holders", [])]
        present = [size for size in held_by_ranks if size is not None]
        if present:
            held[name] = max(present)
            ranks[f"holds: {name}"] = held_by_ranks
    planned: dict[str, float] = {}
    for peak in peaks:
        if peak["phase"] == "optimizer step":
            planned = peak["holders"]
            break
    predicted_peaks = {peak["phase"]: peak["bytes"] for peak in peaks}
    predicted_held = {name: planned[name] for name in held if planned.get(name)}
    base = {BASE: measured["base_bytes"]} if "base_bytes" in measured else {}
    is_process = bool(most) and not is_gpu
    return Memory(
        phases=({}, {}) if is_process else (predicted_peaks, most),
        held=(predicted_held, held),
        process=base | most if is_process else {},
        ranks=ranks,
    )


def rising(process: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the phases whose peak is above those of all earlier ones, and the names of the others.
    The C library keeps freed memory, so later phases mostly repeat the highest peak."""
    shown = dict[str, float]()
    others = list[str]()
    for phase in (BASE, *PHASES):
        if phase not in process:
            continue
        if process[phase] > RISE * max(shown.values(), default=0.0):
            shown[phase] = process[phase]
        else:
            others.append(phase)
    return shown, others
