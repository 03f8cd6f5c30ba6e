"""Pages of HTML, each one file without anything from elsewhere: a run's report, and runs side by side."""

import base64
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median_low
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from llama_ft.config.wording import show
from llama_ft.masking import mask_secrets
from llama_ft.report import memory
from llama_ft.report.axes import number
from llama_ft.report.plot import Plot, Series, histogram, smoothed
from llama_ft.report.run import Run, differing_settings

HERE = Path(__file__).parent
MIB = 2**20
ENDINGS = {"finished": "good", "failed": "bad", "stopped": "warn", "running": "info"}
METRIC_PLOTS = (  # key, title, unit, whether a logarithmic axis may be better, whether it begins at zero
    ("train/lr", "Learning rate", "", False, True),
    ("train/grad_norm", "Gradient norm, before clipping", "", True, False),
    ("perf/tokens_per_second", "Tokens per second, all ranks", "", False, True),
    ("perf/mfu", "Model FLOPs utilization (MFU), of the measured rate", "", False, True),
    ("perf/step_seconds", "Seconds a step", "s", True, True),
    ("memory/device_peak_bytes", "Device memory, peak so far, fullest rank", "bytes", False, True),
    ("memory/host_peak_bytes", "Host memory (RSS), peak so far, fullest rank", "bytes", False, True),
    ("train/loss_scale", "Loss scale", "", True, False),
)
NOISY = ("train/loss", "train/grad_norm", "perf/tokens_per_second", "perf/mfu", "perf/step_seconds")


@dataclasses.dataclass(frozen=True)
class Card:
    """A number of the headline."""

    name: str
    value: str
    more: str = ""


def report_page(run: Run) -> str:
    """The report of a run."""
    phase, holders = memory.holder_bars(run)
    rank_columns, ranks = memory.rank_table(run)
    holder_names, holder_rows = memory.holder_table(run)
    return _render(
        "run.html",
        title=run.name,
        run=run,
        ending=ENDINGS.get(str(run.status.get("state")), "info"),
        about=_about(run),
        outcome=_outcome(run),
        cards=_cards(run),
        plots=[plot.svg() for plot in _loss_plots(run) + _metric_plots(run)],
        phase_bars=memory.phase_bars(run),
        largest_phase=phase,
        holder_bars=holders,
        held_bars=memory.held_bars(run),
        holder_names=holder_names,
        holder_rows=holder_rows,
        step_plots=[plot.svg() for plot in memory.step_plots(run)],
        like_for_like=memory.is_like_for_like(run),
        measured=run.facts.get("memory", {}),
        rank_columns=rank_columns,
        rank_cells=_rank_cells(rank_columns, ranks),
        seconds=_seconds_of_a_step(run),
        units=unit_groups(run.facts.get("units", [])),
        data_rows=_data_rows(run),
        histograms=_histograms(run),
        samples=_samples(run),
        differing=differing_settings([run]),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """Several runs on one page: curves over each other, what they were, and in what they differ."""
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.folder)) for run in runs]
    plots = [
        Plot("Loss", _overlaid(runs, "train/loss"), log=True, named=True),
        Plot("Validation loss", _overlaid(runs, "eval/loss", "dots"), log=True, named=True),
    ]
    for key, title, unit, log, from_zero in METRIC_PLOTS:
        plots.append(Plot(title, _overlaid(runs, key), unit, log, from_zero, named=True))
    columns = [[(card.name, card) for card in _cards(run)] for run in runs]
    names = list(dict.fromkeys(name for cards in columns for name, _ in cards))
    return _render(
        "compare.html",
        title=f"{len(runs)} runs",
        runs=runs,
        endings=[ENDINGS.get(str(run.status.get("state")), "info") for run in runs],
        rows={name: [dict(cards).get(name) for cards in columns] for name in names},
        plots=[plot.svg() for plot in plots],
        differing=differing_settings(list(runs)),
    )


