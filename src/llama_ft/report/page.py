"""Pages of HTML, each one file without anything from elsewhere: a run's report, and runs side by side.

What is shown is computed here and in memory.py; run.html, compare.html and parts.html have the markup.
"""

import base64
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from llama_ft.report.memory import MemoryFacts
from llama_ft.report.plot import TEMPLATES, Plot, Series, number, smoothed
from llama_ft.report.run import Run, differing_settings

HERE = Path(__file__).parent
ENDINGS = {"finished": "good", "failed": "bad", "stopped": "warn", "running": "info"}
METRIC_PLOTS = (  # key, title, unit
    ("train/lr", "Learning rate", ""),
    ("train/grad_norm", "Gradient norm, before clipping", ""),
    ("perf/tokens_per_second", "Tokens per second, all ranks", ""),
    ("perf/mfu", "Model FLOPs utilization (MFU), of the published peak", ""),
    ("perf/matmul_utilization", "Matmul utilization, of the measured rate", ""),
    ("perf/step_seconds", "Seconds a step", "s"),
    ("memory/device_peak_bytes", "Device memory, peak so far, fullest rank", "bytes"),
    ("memory/host_peak_bytes", "Host memory (RSS), peak so far, fullest rank", "bytes"),
    ("train/loss_scale", "Loss scale", ""),
)
NOISY = ("perf/", "train/grad_norm")


class Card(NamedTuple):
    """A number of the headline."""

    name: str
    value: str
    more: str = ""


def report_page(run: Run) -> str:
    """The report of a run."""
    loss = _lines(run, "train/loss", "training")
    if held_out := run.curves.get("eval/loss"):
        loss.append(Series("validation", held_out.steps, held_out.values, "dots", 1))
    plots = [Plot("Loss", loss, fits=True)]
    plots += [Plot(title, _lines(run, key, "mean"), unit) for key, title, unit in METRIC_PLOTS]
    memory = MemoryFacts(run)
    return _render(
        "run.html",
        title=run.name,
        run=run,
        cards=_cards(run),
        plots=[plot.svg() for plot in plots],
        memory=memory,
        differing=differing_settings([run]),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """Several runs on one page: curves over each other, what they were, and in what they differ."""
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.folder)) for run in runs]
    looks = [("train/loss", "Loss", ""), ("eval/loss", "Validation loss", ""), *METRIC_PLOTS]
    plots = []
    for key, title, unit in looks:  # of each run one line: the mean where there is one
        lines = [line for n, run in enumerate(runs) for line in _lines(run, key, run.name, n)[-1:]]
        if key == "eval/loss":
            lines = [dataclasses.replace(line, style="dots") for line in lines]
        plots.append(Plot(title, lines, unit, fits=key.endswith("/loss"), named=True))
    columns = [{card.name: card for card in _cards(run)} for run in runs]
    return _render(
        "compare.html",
        title=f"{len(runs)} runs",
        runs=runs,
        rows={name: [cards.get(name) for cards in columns] for name in dict.fromkeys(n for c in columns for n in c)},
        plots=[plot.svg() for plot in plots],
        differing=differing_settings(list(runs)),
    )


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


def _cards(run: Run) -> list[Card]:
    curves, cards = run.curves, []
    total = run.facts.get("total_steps")
    epochs = f"{curves['epoch'].last:.3g} epochs" if "epoch" in curves else ""
    cards.append(Card("Steps", f"{run.step:,}" + (f" of {total:,}" if total else ""), epochs))
    if loss := curves.get("train/loss"):
        cards.append(Card("Loss", number(loss.last, digits=4), f"{number(float(loss.values[0]), digits=4)} at first"))
    if held_out := curves.get("eval/loss"):
        step, lowest = held_out.lowest
        cards.append(Card("Validation loss", number(held_out.last, digits=4), f"best {lowest:.4g} at step {step:,}"))
    if speed := curves.get("perf/tokens_per_second"):
        cards.append(Card("Tokens per second", f"{speed.median:,.0f}", "median of the second half"))
    if utilization := curves.get("perf/mfu") or curves.get("perf/matmul_utilization"):
        title, share = ("MFU", "published") if "perf/mfu" in curves else ("Matmul utilization", "measured")
        cards.append(Card(title, f"{utilization.median:.0%}", f"of the {share} FLOP/s"))
    memory = MemoryFacts(run)
    (peak, kind), predicted, what = memory.measured_peak(), memory.predicted, ""
    if math.isfinite(predicted):
        plan = f"plan: {number(predicted, 'bytes')} of tensors"
        what = f"{plan} ({peak / predicted - 1:+.0%})" if memory.is_like_for_like else f"with Python; {plan}"
    if math.isfinite(peak):
        cards.append(Card(f"Peak of {kind}", number(peak, "bytes"), what))
    if ranks := max([len(peaks) for peaks in run.rank_peaks.values()], default=0):
        machine = run.facts.get("environment", {}).get("GPUs" if memory.is_like_for_like else "host", "")
        cards.append(Card("Ranks", f"{ranks}", machine))
    return cards


def _lines(run: Run, key: str, name: str, colour: int = 0) -> list[Series]:
    """A curve; of one that is noisy also its mean, last."""
    if (curve := run.curves.get(key)) is None:
        return []
    series = Series(name, curve.steps, curve.values, "line", colour)
    return smoothed(series) if key == "train/loss" or key.startswith(NOISY) else [series]
