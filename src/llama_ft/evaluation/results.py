"""Format results of an evaluation as a table and as JSON."""

import io
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llama_ft.evaluation.measure import Metrics

Number = tuple[float, float | None]  # a value and its standard error


@dataclass(frozen=True)
class Evaluated:
    """Results of a model: its loss on the samples and its tasks, if requested; and the results of
    its base model. `about` says what was loaded and how, `leaks` why the loss is too low."""

    name: str
    about: str
    held_out: dict[str, float] | None
    tasks: Metrics | None
    base: "Evaluated | None" = None
    leaks: tuple[str, ...] = ()

    def numbers(self) -> dict[tuple[str, str], Number]:
        """Return (task, metric) -> value and standard error. For the loss on samples, task is
        ""."""
        numbers = dict[tuple[str, str], Number]()
        for name, value in (self.held_out or {}).items():
            numbers["", name] = (value, None)
        for task, metrics in (self.tasks or {}).items():
            for name, metric in metrics.items():
                numbers[task, name] = (metric["value"], metric["stderr"])
        return numbers


def describe(models: list[Evaluated], samples: str, limit: float | None) -> str:
    """Return the table as text. `samples` is a description, `limit` the number of questions per
    task."""
    table = Table("", "metric", box=None)
    text = io.StringIO()
    for model in models:
        table.add_column(model.name, justify="right")
        if model.base:
            table.add_column("difference", justify="right")
    for key in models[0].numbers():
        cells = []
        for model in models:
            value, error = model.numbers()[key]
            shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
            cells.append(shown if error is None else f"{shown} ± {error:.4f}")
            if model.base:
                difference = value - model.base.numbers()[key][0]
                cells.append(
                    f"{difference:+,}" if isinstance(difference, int) else f"{difference:+,.4f}"
                )
        table.add_row(*key, *cells)
    # wide enough that rich never breaks a line
    console = Console(
        file=text,
        width=10_000,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(table)
    titles = [f"Loss on {samples}"] if samples else []
    if models[0].tasks:
        some = f", with --limit {limit:g}: not for comparison with others' numbers" if limit else ""
        titles.append(f"tasks of lm-evaluation-harness{some}")
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    leaks = dict.fromkeys(leak for model in models for leak in model.leaks)
    warnings = [f"warning: {leak}" for leak in leaks]
    return "\n".join([", ".join(titles), *lines, *warnings])


def write_json(
    models: list[Evaluated],
    samples: str,
    task_settings: dict[str, Any],
) -> str:
    """Return all results as JSON. NaN and infinities become null, as in metrics.jsonl, because JSON
    lacks them."""
    entries = []
    for model in models:
        base = model.base.name if model.base else None
        entries.append({**vars(model), "base": base})
    # "rows" is the samples' name in files that others read
    contents = {"rows": samples, "task_settings": task_settings, "models": entries}
    # Python writes NaN and Infinity as such; reading them again makes them None.
    with_nulls = json.loads(json.dumps(contents), parse_constant=lambda _: None)
    return json.dumps(with_nulls, indent=2)