def unit_groups(units: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """FSDP units, equal ones counted together; of each group the names and the share of the model."""
    total = sum(unit["parameters"] for unit in units) or 1
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for unit in units:
        kind = unit["kind"] if unit["name"] else "rest of the model"
        groups.setdefault((kind, unit["parameters"], unit["bytes"]), []).append(unit)
    return [
        {
            "kind": kind,
            "count": len(members),
            "parameters": parameters,
            "bytes": size,
            "share": parameters * len(members) / total,
            "names": [unit["name"] or "everything that is in no other unit" for unit in members],
        }
        for (kind, parameters, size), members in groups.items()
    ]


def _render(template: str, **values: Any) -> str:
    jinja = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: mask_secrets(value) if isinstance(value, str) and type(value) is str else value,
    )
    jinja.filters |= {"size": lambda value: "" if value is None else number(value, "bytes", digits=4), "show": show}
    script = (HERE / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = jinja.get_template(template).render(
        style=Markup((HERE / "style.css").read_text()),
        script=Markup(script),
        script_digest=Markup(digest),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **values,
    )
    return page.encode("utf-8", "replace").decode()  # an answer may hold half a character


def _about(run: Run) -> str:
    names = ("model.model_name", "data.dataset")
    model, rows = (show(run.settings[name]) if name in run.settings else "" for name in names)
    method = "full tuning"
    if run.settings.get("peft.use_peft"):
        method = "LoRA"
        mode = run.settings.get("quantization.mode")
        method += f" beside {mode} weights" if mode not in (None, "none") else ""
    return f"{method} of {model} on {rows}" if model else ""


def _outcome(run: Run) -> str:
    """That the run stopped early, and which step the final model is of, where that is not the last one."""
    total, weights_of = run.facts.get("total_steps"), run.facts.get("weights_of")
    lines = []
    if run.status.get("state") == "finished" and total and run.step < total:
        lines.append(f"Stopped early, after step {run.step:,} of {total:,}: the validation loss no longer fell.")
    if weights_of is not None and weights_of != run.step:
        lines.append(f"The final model has the weights of step {weights_of:,}, with the best validation loss.")
    return " ".join(lines)


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
    if utilization := curves.get("perf/mfu"):
        rate = sum(run.facts.get("speed", {}).get("product_flops_per_second", [])) / 1e12
        cards.append(Card("MFU", f"{utilization.median:.0%}", f"of {rate:.3g} TFLOP/s, measured" if rate else ""))
    peak, kind = memory.measured_peak(run)
    predicted, what = memory.predicted_peak(run), ""
    if math.isfinite(predicted):
        plan = f"plan: {number(predicted, 'bytes')} of tensors"
        what = f"{plan} ({peak / predicted - 1:+.0%})" if memory.is_like_for_like(run) else f"with Python; {plan}"
    if math.isfinite(peak):
        cards.append(Card(f"Peak of {kind}", number(peak, "bytes"), what))
    elif math.isfinite(predicted):
        cards.append(Card("Predicted peak", number(predicted, "bytes"), "nothing was measured"))
    cards.append(_device(run))
    return [card for card in cards if card.value]


def _device(run: Run) -> Card:
    ranks = max([len(peaks) for peaks in run.rank_peaks.values()] + [int(run.plan.get("world_size", 0))])
    environment = run.facts.get("environment", {})
    on_gpu = "memory/device_peak_bytes" in run.rank_peaks or run.plan.get("device") == "cuda"
    if not ranks:
        return Card("Device", "")
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    more = environment.get("GPUs" if on_gpu else "host", "")
    return Card("Device", "GPU" if on_gpu else "CPU", f"{count}; {more}" if more else count)


def _rank_cells(names: list[str], ranks: list[list[float | None]]) -> list[list[dict[str, Any]]]:
    """Each rank's numbers with their share of the largest, and whether they are over 5 % more than is usual."""
    columns = [[size or 0 for size in column] for column in zip(*ranks, strict=True)]
    usual = [median_low(column) for column in columns]
    # Tensors are counted exactly; of host memory Python and its libraries take what they like.
    least = [MIB if name.startswith(("holds", "device")) else 128 * MIB for name in names]
    return [
        [
            {
                "size": size,
                "share": (size or 0) / (max(columns[n]) or 1),
                "is_odd": (size or 0) > max(1.05 * usual[n], usual[n] + least[n]),
            }
            for n, size in enumerate(row)
        ]
        for row in ranks
    ]


def _loss_plots(run: Run) -> list[Plot]:
    series = _lines(run, "train/loss", "training")
    if held_out := run.curves.get("eval/loss"):
        series.append(Series("validation", held_out.steps, held_out.values, "dots", 1))
    return [Plot("Loss", series, log=True)]


def _metric_plots(run: Run) -> list[Plot]:
    plots = []
    for key, title, unit, log, from_zero in METRIC_PLOTS:
        plots.append(Plot(title, _lines(run, key, "mean"), unit, log, from_zero))
    return plots


def _lines(run: Run, key: str, name: str, colour: int = 0) -> list[Series]:
    """A curve; of one that is noisy also its mean, last."""
    if (curve := run.curves.get(key)) is None:
        return []
    if key in NOISY:
        return smoothed(name, curve.steps, curve.values, colour)
    return [Series(name, curve.steps, curve.values, "line", colour)]


def _overlaid(runs: Sequence[Run], key: str, style: str = "") -> list[Series]:
    """One line of each run: the mean where there is one."""
    lines = [_lines(run, key, run.name, n)[-1:] for n, run in enumerate(runs)]
    return [dataclasses.replace(line, style=style or line.style) for found in lines for line in found]


def _seconds_of_a_step(run: Run) -> list[dict[str, Any]]:
    """Where they went: what took any, its share, and how long it would take at the measured rate."""
    speed = run.facts.get("speed", {})
    parts = {name: seconds for name, seconds in speed.get("parts", {}).items() if seconds}
    return [
        {
            "name": name,
            "seconds": number(seconds),
            "share": seconds / speed["seconds"],
            "least": number(speed["at_measured_rate"][name]) if name in speed["at_measured_rate"] else "",
        }
        for name, seconds in parts.items()
    ]


def _data_rows(run: Run) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for name, title in (("train", "training"), ("validation", "validation")):
        split = run.facts.get("data", {}).get(name)
        if split and split["rows"]:
            parts = split["parts"] if len(split["parts"]) > 1 else {}
            rows += [(title, split), *((f"\N{NO-BREAK SPACE} {part}", one) for part, one in parts.items())]
    return rows


def _histograms(run: Run) -> list[Markup]:
    data = run.facts.get("data", {})
    splits = [("Training rows", data.get("train"), 0), ("Validation rows", data.get("validation"), 1)]
    edges = data.get("edges", [])
    return [
        histogram(split["histogram"], edges, title, colour)
        for title, split, colour in splits
        if split and len(edges) == len(split["histogram"]) + 1
    ]


def _samples(run: Run) -> list[dict[str, Any]]:
    """Questions, each with its answers in time and the reference."""
    asked: dict[str, dict[str, Any]] = {}
    for sample in run.facts.get("samples", []):
        one = asked.setdefault(sample["question"], {"reference": sample["reference"], "answers": []})
        one["answers"].append((sample["when"], sample["answer"]))
    return [{"question": question, **one} for question, one in asked.items()]
