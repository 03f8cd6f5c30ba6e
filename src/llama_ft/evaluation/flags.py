"""The command line of recipes/evaluate.py: which models, which samples, which tasks."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass as settings_dataclass

from llama_ft.config.load import convert
from llama_ft.config.parse import read_flags, words_of
from llama_ft.config.paths import base_model_of, check_paths, looks_local, model_problem
from llama_ft.config.rules import brings_validation
from llama_ft.config.run_settings import STRICT, Count, CountOrZero
from llama_ft.config.settings import SETTINGS, Config, values_of
from llama_ft.config.tool_flags import check, read
from llama_ft.inference.flags import ModelFlags, check_models, check_output_file
from llama_ft.inference.results import find_result, settings_beside

# Settings of the training recipe that say which samples there are, and how they are read and batched.
SAMPLES = ("dataset", "dataset_split", "dataset_format", "validation", "labels", "truncation", "context_length")
READING = "chat_template skip_bad_rows batching_strategy val_batch_size max_eval_step tokenize_processes".split()
FROM_TRAINING = (*SAMPLES, *READING)
READ = {"dataset", "validation", "chat_template"}


@settings_dataclass(config=STRICT, kw_only=True)
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

    limit: Annotated[float, Field(gt=0)] | None = None
    """Only the first N questions of a task, or a share below 1."""

    num_fewshot: CountOrZero | None = None
    """Solved examples before each question."""

    batch_size: Count = 8
    """Questions at a time, per rank."""

    apply_chat_template: bool = False
    """Ask the questions as a user's message of the chat template."""


class Asked(NamedTuple):
    """A model to evaluate, the settings of its run if it is of one, and the base model to compare it with."""

    place: str
    run: Config | None
    base: str | None


@dataclass
class Evaluation:
    """What is to be evaluated: the models, on samples read as in `config`, which are described in words ("": none, only
    tasks) and are either one split of config.data.dataset or (None) its validation set."""

    flags: EvaluateFlags
    asked: list[Asked]
    config: Config
    samples: str = ""
    split: Literal["train", "validation"] | None = None


def read_evaluate_flags(argv: list[str], description: str) -> Evaluation:
    """Return what is to be evaluated; raise UserError with all errors."""
    data, own = list[str](), list[str]()
    for word in words_of(argv):
        (data if word.flag and word.name in FROM_TRAINING else own).extend(word.as_typed)
    about = f"{description.partition(chr(10) * 2)[0]} Flags of the training recipe about data work, too."
    flags, _, errors = read(own, EvaluateFlags, about, others=FROM_TRAINING)
    given = read_flags(data)
    errors += [*given.errors, *check_models(flags)]
    if flags.output_file:
        errors += check_output_file(flags.output_file, flags.overwrite) or _check_results(flags.output_file)
    if flags.tasks and importlib.util.find_spec("lm_eval") is None:
        errors.append("--tasks: needs lm-evaluation-harness. pip install -e '.[eval]' installs it.")
    check(errors)
    what = Evaluation(flags, [_asked(place, flags) for place in flags.places], Config())
    for place, _, base in what.asked:
        if flags.base and base is None:
            errors.append(f"--base: {place} does not say what it was fine-tuned from. Add --base_model.")
        elif base and not flags.base_model and (error := model_problem(base)):
            errors.append(f"{place}: its base model {base}: {error}\n--base_model says where it is now.")
    check([*errors, *_settle_samples(what, given.values, given.places)])
    return what


def _asked(place: str, flags: EvaluateFlags) -> Asked:
    found = find_result(Path(place).expanduser()) if looks_local(place) else None
    run = settings_beside(*found) if found else None
    base = flags.base_model or (run.model.model_name if run else None)
    if base is None and flags.base and found and found[0] == "adapter":
        base = base_model_of(str(found[1]))
    return Asked(place, run, base if flags.base else None)


def _settle_samples(what: Evaluation, given: dict[str, Any], places: dict[str, str]) -> list[str]:
    """Settle `config`, `samples` and `split`; return the errors."""
    runs = [(place, run) for place, run, _ in what.asked if run is not None]
    place, run = runs[0] if runs else (what.asked[0].place, Config())
    values = {name: values_of(run)[name] for name in FROM_TRAINING}
    values |= {"chat_template": None, "streaming": run.data.streaming}  # the template was saved with the result
    if "dataset" in given:
        values |= {"validation": None, "dataset_split": "train", "dataset_format": "auto", "streaming": False}
    what.config, wrong = convert(values | given, places)
    config = what.config.data
    if wrong:
        return list(wrong.values())
    if "dataset" in given and "validation" not in given:
        what.split = "train" if "dataset_split" in given else "validation"
        what.samples = f"all samples of {config.dataset}"
    elif "dataset" in given:
        what.samples = f"the validation set of {config.dataset} (--validation {config.validation})"
    elif runs and brings_validation(SimpleNamespace(**values_of(run))):
        what.samples = f"the validation set of {place}" + (f" ({config.validation})" if config.validation else "")
        if chosen := given.keys() & {"validation", "dataset_split"}:
            return [f"--{name}: needs --dataset; without it, the run's own validation set is used." for name in chosen]
        if any(getattr(run.data, name) != getattr(other.data, name) for _, other in runs for name in SAMPLES):
            return ["The runs have different validation sets. --dataset names samples to compare them on."]
    elif not what.flags.tasks:
        return [f"{place}: is no run that llama_ft knows a validation set of. Give --dataset FILE, or --tasks."]
    shown = {name: places.get(name, f"{place}: its run") for name in READ}
    return check_paths(values_of(what.config), shown, SETTINGS.keys() - READ) if what.samples else []


def _check_results(name: str) -> list[str]:
    """Return an error if the file holds something other than results: only results are replaced."""
    file = Path(name).expanduser()
    try:
        if not file.exists() or {"rows", "task_settings", "models"} <= json.loads(file.read_text()).keys():
            return []
    except (OSError, ValueError, AttributeError):
        pass
    return [f"--output_file {name}: does not hold results, so it is not replaced. Name another file."]
