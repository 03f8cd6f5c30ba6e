"""The command line of recipes/evaluate.py: which models, which samples, which tasks."""

import dataclasses
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.load import convert
from llama_ft.config.messages import brief, nearest_file, show
from llama_ft.config.parse import read_flags, words_of
from llama_ft.config.paths import (
    BUILT_IN_MODELS,
    base_model_of,
    check_paths,
    file_problem,
    looks_local,
    model_problem,
    output_problem,
)
from llama_ft.config.rules import Read
from llama_ft.config.run_settings import STRICT, CountOrZero
from llama_ft.config.settings import SETTINGS, Config, QuantizationConfig, values_of
from llama_ft.config.tool_flags import check, read
from llama_ft.inference.flags import REMOVED_FLAGS, ModelFlags, named_models
from llama_ft.inference.results import find_result, result_problem, settings_beside

# Settings of the training recipe that say which samples there are, and how they are read and batched.
ROWS = ("dataset", "dataset_split", "dataset_format", "validation", "labels", "truncation", "context_length")
HOW = ("chat_template", "skip_bad_rows", "batching_strategy", "val_batch_size", "max_eval_step", "tokenize_processes")
CHOOSING = ("validation", "dataset_split")  # the others say how samples are read, whichever they are
READ = ("dataset", "validation", "chat_template")
TASK_FLAGS = ("limit", "num_fewshot", "apply_chat_template")


