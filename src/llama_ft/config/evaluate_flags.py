"""The command line of recipes/evaluate.py, with every mistake in it told at once and before torch is imported."""

import importlib.util
import json
import os
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_ft.config.data_names import has_splits, kind_of_data
from llama_ft.config.fields import SETTINGS, values_of
from llama_ft.config.inference_flags import GONE, base_mistakes, settle_base
from llama_ft.config.load import convert
from llama_ft.config.paths import (
    BUILT_IN_MODELS,
    base_model_of,
    check_paths,
    file_complaint,
    looks_local,
    model_complaint,
    output_complaint,
)
from llama_ft.config.results import find_result, result_complaint, settings_beside
from llama_ft.config.script_flags import MODEL_FLAGS, ScriptFlags, whole_number
from llama_ft.config.sections import Config, QuantizationConfig
from llama_ft.config.values import from_text
from llama_ft.config.wording import brief, nearest_file, show
from llama_ft.errors import UserError

NEEDS_LM_EVAL = "--tasks: lm-evaluation-harness is not installed.\npip install -e '.[eval]' installs it."
# Settings of the training recipe that say which rows there are, and how they are shared out.
ROWS = ("dataset", "dataset_split", "dataset_format", "validation", "labels", "truncation", "context_length")
HOW = ("chat_template", "skip_bad_rows", "batching_strategy", "val_batch_size", "max_eval_step", "tokenize_processes")
CHOOSING = ("validation", "dataset_split")  # the others say how rows are read, whichever they are
READ = ("dataset", "validation", "chat_template")
TASK_FLAGS = ("limit", "num_fewshot", "apply_chat_template")


@dataclass(frozen=True)
class Asked:
    """A model that is to be evaluated.

    Attributes:
        place: what open_model takes.
        name: what it is called in the tables.
        quantization: bits of its weights, or all that is to be said of them; None: as its run had it.
        precision: what is computed in.
        resized: its run may have added rows to the embeddings.
    """

    place: str
    name: str
    quantization: str | QuantizationConfig | None = field(hash=False)
    precision: str
    resized: bool = False


def read_evaluate_flags(argv: list[str], description: str) -> Namespace:
    """Returns the flags; in `asked` the models, each with the one to compare it with or None, in `config` the settings
    that say which rows they are asked about, in `rows` which of those (all, held_out, or none) and, of all, in `split`
    which are meant.

    Args:
        argv: the words after the script's name.
        description: what the script does, for --help.

    Raises:
        UserError: with one message for every mistake.
    """
    flags = ScriptFlags(description, GONE)
    _add_model_flags(flags)
    _add_data_flags(flags)
    _add_task_flags(flags)
    options = flags.read(argv)
    mistakes = _model_mistakes(options)
    mistakes += _task_mistakes(options) + _output_mistakes(options)
    if options.asked or options.dataset:
        mistakes += _row_mistakes(options)
    if mistakes:
        raise UserError(*mistakes)
    return options


def _add_model_flags(flags: ScriptFlags) -> None:
    flags.add_argument(
        "places", nargs="*", metavar="MODEL", help="a run's directory, a checkpoint, a saved adapter, or the folder or "
        "hub name of a model; several are compared"
    )  # fmt: skip
    flags.add_argument(
        "--base", "--compare_base", action="store_true", help="evaluate the model it was tuned from too, and show the "
        "difference"
    )  # fmt: skip
    flags.add_model_flags(
        *MODEL_FLAGS, precision="what is computed in; default: as in the run, else auto", tokenizer_name="folder or "
        "hub name of the tokenizer; its chat template takes the place of a saved result's. Default: the one of what is "
        "loaded"
    )  # fmt: skip
    flags.add_argument("--output_file", "--output_path", metavar="FILE", help="write the results as JSON")
    flags.add_argument("--overwrite", action="store_true", help="with --output_file: replace what is there")


def _add_data_flags(flags: ScriptFlags) -> None:
    """The training recipe's own, most by its own descriptions; where they are not given, they are as in the run."""
    meanings = {
        "dataset": "rows to evaluate, all of them, as the training recipe's --dataset names them; of data with splits "
        "the one for validation. Default: the rows that the run of MODEL held out",
        "validation": "which rows of --dataset are held out, as a run that is given the same holds them out: a "
        "fraction, a split, or other data",
        "dataset_split": "split of --dataset to evaluate; default: the one for validation",
        "chat_template": "how chats are written, as in training; default: as the result has it",
    }
    for name in (*ROWS, *HOW):
        setting = SETTINGS[name]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.kind == "switch" else {}
        text = (meanings.get(name) or setting.meaning).replace("%", "%%")
        # choices and limits are checked with the run's settings, whose place these take
        flags.add_argument(f"--{name}", metavar="|".join(setting.choices) or "VALUE", help=text, **switch)


