"""What was measured, as tables for people and as JSON."""

import io
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llama_ft.evaluation.held_out import HeldOut
from llama_ft.evaluation.tasks import Metrics
from llama_ft.runtime import console


@dataclass(frozen=True)
class Evaluated:
    """One model's results.

    Attributes:
        name: as it was called.
        about: what was loaded and how.
        held_out: loss on the samples, if it was asked for.
        tasks: of each task, if any were asked for.
        compared_with: number of the model in the list that it is compared with.
    """

    name: str
    about: str
    held_out: HeldOut | None
    tasks: Metrics | None
    compared_with: int | None = None


def describe(models: Sequence[Evaluated], samples: str, limit: int | float | None) -> str:
    """Return the tables.

    Args:
        models: at least one.
        samples: what the loss was measured on, in words.
        limit: questions of a task that were asked, or the share of them; None: all.
    """
    entries, tables = _with_differences(models), list[str]()
    if models[0].held_out is not None:
        titles = ["tokens", "loss", "perplexity", *(["difference"] if len(models) > 1 else [])]
        rows = []
        for entry in entries:
            found = entry["held_out"]
            numbers = [f"{found['target_tokens']:,}", f"{found['loss']:.4f}", f"{found['perplexity']:,.2f}"]
            rows.append([entry["name"], *numbers, *_difference(found)])
        tables.append(f"Loss on {samples}\n{_table([''], titles, rows)}")
        if not all(math.isfinite(entry["held_out"]["loss"]) for entry in entries):
            tables.append("A loss that is not finite: corrupted weights, or too large for the precision.")
    if models[0].tasks:
        some = f", with --limit {limit:g}: not for comparison with others' numbers" if limit else ""
        titles, rows = [], [[task, metric] for task, metrics in models[0].tasks.items() for metric in metrics]
        for entry in entries:
            titles += [entry["name"], *(["difference"] if entry["compared_with"] else [])]
            for row in rows:
                found = entry["tasks"][row[0]][row[1]]
                row += [_with_error(found), *_difference(found)]
        tables.append(f"Tasks of lm-evaluation-harness{some}\n{_table(['', 'metric'], titles, rows)}")
    return "\n\n".join(tables)


def to_json(models: Sequence[Evaluated], samples: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all results with their differences as plain values. Infinities and NaN, which JSON does not have, become
    null, as in metrics.jsonl.

    Args:
        models: at least one.
        samples: what the loss was measured on, in words.
        settings: how the tasks were asked.
    """
    names = ("torch", "transformers", "lm_eval")
    versions = {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}
    found = _finite(_with_differences(models))
    return {"rows": samples, "task_settings": settings, "models": found, "versions": versions}


def _with_differences(models: Sequence[Evaluated]) -> list[dict[str, Any]]:
    entries = [asdict(model) for model in models]
    for entry in entries:
        other = None if entry["compared_with"] is None else entries[entry["compared_with"]]
        entry["compared_with"] = other and other["name"]
        if other and entry["held_out"] and other["held_out"]:
            entry["held_out"]["difference"] = entry["held_out"]["loss"] - other["held_out"]["loss"]
        for task, metrics in (entry["tasks"] or {}).items():
            for metric, values in metrics.items():
                if other and other["tasks"]:
                    values["difference"] = values["value"] - other["tasks"][task][metric]["value"]
    return entries


def _difference(found: dict[str, Any]) -> list[str]:
    return [f"{found['difference']:+.4f}"] if "difference" in found else []


def _with_error(found: dict[str, Any]) -> str:
    sign = "±" if console.encoding.startswith("utf") else "+-"
    return f"{found['value']:.4f}" + (f" {sign} {found['stderr']:.4f}" if found["stderr"] is not None else "")


def _table(names: list[str], numbers: list[str], rows: list[list[str]]) -> str:
    """Names at the left, numbers at the right of their columns."""
    table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in numbers:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=10_000, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(f"  {line.rstrip()}" for line in text.getvalue().splitlines())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
