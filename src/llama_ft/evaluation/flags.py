"""The command line of recipes/evaluate.py: models, samples and tasks."""

import importlib.util
from collections.abc import Set
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass as settings_dataclass

from llama_ft.config.home import expanded
from llama_ft.config.objectives import PROMPTS
from llama_ft.config.paths import base_model_of, check_paths, looks_local, model_problem
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.rules import brings_validation
from llama_ft.config.settings.data_settings import DataConfig
from llama_ft.config.settings.settings import SETTINGS, Config, Score, values_of
from llama_ft.config.value_types import STRICT, Count, CountOrZero
from llama_ft.config.wording.messages import format_value
from llama_ft.errors import UserError
from llama_ft.inference.flags import (
    EARLIER_FLAGS,
    ModelFlags,
    check_models,
    check_output,
    find_result,
    settings_of_run,
)

# Settings of a run that select samples, and those that name files.
DATASET_SETTINGS = (
    "dataset_split",
    "dataset_format",
    "columns",
    "repair_chats",
    "max_samples",
    "rollouts",
    "reward_threshold",
    "deduplicate",
    "validation",
)
SAMPLES = (
    "dataset",
    *DATASET_SETTINGS,
    "labels",
    "reasoning_content",
    "truncation",
    "context_length",
)
Split = Literal["train", "validation"]
READ = {"dataset", "validation", "chat_template", "score"}
TRAINING_ONLY_FLAGS = {
    "streaming",
    "shuffle_buffer",
    "show_samples",
    "validation_output",
}
SCORE_SETTINGS = ("score", "score_tokens", "score_samples", "score_answers")


@settings_dataclass(config=STRICT, kw_only=True)
class EvaluateFlags(DataConfig, ModelFlags):
    """Flags of recipes/evaluate.py; those about data are the training recipe's, and default to the
    run's."""

    paths: list[str] = Field(default_factory=list)
    """[MODEL...]: one or more. A run's directory, a checkpoint, a saved adapter, or the directory or
    Hub name of a model; if not given, the newest run in output/."""

    base: bool = False
    """Evaluate the base model of each MODEL, too, and show the difference."""

    output: str | None = None
    """Write the results to this new file, as JSON."""

    score: Score | None = None
    """Score generated answers: exact, contains, json or path/to/file.py:function; if not given, as
    in the run."""

    score_tokens: Count = 128
    """Maximum new tokens of a scored answer; if not given, as in the run."""

    score_samples: CountOrZero = 0
    """Score the first N samples of each set only; 0 = all. If not given, as in the run."""

    score_answers: Count = 1
    """Scored answers per sample. Several are sampled at temperature 1, for pass_at_K; if not given, as
    in the run."""

    tasks: list[str] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness by name, or YAML files of your own:
    hellaswag,my_tasks/arithmetic.yaml."""

    limit: Annotated[float, Field(gt=0)] | None = None
    """Only the first N questions of a task, or a share below 1."""

    num_fewshot: CountOrZero | None = None
    """Solved examples before each question."""

    batch_size: Count = 8
    """Questions, or samples to score, at a time, per rank."""

    apply_chat_template: bool = False
    """Ask the questions as a user's message of the chat template."""

    val_batch_size: Count = 1
    """Micro-batch size per rank: packed sequences, or samples with batching_strategy=padding."""

    max_eval_step: CountOrZero = 0
    """Largest number of micro-batches per rank; 0 = all samples."""


class ModelToEvaluate(NamedTuple):
    """A model to evaluate, the settings of its run if there is one, and the base model to compare
    it with."""

    place: str
    run: Config | None
    base: str | None


@dataclass(frozen=True)
class EvaluationRequest:
    """The models and the samples to evaluate. `config` selects the samples, and a text describes
    them ("": only tasks are evaluated). They are a split of config.data.dataset or (None) its
    validation set."""

    flags: EvaluateFlags
    models: list[ModelToEvaluate]
    config: Config
    samples: str
    split: Split | None