def _add_task_flags(flags: ScriptFlags) -> None:
    flags.add_argument(
        "--tasks", metavar="A,B", help="tasks of lm-evaluation-harness by name, or YAML files of your own: "
        "hellaswag,my_tasks/arithmetic.yaml"
    )  # fmt: skip
    flags.add_argument("--limit", type=_limit, metavar="N", help="only the first N questions of a task, or a share < 1")
    flags.add_argument("--num_fewshot", type=whole_number(0), metavar="N", help="solved examples before each question")
    flags.add_argument("--batch_size", type=_batch_size, metavar="N", help="questions at a time, or auto (default 8)")
    flags.add_argument(
        "--apply_chat_template", action="store_true", help="ask the questions as a user's turn of the chat template"
    )


def _model_mistakes(options: Namespace) -> list[str]:
    """Also settle `asked`."""
    base_flag = settle_base(options)
    options.asked, options.runs = [], {}
    places = [*options.places, *filter(None, (options.model_name, options.peft_model))]
    if not places or "" in places:
        return ["MODEL is needed: evaluate.py output/<run>, or the folder or hub name of a model."]
    mistakes = [f"{place}: given twice." for n, place in enumerate(places) if place in places[:n]]
    for place in places:
        complaint = None if place in BUILT_IN_MODELS else result_complaint(place)
        if complaint:
            mistakes.append(f"{brief(place)}: {complaint}")
            continue
        run = _settings_of_run(place)
        if run is not None:
            options.runs[place] = run
        precision = options.precision or (run.train.precision if run else "auto")
        resized = run is not None and run.model.resize_embeddings
        base = None
        if options.base:
            named = options.base_model or _base_of(place, run)
            base = _base(str(named), run, options.quantization, precision)
            if named is None:
                mistakes.append(f"--base: {place} does not say what it was tuned from.\n--base_model names that model.")
            elif not options.base_model and (complaint := model_complaint(named)):
                mistakes.append(f"{place}: its base model {named}: {complaint}\n--base_model says where it is now.")
        options.asked.append((Asked(place, place, options.quantization, precision, resized), base))
    beside = [] if options.base else [asked.place for asked, _ in options.asked]
    mistakes += base_mistakes(base_flag, options.base_model, beside)
    options.asked = _told_apart(options.asked)
    return mistakes


def _told_apart(asked: list[tuple[Asked, Asked | None]]) -> list[tuple[Asked, Asked | None]]:
    """Base models that differ in precision only get it into their names."""
    names = Counter(name for name, _ in {(base.name, base.precision) for _, base in asked if base})
    return [
        (tuned, replace(base, name=f"{base.name}, {base.precision}") if base and names[base.name] > 1 else base)
        for tuned, base in asked
    ]


def _base(named: str, run: Config | None, bits: str | None, precision: str) -> Asked:
    """As the run had it before its first step, but for what is asked otherwise."""
    quantization: str | QuantizationConfig | None = bits
    if run is not None and bits in (None, run.quantization.mode):
        quantization, bits = run.quantization, run.quantization.mode
        bits += f" {run.quantization.quant_type}" if bits == "4bit" else ""
    grown = run is not None and run.model.resize_embeddings
    notes = [*([bits] if bits and bits != "none" else []), *(["grown"] if grown else [])]
    name = f"base: {named}" + (f" ({', '.join(notes)})" if notes else "")
    return Asked(named, name, quantization, precision, grown)


def _settings_of_run(place: str) -> Config | None:
    found = find_result(Path(place).expanduser()) if looks_local(place) else None
    return settings_beside(*found) if found else None


def _base_of(place: str, run: Config | None) -> str | None:
    if run is not None:
        return run.model.model_name
    found = find_result(Path(place).expanduser()) if looks_local(place) else None
    return base_model_of(str(found[1])) if found and found[0] == "adapter" else None


def _row_mistakes(options: Namespace) -> list[str]:
    """Also settle `config` and `rows`."""
    given = {name: getattr(options, name) for name in (*ROWS, *HOW) if getattr(options, name) is not None}
    runs: list[tuple[str, Config]] = list(options.runs.items())
    places = {name: f"--{name}" for name in given}
    options.config, wrong = convert(_values(runs[0][1] if runs else Config(), given), places)
    options.rows = "all" if "dataset" in given and "validation" not in given else "held_out"
    options.split = None  # the one to take whole: the one for validation, unless one is named
    if options.rows == "all":
        options.split = "train" if "dataset_split" in given else "validation"
    if wrong:
        return list(wrong.values())
    if "dataset" not in given:
        for place, other in runs[1:]:
            if differing := _differing(runs[0][1], other):
                return [
                    f"{runs[0][0]} and {place} held out other rows ({', '.join(differing)}).\n--dataset names rows to "
                    "compare them on."
                ]
        if runs and (others := _other_rows(*runs[0], options.config, given)):
            return others
        if not runs or _holds_none_out(options.config):
            options.rows = "none"
            if options.tasks:
                return [f"--{name}: --dataset says of which rows." for name in given]
            return [_no_rows(runs[0][0] if runs else options.asked[0][0].place, bool(runs))]
    shown = {name: places.get(name, f"{runs[0][0]}: its run" if runs else "") for name in READ}
    return check_paths(values_of(options.config), shown, set(SETTINGS) - set(READ))


