"""Read the files of a run for its report, without torch. The run may still be working, and files
may be missing."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import yaml
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from llama_ft.config.attempts import describe_changes, readable_attempts, value_over_time
from llama_ft.config.home import expanded
from llama_ft.config.newest_run import NO_RUN, newest_run
from llama_ft.config.paths import RUN_MARKER, folder_problem, missing_run
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.config.value_types import STRICT
from llama_ft.errors import UserError, plural, reason
from llama_ft.processes import is_locked

DIED = (
    "The run's process ended without a message: it was killed, or its machine was lost.\n"
    "If there is a checkpoint, --output_dir {} --resume auto continues from it."
)


# What every report has had, in any version.
REPORT_MARK = "<footer>Written by llama_ft on "


def _check_suffix(name: str) -> str:
    if not name.endswith((".html", ".htm")):
        raise ValueError("expected a name that ends in .html")
    return name


HtmlFile = Annotated[str, AfterValidator(_check_suffix)]


@checked_dataclass(config=STRICT, kw_only=True)
class ReportFlags:
    """Flags of recipes/report.py."""

    paths: list[str] = Field(default_factory=list)
    """[RUN...]: one or more run directories; if not given, the newest run in output/."""

    names: list[str] = Field(default_factory=list)
    """Names of compared runs, in their order; if not given, those of their directories."""

    price: Annotated[float, Field(gt=0)] | None = None
    """Price of one GPU for an hour, in any currency: the report has the cost."""

    output: HtmlFile | None = None
    """The .html file to write; if not given RUN/report.html, or comparison.html here for several
    runs. An earlier report is replaced, any other file is not."""


def read_report_flags(argv: list[str], description: str) -> ReportFlags:
    """Return the flags: the directories in `paths`, and in `output` the file to write.

    Raises:
        UserError: with one message for every error.
    """
    options, _, errors = read(argv, ReportFlags, description, {"out": "output"})
    if not options.paths:
        newest = newest_run()
        options.paths = [str(newest)] if newest else []
        errors += [] if newest else [f"RUN is needed, since {NO_RUN}"]
    errors += problems_of_runs(options.paths)
    if options.names and len(options.names) != len(options.paths):
        errors.append(
            f"--names: has {plural(len(options.names), 'name')} for {plural(len(options.paths), 'run')}."
        )
    check(errors)
    options.output = options.output or (
        "comparison.html" if options.paths[1:] else f"{options.paths[0]}/report.html"
    )
    if is_other_file(expanded(options.output)):
        raise UserError(
            f"--output {options.output}: exists, and is not a report. Name another file."
        )
    return options


def problems_of_runs(names: Sequence[str]) -> list[str]:
    """Return an error message for each name that is not the directory of a run."""
    errors = list[str]()
    for name in names:
        folder = expanded(name)
        if not folder.exists():
            errors.append(f"{name}: {missing_run(folder)}")
        elif error := folder_problem(folder, "a run's directory"):
            errors.append(f"{name}: {error}")
        elif not is_run(folder):
            message = f"{name}: has neither status.json nor metrics.jsonl: not a run's directory."
            around = next(filter(is_run, folder.absolute().parents[:2]), None)
            if around is not None:  # of a checkpoint, or of the final model
                shown = around if around == Path.cwd() else os.path.relpath(around)
                message = f"{name}: is a part of a run. Name {shown}."
            errors.append(message)
    return errors


def is_run(folder: Path) -> bool:
    """Return whether a directory has the files of a run."""
    return any((folder / file).is_file() for file in ("status.json", "metrics.jsonl"))


@contextmanager
def corrupted_files_explained(names: Sequence[str]) -> Iterator[None]:
    """Turn errors of the code inside into a UserError: files of another program, or corrupted ones,
    may hold anything. `names`: of the runs, for the message."""
    try:
        yield
    except (UserError, OSError):  # the output cannot be written
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{', '.join(names)}: cannot be shown, a file may be corrupted ({reason})."
        ) from error


def is_other_file(path: Path) -> bool:
    """Return whether a file exists that no version of llama_ft has written as a report."""
    if not path.is_file():
        return False  # a directory cannot be replaced, and the error of writing says so
    try:
        return REPORT_MARK not in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


class Curve(NamedTuple):
    """A metric at the steps at which it was measured and finite."""

    steps: numpy.ndarray
    values: numpy.ndarray


CORRUPTED = (
    OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError,
)  # fmt: skip


@dataclass
class Run:
    """The files of a run.

    Attributes:
        folder, name: its directory, and the name of that directory.
        status, facts, plan: the JSON files of these names; empty if missing. The state of a run
            that is no longer running, but could not write how it ended, is "died".
        settings: dotted name -> value, from config.yaml; config_text is the text of that file.
        curves: key of metrics.jsonl -> its values; of values per rank, the largest.
        of_ranks: key of metrics.jsonl -> its newest values, one per rank.
    """

    folder: Path
    name: str
    status: dict[str, Any]
    facts: dict[str, Any]
    plan: dict[str, Any]
    settings: dict[str, Any]
    config_text: str
    curves: dict[str, Curve]
    of_ranks: dict[str, list[float]]

    @property
    def model(self) -> str:
        """The name of the model; "" without settings. Of a directory, its last part."""
        name = str(self.settings.get("model.model_name") or "")
        return name.rstrip("/").split("/")[-1] if name.startswith("/") else name

    @property
    def method(self) -> str:
        """LoRA, LoRA on an 8-bit base, QLoRA or full fine-tuning."""
        if not self.settings.get("peft.use_peft"):
            return "Full fine-tuning"
        mode = str(self.settings.get("quantization.mode"))
        return {"8bit": "LoRA on an 8-bit base", "4bit": "QLoRA"}.get(mode, "LoRA")

    @property
    def step(self) -> int:
        """Number of optimizer steps that are known to be done."""
        return max(
            [int(curve.steps[-1]) for curve in self.curves.values()]
            + [int(self.status.get("step", 0))]
        )

    @property
    def settings_over_time(self) -> dict[str, Any]:
        """The settings. The value of one that a resume has changed is a text with all its values."""
        attempts = readable_attempts(self.facts)
        return {
            name: value_over_time(name, value, attempts) for name, value in self.settings.items()
        }

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The start of the run and its resumes, see `llama_ft.config.attempts`; `differences` is
        added to each, the texts of what differs from the one before."""
        attempts = readable_attempts(self.facts)
        return [
            {**attempt, "differences": describe_changes(attempt, earlier)}
            for earlier, attempt in zip([None, *attempts], attempts, strict=False)
        ]


