"""Build HTML pages, each one self-contained file: the report of a run, and a comparison of runs.

This module computes what is shown. The markup is in run.html, compare.html and parts.html.
"""

import base64
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from markupsafe import Markup

from llama_ft.config.wording.messages import size_text
from llama_ft.extensions.report.plot import TEMPLATES, Plot, Series, number, smoothed
from llama_ft.extensions.report.run import Run, differing_settings
from llama_ft.phases import MEMORY_CATEGORIES, PHASES

HERE = Path(__file__).parent
BASE = "Python and its libraries"
PICTURE = "data:image/jpeg;base64,"  # as training writes pictures of samples
ENDINGS = {"finished": "good", "failed": "bad", "stopped": "warn", "running": "info", "died": "bad"}
METRIC_PLOTS = {  # key -> title
    "train/loss": "Loss",
    "eval/loss": "Validation loss",
    "eval/score": "Score of the validation set",
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "perf/tokens_per_second": "Tokens per second",
    "perf/mfu": "MFU",
    "perf/matmul_utilization": "Matmul utilization",
    "perf/step_seconds": "Time per step",
    "perf/data_wait_seconds": "Wait for data per step",
    "perf/save_seconds": "Time to write a checkpoint",
    "perf/save_stall_seconds": "Training pause per checkpoint",
    "memory/device_peak_bytes": "GPU memory, peak so far",
    "memory/host_peak_bytes": "Host memory (RSS), peak so far",
    "train/router_aux_loss": "Auxiliary loss of the routers, before its coefficient",
    "train/loss_scale": "Loss scale",
    "train/rewards/chosen": "Reward of the chosen responses",
    "train/rewards/rejected": "Reward of the rejected responses",
    "train/rewards/margins": "Reward margin, chosen minus rejected",
    "eval/rewards/margins": "Reward margin of the validation set",
    "train/kl": "KL divergence from the reference, an estimate",
    "train/rewards/accuracies": "Reward accuracy",
    "eval/rewards/accuracies": "Reward accuracy of the validation set",
}

# Every plot but those of losses begins at zero. There, a smaller change than this share of the
# largest value looks like a constant.
VISIBLE_CHANGE = 0.01

# Keys without a plot; those of the recipe and of an objective of one's own have one.
LOSS_OF_A_SET = re.compile(r"eval/\w+/loss")
UNPLOTTED = {"step", "epoch", "tokens", "eval/perplexity", "train/skipped_steps"}


class Unit(NamedTuple):
    """The unit of a plot's numbers."""

    sign: str = ""
    size: float = 1.0  # in units of the metric
    decimals: int | None = None  # None: as many as needed


PLAIN = Unit()
PERCENT = Unit("%", 0.01, 1)
UNITS = {  # end of a key -> units, largest first
    "_bytes": (Unit("GiB", 2**30, 2), Unit("MiB", 2**20, 0)),
    "_seconds": (Unit("s", 1.0, 2), Unit("ms", 1e-3, 0)),
    "/mfu": (PERCENT,),
    "_utilization": (PERCENT,),
    "/accuracies": (PERCENT,),
}


class Card(NamedTuple):
    """A number at the top of the report."""

    name: str
    value: str
    more: str = ""


class UnitRow(NamedTuple):
    """Equal FSDP units that follow each other: one line of the table."""

    modules: str
    kind: str
    units: int
    parameters: int
    unsharded_bytes: int


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