def _values(run: Config, given: dict[str, str]) -> dict[str, Any]:
    """The run's settings that say which rows there are, with what was given in their place."""
    values = {name: getattr(run.data, name) for name in (*ROWS, *HOW) if hasattr(run.data, name)}
    values |= {"val_batch_size": run.train.val_batch_size, "max_eval_step": run.train.max_eval_step}
    values["chat_template"] = None  # it was saved with the result
    values["streaming"] = run.data.streaming and "dataset" not in given
    if "dataset" in given:
        values |= {"validation": None, "dataset_split": "train", "dataset_format": "auto"}
    return values | {name: from_text(SETTINGS[name], text) for name, text in given.items()}


def _other_rows(place: str, run: Config, config: Config, given: dict[str, str]) -> list[str]:
    """What makes them others than those that the run held out: rows that it was trained on."""
    had = {name: getattr(run.data, name) for name in CHOOSING if name in given}
    return [
        f"--{name} {given[name]}: the run of {place} had {show(value)}. Without --dataset it is its own "
        "held-out rows that are taken.\nLeave it out, or name rows that it was not trained on with --dataset."
        for name, value in had.items()
        if value != getattr(config.data, name)
    ]


def _no_rows(place: str, is_run: bool) -> str:
    if is_run:
        return (
            f"{place}: no rows were held out: the run had no --validation.\n--dataset FILE names rows that it was not "
            "trained on."
        )
    folder = Path(place).expanduser()
    if place in BUILT_IN_MODELS or folder.exists():
        what = "is of no run, so it says nothing of held-out rows."
    else:
        what = f"no such folder.{nearest_file(folder)} A model of the hub says nothing of held-out rows."
    return f"{place}: {what}\nExpected --dataset FILE, with the rows to evaluate, or --tasks."


def _differing(one: Config, other: Config) -> list[str]:
    """Settings in which the held-out rows of two runs differ."""
    ours, theirs = asdict(one.data), asdict(other.data)
    return [name for name in ROWS if ours[name] != theirs[name]]


def _holds_none_out(config: Config) -> bool:
    """As far as can be told from the name: a file has no split of its own."""
    dataset = config.data.dataset
    if config.data.validation:
        return False
    return not isinstance(dataset, str) or (
        kind_of_data(dataset) not in ("demo", "function") and not has_splits(dataset)
    )


def _task_mistakes(options: Namespace) -> list[str]:
    """Also make a list of `tasks`."""
    if options.tasks is None:
        mistakes = [
            f"--{name}: there are no --tasks." for name in TASK_FLAGS if getattr(options, name) not in (None, False)
        ]
        if options.batch_size is not None:
            mistakes.append("--batch_size: there are no --tasks. --val_batch_size is for rows.")
        return mistakes
    options.batch_size = options.batch_size or 8
    options.tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    mistakes = ["--tasks: names no task."] if not options.tasks else []
    if options.batch_size == "auto" and options.enable_fsdp:
        mistakes.append(
            "--batch_size auto: each rank would try by itself what fits, and with --enable_fsdp none goes on without "
            "the others.\nExpected a number."
        )
    if importlib.util.find_spec("lm_eval") is None:
        mistakes.append(NEEDS_LM_EVAL)
    for name in options.tasks:
        if is_task_file(name) and (complaint := file_complaint(name)):
            mistakes.append(f"--tasks {brief(name)}: {complaint}")
    return mistakes


def is_task_file(name: str) -> bool:
    """Whether a task is named by its YAML file."""
    return name.endswith((".yaml", ".yml"))


def _output_mistakes(options: Namespace) -> list[str]:
    name = options.output_file
    if name is None:
        return ["--overwrite: nothing is written without --output_file."] if options.overwrite else []
    if complaint := output_complaint(name):
        return [f"--output_file {brief(name)}: {complaint}"]
    file = Path(name).expanduser()
    if file.suffix != ".json":
        return [f"--output_file {name}: JSON is written; expected a name that ends in .json."]
    if file.exists() and not options.overwrite:
        return [f"--output_file {name}: is there already. --overwrite replaces it."]
    read = [options.dataset, options.validation, *(run.data.dataset for run in options.runs.values())]
    if str(file.resolve()) in {os.path.realpath(os.path.expanduser(data)) for data in read if isinstance(data, str)}:
        return [f"--output_file {name}: holds the rows, which results would replace. Name another file."]
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


def _limit(text: str) -> int | float:
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass
    return _whole_number_or("a share between 0 and 1", text)


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else _whole_number_or("auto", text)


def _whole_number_or(other: str, text: str) -> int:
    try:
        return whole_number(1)(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(str(error).replace("from 1", f"from 1, or {other}", 1)) from error
