"""Build HTML pages, each one self-contained file: the report of a run, and a comparison of runs.

This module computes what is shown. The markup is in run.html, compare.html and parts.html.
"""

import base64
import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from markupsafe import Markup

from llama_ft.extensions.report.cards import Card, cards_of, next_commands, verdict_of
from llama_ft.extensions.report.memory import BASE, memory_of, rising
from llama_ft.extensions.report.plot import TEMPLATES, Plot, Series, number, smoothed
from llama_ft.extensions.report.run import Run, differing_settings
from llama_ft.phases import MEMORY_CATEGORIES, PHASES

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HERE = Path(__file__).parent
PICTURE = "data:image/jpeg;base64,"  # as training writes pictures of samples
ENDINGS = {"finished": "good", "failed": "bad", "stopped": "warn", "running": "info", "died": "bad"}
METRIC_PLOTS = {  # key -> title
    "train/loss": "Loss",
    "eval/loss": "Validation loss",
    "eval/score": "Score of the validation set",
    "eval/reward": "Mean reward of answers to held-out prompts",
    "train/reward": "Mean reward of the answers",
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


class UnitRow(NamedTuple):
    """Equal FSDP units that follow each other: one line of the table."""

    modules: str
    kind: str
    units: int
    parameters: int
    unsharded_bytes: int


def report_page(run: Run, price: float | None = None, refresh_seconds: int | None = None) -> str:
    """Return the report of a run as HTML.

    Args:
        run: its files.
        price: of a GPU per hour; if given, the report has the cost.
        refresh_seconds: if given, a browser loads the page again after so many seconds.
    """
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
    memory = memory_of(run)
    titles = METRIC_PLOTS | own_metrics([run])
    if memory.process:  # one measure: its peak of each phase is below, without files in memory
        del titles["memory/host_peak_bytes"]
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
        refresh_seconds=refresh_seconds,
        title=run.name,
        run=run,
        verdict=verdict_of(run),
        cards=cards_of(run, price),
        next_commands=next_commands(run),
        loss=Plot("Loss", loss, fits=True, is_wide=True, marks=marks).svg(),
        plots=plots,
        constants=constants,
        memory=memory,
        rising=rising(memory.process),
        samples=questions_of(run, "samples"),
        scored=questions_of(run, "scored"),
        rollouts=run.facts.get("rollouts", []),
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


def named_runs(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Run]:
    """Return runs with different names: the given ones, or else those of their directories. Equal
    ones get a letter."""
    chosen = list(names) or [run.name for run in runs]
    seen = Counter[str]()
    named = []
    for run, name in zip(runs, chosen, strict=True):
        seen[name] += 1
        letter = LETTERS[(seen[name] - 1) % len(LETTERS)]
        own = f"{name} ({letter})" if chosen.count(name) > 1 else name
        named.append(dataclasses.replace(run, name=own))
    return named


def comparison_page(runs: Sequence[Run], price: float | None = None) -> str:
    """Return a page that compares several runs: their curves in shared plots, their results, and
    differing settings. `price`: of a GPU per hour."""
    plots = []
    titles = METRIC_PLOTS | own_metrics(runs)
    if all(memory_of(run).process for run in runs):
        del titles["memory/host_peak_bytes"]
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
        for card in cards_of(run, price):
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