def report_page(run: Run) -> str:
    """Return the report of a run as HTML."""
    loss = _lines(run, "train/loss", "training") + _lines(run, "eval/loss", "validation", 1)
    of_sets = [key for key in run.curves if LOSS_OF_A_SET.fullmatch(key)]
    for colour, key in enumerate(of_sets, start=2):
        loss += _lines(run, key, key.split("/")[1], colour)
    plots = list[Markup]()
    constants = dict[str, str]()  # title -> value
    marks = [
        (
            attempt["step"],
            "; ".join([f"resumed after step {attempt['step']:,}", *attempt["differences"]]),
        )
        for attempt in run.attempts[1:]
    ]
    titles = METRIC_PLOTS | own_metrics([run])
    for key, title in titles.items():
        if key.endswith("/loss") or key not in run.curves:
            continue
        unit = unit_of([run], key)
        lines = _lines(run, key, "mean", unit=unit)
        values = lines[0].y
        if is_constant(values):
            constants[title] = f"{number(values[-1])} {unit.sign}".rstrip()
        else:
            plots.append(Plot(_title(title, unit), lines, marks=marks).svg())
    return _render(
        "run.html",
        title=run.name,
        run=run,
        cards=cards_of(run),
        loss=Plot("Loss", loss, fits=True, is_wide=True, marks=marks).svg(),
        plots=plots,
        constants=constants,
        memory=memory_of(run),
        samples=questions_of(run, "samples"),
        scored=questions_of(run, "scored"),
        units=unit_rows(run.facts.get("units", [])),
        differing=differing_settings([run]),
        categories=MEMORY_CATEGORIES,
        phases=(BASE, *PHASES),
    )


class Question(NamedTuple):
    """A question, and its answers in order of time."""

    text: str
    pictures: list[str]  # data: URLs
    answers: list[dict[str, Any]]


def questions_of(run: Run, kind: str) -> list[Question]:
    """Return the questions in facts.json of a kind, sorted. Equal texts about different images are
    different questions."""
    known = run.facts.get("pictures", {})
    by_question = dict[tuple[str, ...], list[dict[str, Any]]]()
    for answer in run.facts.get(kind, []):
        key = (answer.get("question", ""), *answer.get("images", ()))
        by_question.setdefault(key, []).append(answer)
    questions = []
    for (text, *names), answers in sorted(by_question.items(), key=itemgetter(0)):
        urls = [known.get(name, "") for name in names]
        pictures = [url for url in urls if url.startswith(PICTURE)]
        questions.append(Question(text, pictures, answers))
    return questions


def is_constant(values: numpy.ndarray) -> bool:
    """Return whether a chart of these values, which begins at zero, would be a flat line."""
    change = values.max() - values.min()
    largest = numpy.abs(values).max()
    return bool(change <= VISIBLE_CHANGE * largest)


def unit_rows(units: Sequence[dict[str, Any]]) -> list[UnitRow]:
    """Return one row for all equal units that follow each other, such as the layers of a model."""
    rows = list[UnitRow]()
    for (kind, parameters, size), equal in groupby(
        units, key=itemgetter("kind", "parameters", "bytes")
    ):
        names = [unit["name"] or "rest of the model" for unit in equal]
        modules = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        rows.append(UnitRow(modules, kind, len(names), parameters, size))
    return rows


def own_metrics(runs: Sequence[Run]) -> dict[str, str]:
    """Return the metrics that this page has no title for, each with its key as the title."""
    keys = {key for run in runs for key in run.curves}
    return {key: key for key in sorted(keys - METRIC_PLOTS.keys() - UNPLOTTED)}


def comparison_page(runs: Sequence[Run]) -> str:
    """Return a page that compares several runs: their curves in shared plots, their results, and
    differing settings."""
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.folder)) for run in runs]
    plots = []
    titles = METRIC_PLOTS | own_metrics(runs)
    for key, title in titles.items():  # one line per run: the smoothed one if there is one
        unit = unit_of(runs, key)
        lines = list[Series]()
        for number_of_run, run in enumerate(runs):
            lines += _lines(run, key, run.name, number_of_run, unit)[-1:]
        fits = key.endswith("/loss")
        plots.append(Plot(_title(title, unit), lines, fits=fits, named=True).svg())
    # name of a card -> that card of each run, None for runs without it
    rows = dict[str, list[Card | None]]()
    for number_of_run, run in enumerate(runs):
        for card in cards_of(run):
            rows.setdefault(card.name, [None] * len(runs))[number_of_run] = card
    values = {"plots": plots, "differing": differing_settings(list(runs))}
    return _render("compare.html", title=f"{len(runs)} runs", runs=runs, rows=rows, **values)


