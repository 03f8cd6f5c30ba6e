"""Pages of HTML, each one file without anything from elsewhere: a run's report, and runs side by side.

What is shown is computed here; run.html, compare.html and parts.html have the markup.
"""

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from markupsafe import Markup

from llama_ft.config.messages import size_text
from llama_ft.phases import MEMORY_CATEGORIES, PHASES
from llama_ft.report.plot import TEMPLATES, Plot, Series, number, smoothed
from llama_ft.report.run import Run, differing_settings

HERE = Path(__file__).parent
ENDINGS = {"finished": "good", "failed": "bad", "stopped": "warn", "running": "info"}
METRIC_PLOTS = {  # key -> title
    "train/loss": "Loss",
    "eval/loss": "Validation loss",
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm, before clipping",
    "perf/tokens_per_second": "Tokens per second, all ranks",
    "perf/mfu": "Model FLOPs utilization (MFU), of the published peak",
    "perf/matmul_utilization": "Matmul utilization, of the measured rate",
    "perf/step_seconds": "Seconds per step",
    "memory/device_peak_bytes": "Device memory, peak so far, fullest rank, GiB",
    "memory/host_peak_bytes": "Host memory (RSS), peak so far, fullest rank, GiB",
    "train/router_aux_loss": "Auxiliary loss of the routers, before its coefficient",
    "train/loss_scale": "Loss scale",
}


class Card(NamedTuple):
    """A number of the headline."""

    name: str
    value: str
    more: str = ""


class Memory(NamedTuple):
    """Predicted and measured memory; both by name -> bytes on the rank with the highest memory."""

    phases: tuple[dict[str, float], dict[str, float]]  # the peak of each phase
    held: tuple[dict[str, float], dict[str, float]]  # what a step leaves, by category
    ranks: dict[str, list[float | None]]  # what each rank measured, by phase and category
    is_like_for_like: bool  # both count the same; on the CPU, Python and its libraries are measured too


def report_page(run: Run) -> str:
    """The report of a run."""
    loss = _lines(run, "train/loss", "training") + _lines(run, "eval/loss", "validation", 1)
    plots = [Plot("Loss", loss, fits=True)]
    plots += [Plot(title, _lines(run, key, "mean")) for key, title in METRIC_PLOTS.items() if not key.endswith("/loss")]
    shown = [plot.svg() for plot in plots]
    values = {"memory": memory_of(run), "differing": differing_settings([run]), "categories": MEMORY_CATEGORIES}
    return _render("run.html", title=run.name, run=run, cards=cards_of(run), plots=shown, phases=PHASES, **values)


def comparison_page(runs: Sequence[Run]) -> str:
    """Several runs on one page: curves over each other, what they were, and in what they differ."""
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.folder)) for run in runs]
    plots = []
    for key, title in METRIC_PLOTS.items():  # of each run one line: the mean where there is one
        lines = [line for n, run in enumerate(runs) for line in _lines(run, key, run.name, n)[-1:]]
        plots.append(Plot(title, lines, fits=key.endswith("/loss"), named=True).svg())
    columns = [{card.name: card for card in cards_of(run)} for run in runs]
    rows = {name: [cards.get(name) for cards in columns] for name in dict.fromkeys(n for c in columns for n in c)}
    values = {"plots": plots, "differing": differing_settings(list(runs))}
    return _render("compare.html", title=f"{len(runs)} runs", runs=runs, rows=rows, **values)


def _render(template: str, **values: Any) -> str:
    script = (HERE / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = TEMPLATES.get_template(template).render(
        endings=ENDINGS,
        style=Markup((HERE / "style.css").read_text()),
        script=Markup(script),
        script_digest=Markup(digest),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **values,
    )
    return page.encode("utf-8", "replace").decode()  # an answer may hold half a character


def memory_of(run: Run) -> Memory:
    """Memory as the plan predicts it, and as facts.json and metrics.jsonl have it."""
    is_like_for_like = "memory/device_peak_bytes" in run.curves
    kind = "device_peak_bytes" if is_like_for_like else "anonymous_peak_bytes"
    measured, peaks = run.facts.get("memory", {}), run.plan.get("peaks", [])
    ranks = {phase: [rank.get(kind) for rank in sizes] for phase, sizes in measured.get("phases", {}).items()}
    most = {phase: max(filter(None, sizes), default=0.0) for phase, sizes in ranks.items()}
    holders: list[dict[str, float]] = measured.get("holders", [])
    names: list[str] = [name for name in MEMORY_CATEGORIES if any(name in rank for rank in holders)]
    held = {name: max(rank.get(name, 0.0) for rank in holders) for name in names}
    planned: dict[str, float] = next((peak["holders"] for peak in peaks if peak["phase"] == "optimizer step"), {})
    return Memory(
        ({peak["phase"]: peak["bytes"] for peak in peaks}, most),
        ({name: planned[name] for name in names if planned.get(name)}, held),
        ranks | {f"holds: {name}": [rank.get(name) for rank in holders] for name in names},
        is_like_for_like,
    )


def cards_of(run: Run) -> list[Card]:
    """The numbers of the headline."""
    curves, total = run.curves, run.facts.get("total_steps")
    epochs = f"{curves['epoch'].values[-1]:.3g} epochs" if "epoch" in curves else ""
    cards = [Card("Steps", f"{run.step:,}" + (f" of {total:,}" if total else ""), epochs)]
    for key, name in (("train/loss", "Loss"), ("eval/loss", "Validation loss")):
        if key in curves:
            steps, values = curves[key]
            lowest = f"lowest {number(values.min())} at step {steps[values.argmin()]:,.0f}"
            cards.append(Card(name, number(values[-1]), lowest))
    for key, name, text in (
        ("perf/tokens_per_second", "Tokens per second", "{:,.0f}"),
        ("perf/mfu", "MFU", "{:.0%}"),
        ("perf/matmul_utilization", "Matmul utilization", "{:.0%}"),
    ):
        if key in curves:
            settled = curves[key].values[len(curves[key].values) // 2 :]
            cards.append(Card(name, text.format(numpy.median(settled)), "median of the second half"))
    memory = memory_of(run)
    predicted, measured = (max(sizes.values(), default=0.0) for sizes in memory.phases)
    if measured:
        name = "Peak of GPU memory" if memory.is_like_for_like else "Peak of anonymous memory"
        cards.append(Card(name, size_text(measured), f"plan: {size_text(predicted)} of tensors" if predicted else ""))
    return cards


def _lines(run: Run, key: str, name: str, colour: int = 0) -> list[Series]:
    """A curve; of one that is noisy also its mean, last."""
    if (curve := run.curves.get(key)) is None:
        return []
    values = curve.values / 2**30 if key.endswith("_bytes") else curve.values
    series = Series(name, curve.steps, values, "dots" if key == "eval/loss" else "line", colour)
    is_noisy = key in ("train/loss", "train/grad_norm") or key.startswith("perf/")
    return smoothed(series) if is_noisy else [series]
