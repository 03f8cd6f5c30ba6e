"""What was measured, as tables for people and as JSON."""

import copy
import io
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llama_ft.evaluation.tasks import Metrics


@dataclass(frozen=True)
class Evaluated:
    """One model's results: its loss on the samples, and of each task, if they were asked for; and those of the model
    that it is compared with. `about` says what was loaded and how."""

    name: str
    about: str
    held_out: dict[str, float] | None
    tasks: Metrics | None
    base: "Evaluated | None" = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the differences."""
        found: Any = copy.deepcopy({"held_out": self.held_out, "tasks": self.tasks})
        if self.base is not None:
            if found["held_out"] and self.base.held_out:
                found["held_out"]["difference"] = found["held_out"]["loss"] - self.base.held_out["loss"]
            for task, metrics in (self.base.tasks or {}).items():
                for name, it in metrics.items():
                    found["tasks"][task][name]["difference"] = found["tasks"][task][name]["value"] - it["value"]
        return {"name": self.name, "about": self.about, "compared_with": self.base and self.base.name, **found}


def describe(models: list[Evaluated], samples: str, limit: float | None) -> str:
    """Return the tables: the loss on `samples`, in words, and the tasks, of which `limit` questions were asked."""
    entries, tables = [model.to_json() for model in models], list[str]()
    if models[0].held_out:
        table = Table("", box=None)
        for title in ("tokens", "loss", "perplexity", *(["difference"] if len(models) > 1 else [])):
            table.add_column(title, justify="right")
        for entry in entries:
            it = entry["held_out"]
            numbers = f"{it['target_tokens']:,}", f"{it['loss']:.4f}", f"{it['perplexity']:,.2f}"
            table.add_row(entry["name"], *numbers, *_difference(it))
        tables.append(f"Loss on {samples}\n{_text(table)}")
    if models[0].tasks:
        table = Table("", "metric", box=None)
        for entry in entries:
            for title in (entry["name"], *(["difference"] if entry["compared_with"] else [])):
                table.add_column(title, justify="right")
        for task, metrics in models[0].tasks.items():
            for name in metrics:
                found = [entry["tasks"][task][name] for entry in entries]
                table.add_row(task, name, *(cell for it in found for cell in (_value(it), *_difference(it))))
        some = f", with --limit {limit:g}: not for comparison with others' numbers" if limit else ""
        tables.append(f"Tasks of lm-evaluation-harness{some}\n{_text(table)}")
    return "\n\n".join(tables)


def write_json(models: list[Evaluated], samples: str, task_settings: dict[str, Any]) -> str:
    """Return all results as JSON. NaN and infinities, which JSON lacks, become null, as in metrics.jsonl."""
    found = {"rows": samples, "task_settings": task_settings, "models": [model.to_json() for model in models]}
    return json.dumps(json.loads(json.dumps(found), parse_constant=lambda _: None), indent=2)


def _difference(it: dict[str, Any]) -> list[str]:
    return [f"{it['difference']:+.4f}"] if "difference" in it else []


def _value(it: dict[str, Any]) -> str:
    return f"{it['value']:.4f}" + (f" ± {it['stderr']:.4f}" if it["stderr"] is not None else "")


def _text(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=10_000, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
