"""A run's directory as its report needs it: read without torch, while the run goes on, and whatever of it is there."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy
import yaml

from llama_ft.config.settings import SETTINGS
from llama_ft.errors import reason

PARTS = {
    "status.json": "how the run ended",
    "config.yaml": "its settings",
    "metrics.jsonl": "curves",
    "plan.json": "predicted memory",
    "facts.json": "units, data, samples, environment and memory by holder",
}


@dataclass(frozen=True)
class Curve:
    """A metric over the steps where it was measured; values that are not finite are NaN."""

    steps: numpy.ndarray
    values: numpy.ndarray

    @property
    def last(self) -> float:
        """The last finite value, NaN where there is none."""
        return next((float(value) for value in self.values[::-1] if math.isfinite(value)), math.nan)

    @property
    def lowest(self) -> tuple[int, float]:
        """The step of the lowest value, and that value."""
        place = int(numpy.where(numpy.isfinite(self.values), self.values, math.inf).argmin())
        return int(self.steps[place]), float(self.values[place])

    @property
    def median(self) -> float:
        """Of the second half, where things have settled."""
        return float(numpy.median(self.values[len(self.values) // 2 :]))


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        folder, name: its directory, and that directory's name.
        status, facts, plan: of the JSON files of these names; empty where there are none.
        settings: by dotted name, as config.yaml has them; config_text is the file itself.
        curves: by the keys of metrics.jsonl; of lists, the largest over the ranks.
        rank_peaks: of those lists, the largest of each rank.
        missing: what is not there, for people.
        damaged: one line for each file that cannot be read, or the first such line of one.
    """

    folder: Path
    name: str
    status: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    rank_peaks: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps that are known to be done."""
        steps = [int(curve.steps[-1]) for curve in self.curves.values() if len(curve.steps)]
        return max([*steps, int(self.status.get("step", 0))])


def read_run(folder: Path) -> Run:
    """Read what is there. What is missing or damaged is named in the result and left out."""
    run = Run(folder, folder.resolve().name)
    run.missing = [f"{name} ({what})" for name, what in PARTS.items() if not (folder / name).exists()]
    run.status, run.facts, run.plan = (_read(run, f"{name}.json", json.loads) for name in ("status", "facts", "plan"))
    if (folder / "config.yaml").exists():
        run.config_text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    sections = _read(run, "config.yaml", yaml.safe_load)
    run.settings = {f"{section}.{name}": it for section, own in sections.items() for name, it in dict(own).items()}
    _read_metrics(run)
    return run


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """Settings that not all runs have alike, by dotted name; of one run, those that are not at their default, and the
    default."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    defaults = {setting.dotted: setting.default for setting in SETTINGS.values()}
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    if len(runs) == 1:
        values = {name: [*own, defaults[name]] for name, own in values.items() if name in defaults}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def _read(run: Run, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping in a file; empty where there is none, and where it is damaged."""
    path = run.folder / name
    try:
        return dict(parse(path.read_text(encoding="utf-8")) if path.exists() else {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        run.damaged.append(f"{path}: {reason(error)}")
        return {}


def _read_metrics(run: Run) -> None:
    path, place = run.folder / "metrics.jsonl", 0
    pairs: dict[str, list[float]] = defaultdict(list)  # step, value, step, value...
    try:
        for line in path.open("rb") if path.exists() else ():
            place += 1
            if line.endswith(b"\n"):  # else it is being written, or a kill has cut it short
                _take_line(run, json.loads(line), pairs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        run.damaged.append(f"{path}:{place}: {reason(error)}; what follows is left out")
    run.curves = {key: Curve(both[::2], both[1::2]) for key, both in ((k, numpy.array(v)) for k, v in pairs.items())}


def _take_line(run: Run, record: dict[str, Any], pairs: dict[str, list[float]]) -> None:
    step = record.pop("step") + 0.0
    for key, value in record.items():
        value = [math.nan if one is None else one for one in value] if type(value) is list else value
        if type(value) is list:
            before = run.rank_peaks.get(key, [])
            run.rank_peaks[key] = [max(pair) for pair in zip_longest(before, value, fillvalue=0.0)]
            value = max(value, default=math.nan)
        pairs[key].extend((step, math.nan if value is None else value))


def is_run(folder: Path) -> bool:
    """Whether a run has written here."""
    return any((folder / name).is_file() for name in ("status.json", "metrics.jsonl"))