def read_run(folder: Path) -> Run:
    """Read the files that exist.

    Raises:
        UserError: a file cannot be read; the message names it.
    """
    status = _read(folder / "status.json", json.loads)
    facts = _read(folder / "facts.json", json.loads)
    plan = _read(folder / "plan.json", json.loads)
    # The process of a run locks this file as long as it lives.
    if status.get("state") == "running" and is_locked(folder / RUN_MARKER) is False:
        status |= {"state": "died", "message": DIED.format(folder)}
    config = folder / "config.yaml"
    sections = _read(config, yaml.safe_load)
    settings = {}
    for section, section_settings in sections.items():
        for name, value in dict(section_settings).items():
            settings[f"{section}.{name}"] = value
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    metrics = _read(folder / "metrics.jsonl", _metrics)
    curves = metrics.get("curves", {}) | _curves_of_saves(facts)
    of_ranks = metrics.get("of_ranks", {})
    name = folder.resolve().name
    return Run(folder, name, status, facts, plan, settings, text, curves, of_ranks)


def warnings_of(run: Run) -> list[str]:
    """Return what the run warned of: memory, slow ranks, validation samples that are also trained
    on, and samples."""
    data = run.facts.get("data", {})
    texts = [*run.facts.get("memory", {}).get("warnings", []), *run.facts.get("slow_ranks", [])]
    texts += [*data.get("leaks", []), *data.get("warnings", [])]
    return [str(text) for text in texts]


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the settings in which the runs differ at any step: dotted name -> value of each run. For
    a single run, return those that are not at their default, with the default."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    defaults = {setting.dotted: setting.default for setting in SETTINGS.values()}
    compared = [run.settings_over_time for run in runs]
    if len(runs) == 1:
        # Compare the run with the defaults, as if these were a second run.
        compared.append(defaults)
        names = [name for name in names if name in defaults]
    differing = {}
    for name in names:
        values = [settings.get(name) for settings in compared]
        if any(value != values[0] for value in values):
            differing[name] = values
    return differing


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for ever
            raise ValueError("not a file")
        return dict(parse(path.read_text(encoding="utf-8")) if path.exists() else {})
    except CORRUPTED as error:
        raise UserError(
            f"{path}: corrupted ({reason(error)}).\nMove it away, and the rest of the run is shown."
        ) from error


def _curves_of_saves(facts: dict[str, Any]) -> dict[str, Curve]:
    """Return how long checkpoints took, each at its own step. metrics.jsonl has these times in the
    line of a later step."""
    saves = facts.get("saves")
    if not isinstance(saves, dict) or not saves:
        return {}
    steps = sorted(int(step) for step in saves)
    times = numpy.array([saves[str(step)] for step in steps], dtype=float)
    return {
        "perf/save_stall_seconds": Curve(numpy.array(steps), times[:, 0]),
        "perf/save_seconds": Curve(numpy.array(steps), times[:, 1]),
    }


def _metrics(text: str) -> dict[str, Any]:
    """Return `curves` and `of_ranks` of a Run."""
    lines = text.split("\n")
    by_key = defaultdict[str, list[tuple[float, float]]](list)
    of_ranks = dict[str, list[float]]()
    for number, line in enumerate(lines[:-1], start=1):  # the last one is empty or incomplete
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON") from error
        for key, value in record.items():
            if isinstance(value, list):
                of_ranks[key] = value
                value = max(value)
            if value is not None and math.isfinite(value):
                by_key[key].append((record["step"], value))
    curves = {}
    for key, points in by_key.items():
        steps, values = numpy.array(points, dtype=float).T
        curves[key] = Curve(steps, values)
    return {"curves": curves, "of_ranks": of_ranks}