@dataclass(config=STRICT, kw_only=True)
class EvaluateFlags(ModelFlags):
    """Flags of recipes/evaluate.py; those of the training recipe about data work, too, and default to the run's."""

    base: bool = False
    """Evaluate the base model of each MODEL, too, and show the difference."""

    output_file: str | None = None
    """Write the results as JSON."""

    overwrite: bool = False
    """With --output_file: replace the results that it holds."""

    tasks: list[str] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness by name, or YAML files of your own: hellaswag,my_tasks/arithmetic.yaml."""

    limit: float | None = Field(default=None, gt=0)
    """Only the first N questions of a task, or a share below 1."""

    num_fewshot: CountOrZero | None = None
    """Solved examples before each question."""

    batch_size: int | Literal["auto"] = 8
    """Questions at a time, or auto."""

    apply_chat_template: bool = False
    """Ask the questions as a user's message of the chat template."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A model to evaluate.

    Attributes:
        place: what open_model takes.
        name: what it is called in the tables.
        quantization: bits of its weights, or the whole section; None: as its run had it.
        precision: what is computed in.
        resized: its run may have added rows to the embeddings.
    """

    place: str
    name: str
    quantization: str | QuantizationConfig | None = dataclasses.field(hash=False)
    precision: str
    resized: bool = False


@dataclasses.dataclass
class Evaluation:
    """What is to be evaluated.

    Attributes:
        flags: the recipe's own.
        asked: each model, with the one to compare it with or None.
        runs: model -> settings of its run, if it is of one.
        config: the settings that say which samples, and how they are read.
        given: data settings on the command line.
        rows: all samples of the dataset, those held_out, or none.
        split: of all, the one that is meant.
    """

    flags: EvaluateFlags
    asked: list[tuple[Asked, Asked | None]]
    runs: dict[str, Config]
    config: Config
    given: dict[str, Any]
    rows: str = "held_out"
    split: Literal["train", "validation"] | None = None


def read_evaluate_flags(argv: list[str], description: str) -> Evaluation:
    """Return what is to be evaluated.

    Args:
        argv: the words after the script's name.
        description: what the script does, for --help.

    Raises:
        UserError: with one message for every error.
        SystemExit: 0 after --help.
    """
    words = list(words_of(argv))
    data = [text for word in words if word.flag and word.name in (*ROWS, *HOW) for text in word.as_typed]
    own = [text for word in words if not (word.flag and word.name in (*ROWS, *HOW)) for text in word.as_typed]
    other_names = {"compare_base": "base", "output_path": "output_file"}
    about = f"{description.partition(chr(10) * 2)[0]} Flags of the training recipe about data work, too."
    flags, parsed, errors = read(own, EvaluateFlags, about, other_names, REMOVED_FLAGS, others=(*ROWS, *HOW))
    of_data = read_flags(data)
    errors += of_data.errors
    places, base_errors = named_models(flags)
    errors += [] if places else ["MODEL is needed: evaluate.py output/<run>, or the directory or Hub name of a model."]
    errors += [f"{place}: given twice." for place, count in Counter(places).items() if count > 1]
    job = Evaluation(flags, [], {}, Config(), of_data.values)
    for place in dict.fromkeys(places):
        errors += _ask(place, job)
    names = Counter(name for name, _ in {(base.name, base.precision) for _, base in job.asked if base})
    job.asked = [
        (
            tuned,
            dataclasses.replace(base, name=f"{base.name}, {base.precision}") if base and names[base.name] > 1 else base,
        )
        for tuned, base in job.asked
    ]
    errors += ([] if flags.base else base_errors) + _task_errors(job, parsed.places) + _output_errors(job)
    if job.asked or "dataset" in job.given:
        errors += _row_errors(job)
    check(errors)
    return job


def _ask(place: str, job: Evaluation) -> list[str]:
    """Add a model, and the one to compare it with; return the errors."""
    flags = job.flags
    if place not in BUILT_IN_MODELS and (error := result_problem(place)):
        return [f"{brief(place)}: {error}"]
    found = find_result(Path(place).expanduser()) if looks_local(place) else None
    run = settings_beside(*found) if found else None
    if run is not None:
        job.runs[place] = run
    precision = flags.precision or (run.train.precision if run else "auto")
    resized, base, errors = run is not None and run.model.resize_embeddings, None, []
    if flags.base:
        named = flags.base_model or (run.model.model_name if run else None)
        if named is None and found and found[0] == "adapter":
            named = base_model_of(str(found[1]))
        if named is None:
            errors.append(f"--base: {place} does not say what it was fine-tuned from.\n--base_model names that model.")
        elif error := None if named in BUILT_IN_MODELS else model_problem(named):
            errors.append(f"{place}: its base model {named}: {error}\n--base_model says where it is now.")
        base = _base(str(named), run, flags.quantization, precision)
    job.asked.append((Asked(place, place, flags.quantization, precision, resized), base))
    return errors


def _base(named: str, run: Config | None, bits: str | None, precision: str) -> Asked:
    """The base model as the run had it before its first step, but for what is asked otherwise."""
    quantization: str | QuantizationConfig | None = bits
    if run is not None and bits in (None, run.quantization.mode):
        quantization, bits = run.quantization, run.quantization.mode
        bits += f" {run.quantization.quant_type}" if bits == "4bit" else ""
    resized = run is not None and run.model.resize_embeddings
    notes = [*([bits] if bits and bits != "none" else []), *(["grown"] if resized else [])]
    return Asked(
        named, f"base: {named}" + (f" ({', '.join(notes)})" if notes else ""), quantization, precision, resized
    )


def _row_errors(job: Evaluation) -> list[str]:
    """Settle `config`, `rows` and `split`; return the errors."""
    given, runs = job.given, list(job.runs.items())
    place, run = runs[0] if runs else ("", Config())
    values = {name: getattr(run.data, name) for name in (*ROWS, *HOW) if hasattr(run.data, name)}
    values |= {"val_batch_size": run.train.val_batch_size, "max_eval_step": run.train.max_eval_step}
    values["chat_template"] = None  # it was saved with the result
    values["streaming"] = run.data.streaming and "dataset" not in given
    if "dataset" in given:
        values |= {"validation": None, "dataset_split": "train", "dataset_format": "auto"}
        job.rows = "held_out" if "validation" in given else "all"
        job.split = None if "validation" in given else "train" if "dataset_split" in given else "validation"
    places = {name: f"--{name}" for name in given}
    job.config, wrong = convert(values | given, places)
    if wrong:
        return list(wrong.values())
    if "dataset" not in given:
        for other, settings in runs[1:]:
            if differing := [name for name in ROWS if getattr(run.data, name) != getattr(settings.data, name)]:
                return [
                    f"{place} and {other} held out other samples ({', '.join(differing)}).\n--dataset names samples to "
                    "compare them on."
                ]
        changed = [
            name for name in CHOOSING if name in given and getattr(run.data, name) != getattr(job.config.data, name)
        ]
        if runs and changed:
            return [
                f"--{name} {given[name]}: the run of {place} had {show(getattr(run.data, name))}, and without "
                "--dataset its own validation set is taken.\nLeave it out, or name other samples with --dataset."
                for name in changed
            ]
        if not runs or not Read(values_of(job.config)).brings_validation():
            job.rows = "none"
            if job.flags.tasks:
                return [f"--{name}: needs --dataset." for name in given]
            return [_no_samples(place or job.asked[0][0].place, bool(runs))]
    shown = {name: places.get(name, f"{place}: its run" if place else "") for name in READ}
    return check_paths(values_of(job.config), shown, set(SETTINGS) - set(READ))


def _no_samples(place: str, is_run: bool) -> str:
    if is_run:
        return f"{place}: its run had no validation set.\n--dataset FILE names samples that it was not trained on."
    folder = Path(place).expanduser()
    what = (
        "is of no run, so it has no validation set."
        if place in BUILT_IN_MODELS or folder.exists()
        else (f"no such folder.{nearest_file(folder)} A model of the Hub has no validation set.")
    )
    return f"{place}: {what}\nExpected --dataset FILE, with the samples to evaluate, or --tasks."


def _task_errors(job: Evaluation, places: dict[str, str]) -> list[str]:
    flags = job.flags
    if "tasks" not in places:
        return [f"--{name}: there are no --tasks." for name in (*TASK_FLAGS, "batch_size") if name in places]
    errors = [] if flags.tasks else ["--tasks: names no task."]
    if isinstance(flags.batch_size, int) and flags.batch_size < 1:
        errors.append(f"--batch_size {flags.batch_size}: expected a whole number from 1, or auto.")
    if flags.batch_size == "auto" and flags.enable_fsdp:
        errors.append("--batch_size auto: each rank would try by itself what fits, and with --enable_fsdp none goes on "
                      "without the others.\nExpected a number.")  # fmt: skip
    if flags.limit is not None and flags.limit >= 1 and flags.limit != int(flags.limit):
        errors.append(f"--limit {flags.limit:g}: expected a whole number from 1, or a share between 0 and 1.")
    if importlib.util.find_spec("lm_eval") is None:
        errors.append("--tasks: lm-evaluation-harness is not installed.\npip install -e '.[eval]' installs it.")
    return errors + [
        f"--tasks {brief(name)}: {error}"
        for name in flags.tasks
        if is_task_file(name) and (error := file_problem(name))
    ]


def is_task_file(name: str) -> bool:
    """Whether a task is named by its YAML file."""
    return name.endswith((".yaml", ".yml"))


def _output_errors(job: Evaluation) -> list[str]:
    name = job.flags.output_file
    if name is None:
        return ["--overwrite: nothing is written without --output_file."] if job.flags.overwrite else []
    if error := output_problem(name):
        return [f"--output_file {brief(name)}: {error}"]
    file = Path(name).expanduser()
    if file.suffix != ".json":
        return [f"--output_file {name}: JSON is written; expected a name that ends in .json."]
    if file.exists() and not job.flags.overwrite:
        return [f"--output_file {name}: is there already. --overwrite replaces it."]
    if file.exists() and not _holds_results(file):
        return [f"--output_file {name}: holds something other than results, which is not replaced. Name another file."]
    return []


def _holds_results(file: Path) -> bool:
    """Or nothing at all."""
    try:
        found = json.loads(file.read_text() or "{}")
        return not found or {"rows", "task_settings", "models"} <= set(found)
    except (OSError, ValueError, TypeError, RecursionError):
        return False
