"""What was measured, as tables for people and as JSON."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llama_ft.evaluation.held_out import HeldOut
from llama_ft.evaluation.tasks import Metrics
from llama_ft.runtime import console


@dataclass(frozen=True)
class Evaluated:
    """One model's results.

    Attributes:
        name: as it was called.
        about: what was loaded and how.
        held_out: loss on the rows, if it was asked for.
        tasks: of each task, if any were asked for.
        compared_with: number of the model in the list that it is compared with.
    """

    name: str
    about: str
    held_out: HeldOut | None
    tasks: Metrics | None
    compared_with: int | None = None


def describe(models: Sequence[Evaluated], rows: str, limit: int | float | None) -> str:
    """The tables.

    Args:
        models: at least one.
        rows: what the loss was measured on, in words.
        limit: questions of a task that were asked, or the share of them; None: all.
    """
    tables = []
    if models[0].held_out is not None:
        tables.append(f"Loss on {rows}\n{_table(_loss_lines(models))}")
    if models[0].tasks:
        some = f", with --limit {limit:g}: not for comparison with others' numbers" if limit else ""
        tables.append(f"Tasks of lm-evaluation-harness{some}\n{_table(_task_lines(models))}")
    return "\n\n".join(tables)


def find_warnings(models: Sequence[Evaluated]) -> list[str]:
    """A line for each model whose loss says nothing."""
    return [
        f"{model.name}: the loss is no number ({model.held_out.loss}): the weights are damaged, or too large for the "
        "precision."
        for model in models
        if model.held_out is not None and not math.isfinite(model.held_out.loss)
    ]


def _loss_lines(models: Sequence[Evaluated]) -> list[list[str]]:
    lines = [["", "tokens", "loss", "perplexity", *(["difference"] if len(models) > 1 else [])]]
    for model in models:
        mine, other = model.held_out, _other(model, models)
        assert mine is not None
        line = [model.name, f"{mine.target_tokens:,}", f"{mine.loss:.4f}", f"{mine.perplexity:,.2f}"]
        if len(models) > 1:
            line.append(f"{mine.loss - other.held_out.loss:+.4f}" if other and other.held_out else "")
        lines.append(line)
    return lines


def _task_lines(models: Sequence[Evaluated]) -> list[list[str]]:
    """A line for each metric, a column for each model and its difference."""
    heading = ["", "metric"]
    for model in models:
        heading += [model.name, *(["difference"] if model.compared_with is not None else [])]
    lines = [heading]
    for task, metrics in (models[0].tasks or {}).items():
        for metric in metrics:
            line = [task, metric]
            for model in models:
                found, other = (model.tasks or {})[task][metric], _other(model, models)
                line.append(_with_error(found))
                if other is not None:
                    line.append(f"{found['value'] - (other.tasks or {})[task][metric]['value']:+.4f}")
            lines.append(line)
    return lines


def _with_error(found: dict[str, Any]) -> str:
    sign = "±" if console.encoding.startswith("utf") else "+-"
    return f"{found['value']:.4f}" + (f" {sign} {found['stderr']:.4f}" if found["stderr"] is not None else "")


def _other(model: Evaluated, models: Sequence[Evaluated]) -> Evaluated | None:
    return None if model.compared_with is None else models[model.compared_with]


def _table(lines: list[list[str]]) -> str:
    """Names at the left, numbers at the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lefts = 2 if lines[0][:2] == ["", "metric"] else 1
    shown = [
        "  ".join(
            cell.ljust(width) if number < lefts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(f"  {line}".rstrip() for line in shown)


def to_json(models: Sequence[Evaluated], rows: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All of it, with differences, as plain values; `settings` say how the tasks were asked. Infinities and NaN, which
    JSON does not have, become null, as in metrics.jsonl."""
    found = []
    for model in models:
        other = _other(model, models)
        entry = asdict(model) | {"compared_with": other.name if other else None}
        if model.held_out and other and other.held_out:
            entry["held_out"]["difference"] = model.held_out.loss - other.held_out.loss
        for task, metrics in (entry["tasks"] or {}).items():
            for metric, values in metrics.items():
                if other is not None and other.tasks is not None:
                    values["difference"] = values["value"] - other.tasks[task][metric]["value"]
        found.append(_finite(entry))
    return {"rows": rows, "task_settings": settings, "models": found, "versions": _versions()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "lm_eval")
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}