def _title(title: str, unit: Unit) -> str:
    return f"{title}, {unit.sign}" if unit.sign else title


def _render(template: str, **values: Any) -> str:
    script = (HERE / "script.js").read_text()
    # The page's Content-Security-Policy allows only the script with this digest, so that no text of
    # a run can become a script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = TEMPLATES.get_template(template).render(
        endings=ENDINGS,
        style=Markup((HERE / "style.css").read_text()),
        script=Markup(script),
        script_digest=Markup(digest),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **values,
    )
    return page.encode("utf-8", "replace").decode()  # a response may hold half a surrogate pair


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


def unit_of(runs: Sequence[Run], key: str) -> Unit:
    """Return the largest unit in which the metric's largest value is at least 1."""
    curves = [run.curves[key] for run in runs if key in run.curves]
    largest = max((curve.values.max() for curve in curves), default=0.0)
    units: tuple[Unit, ...] = (PLAIN,)
    for end, units_of_end in UNITS.items():
        if key.endswith(end):
            units = units_of_end
    for unit in units:
        if unit.size <= largest:
            return unit
    return units[-1]


def cards_of(run: Run) -> list[Card]:
    """Return the numbers at the top of the report."""
    curves = run.curves
    total = run.facts.get("total_steps")
    epochs = f"epoch {curves['epoch'].values[-1]:.3g}" if "epoch" in curves else ""
    cards = list[Card]()
    for key, name in (("eval/loss", "Validation loss"), ("train/loss", "Training loss")):
        if key in curves:
            steps, values = curves[key]
            compared = list[str]()
            if steps[0] == 0:
                compared.append(f"{number(values[0])} before training")
            if values.min() < values[-1]:
                lowest = steps[values.argmin()]
                compared.append(f"lowest {number(values.min())} at step {lowest:,.0f}")
            cards.append(Card(name, number(values[-1]), "; ".join(compared)))
    cards.append(Card("Steps", f"{run.step:,}" + (f" of {total:,}" if total else ""), epochs))
    for key, name, text in (
        ("perf/tokens_per_second", "Tokens per second", "{:,.0f}"),
        ("perf/mfu", "MFU", "{:.0%}"),
    ):
        if key in curves:
            settled = curves[key].values[len(curves[key].values) // 2 :]
            cards.append(Card(name, text.format(numpy.median(settled)), "median of last half"))
    memory = memory_of(run)
    predicted, measured = (max(sizes.values(), default=0.0) for sizes in memory.phases)
    if measured:
        plan = f"planned: {size_text(predicted)}" if predicted else ""
        cards.append(Card("Peak GPU memory", size_text(measured), plan))
    elif memory.process:
        largest = size_text(max(memory.process.values()))
        base = memory.process.get(BASE)
        more = f"{size_text(base)} of it before loading" if base else ""
        cards.append(Card("Peak host memory", largest, more))
    return cards


def _lines(run: Run, key: str, name: str, colour: int = 0, unit: Unit = PLAIN) -> list[Series]:
    """Return a curve in its unit. If it is noisy, its smoothed line follows."""
    curve = run.curves.get(key)
    if curve is None:
        return []
    values = curve.values / unit.size
    if unit.decimals is not None:
        values = values.round(unit.decimals)
    style = "dots" if key.startswith("eval/") and key.endswith("/loss") else "line"
    series = Series(name, curve.steps, values, style, colour)
    is_noisy = key in ("train/loss", "train/grad_norm") or key.startswith("perf/")
    return smoothed(series) if is_noisy else [series]