def read_evaluate_flags(argv: list[str], description: str) -> EvaluationRequest:
    """Return what to evaluate. Raises UserError with all errors."""
    flags, parsed, errors = read(argv, EvaluateFlags, description, EARLIER_FLAGS)
    errors += [*check_models(flags), *check_output(flags.output)]
    errors += [
        f"--{name}: is for training only." for name in parsed.origins.keys() & TRAINING_ONLY_FLAGS
    ]
    if flags.tasks and importlib.util.find_spec("lm_eval") is None:
        errors.append("--tasks: needs lm-evaluation-harness. pip install -e '.[eval]' installs it.")
    check(errors)
    models = [_model_to_evaluate(place, flags) for place in flags.paths]
    what = _select_samples(flags, models, parsed.origins.keys())
    if what.samples:
        by_run = f"{models[0].place}: its run"
        origins = {name: parsed.origins.get(name, by_run) for name in READ}
        values = values_of(what.config)
        check(check_paths(values, origins, SETTINGS.keys() - READ))
    return what


def _model_to_evaluate(place: str, flags: EvaluateFlags) -> ModelToEvaluate:
    result = find_result(expanded(place)) if looks_local(place) else None
    run = settings_of_run(*result) if result else None
    base = flags.base_model or (run.model.model_name if run else None)
    if base is None and flags.base and result and result[0] == "adapter":
        base = base_model_of(str(result[1]))
    if flags.base and base is None:
        raise UserError(
            f"--base: {place} does not say what it was fine-tuned from. Add --base_model."
        )
    problem = model_problem(str(base)) if flags.base else None
    if problem:
        raise UserError(
            f"{place}: its base model {base}: {problem}\n--base_model says where it is now."
        )
    return ModelToEvaluate(place, run, base if flags.base else None)


def _selection(settings: DataConfig) -> list[Any]:
    return [getattr(settings, name) for name in SAMPLES]


def _select_samples(
    flags: EvaluateFlags, models: list[ModelToEvaluate], given: Set[str]
) -> EvaluationRequest:
    """Select the samples by the given flags, or else as in the first model's run."""
    runs = [(place, run) for place, run, _ in models if run is not None]
    place, run = runs[0] if runs else (models[0].place, Config())
    samples = ""
    split: Split | None = None
    # the final model's tokenizer contains the chat template
    changed: dict[str, Any] = {"chat_template": None, "validation_output": None}
    if "dataset" in given:
        changed |= {name: getattr(DataConfig(), name) for name in (*DATASET_SETTINGS, "streaming")}
        samples = (
            f"the validation set of {flags.dataset} (--validation {format_value(flags.validation)})"
        )
        if "validation" not in given:
            samples = f"all samples of {flags.dataset}"
            split = "validation"
            if "dataset_split" in given:
                samples += f", split {flags.dataset_split}"
                split = "train"
    elif runs and brings_validation(SimpleNamespace(**values_of(run))):
        samples = f"the validation set of {place}"
        if run.data.validation:
            samples += f" ({format_value(run.data.validation)})"
        chosen = given & {"validation", "dataset_split"}
        if chosen:
            raise UserError(
                f"--{min(chosen)}: needs --dataset; without it, the run's own validation set is used."
            )
        selections = [_selection(other.data) for _, other in runs]
        if any(selection != selections[0] for selection in selections):
            raise UserError(
                "The runs have different validation sets. --dataset names samples to compare them on."
            )
    elif not flags.tasks:
        raise UserError(
            f"{place}: no run with a validation set is there. Give --dataset FILE, or --tasks."
        )
    if run.data.dataset_format == PROMPTS:  # of --objective grpo; here the responses are compared
        changed["dataset_format"] = "auto"
    for name in given & vars(run.data).keys():
        changed[name] = getattr(flags, name)
    evaluated = dict[str, Any]()
    for name in given & {"val_batch_size", "max_eval_step", *SCORE_SETTINGS}:
        evaluated[name] = getattr(flags, name)
    evaluated["score_batch_size"] = flags.batch_size
    settings = replace(run.data, **changed)
    train = replace(run.train, **evaluated)
    config = replace(run, data=settings, train=train)
    return EvaluationRequest(flags, models, config, samples, split)
