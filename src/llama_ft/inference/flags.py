"""The command line of recipes/inference.py, and detection of what a directory holds: run,
checkpoint, adapter, model."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.home import expanded
from llama_ft.config.newest_run import NO_RUN, newest_run
from llama_ft.config.paths import (
    file_problem,
    folder_problem,
    looks_local,
    missing_run,
    model_problem,
    not_writable,
    similar_run,
)
from llama_ft.config.reading.load import with_present_names
from llama_ft.config.reading.tool_flags import check, read
from llama_ft.config.settings.settings import Config, QuantizationConfig
from llama_ft.config.value_types import STRICT, Count, CountOrZero
from llama_ft.errors import rank
from llama_ft.export_flags import export_kind

# run: without a final model, but with checkpoints
Result = Literal["checkpoint", "run", "adapter", "model"]
MODEL_NAMES = "It is a run's directory, or a model's directory or Hub name."


@dataclass(config=STRICT, kw_only=True)
class ModelFlags:
    """Which model is loaded, and how."""

    paths: list[str] = Field(default_factory=list)
    """[MODEL]: a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a
    model; if not given, the newest run in output/."""

    model_name: str | None = None
    """Another way to name MODEL; with --peft_model its base model."""

    peft_model: str | None = None
    """Another way to name a saved adapter."""

    base_model: str | None = None
    """Directory or Hub name of the model that was fine-tuned; if not given, what the run or the
    adapter names."""

    tokenizer_name: str | None = None
    """Directory or Hub name of another tokenizer."""

    quantization: Literal["none", "8bit", "4bit", "as_stored"] | None = None
    """Quantization of frozen weights; if not given, the run's."""

    precision: Literal["auto", "bf16", "fp16", "fp32", "bf16_mixed", "bf16_pure"] | None = None
    """Precision of the computation; auto: bf16 if the device computes in bf16 itself, else fp32."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto: CUDA if there is a GPU, else the CPU."""

    enable_fsdp: bool = False
    """Under torchrun: shard the weights across ranks."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@dataclass(config=STRICT, kw_only=True)
class InferenceFlags(ModelFlags):
    """Flags of recipes/inference.py."""

    prompt: str | None = None
    """One prompt; the answer alone goes to stdout."""

    prompt_file: str | None = None
    """One prompt, from a file."""

    image: list[str] = Field(default_factory=list)
    """Image files that the prompt is about, or the first message of a conversation: a.png,b.png."""

    max_pixels: Count | None = None
    """Larger images are reduced to this number of pixels; if not given, as in the run."""

    prompts: str | None = None
    """Many prompts: one per line in .txt, or samples as for training. The last assistant message is
    ignored, if there is one."""

    columns: list[str] = Field(default_factory=list)
    """With --prompts: columns that have other names than in the format, as question=Question. If not
    given: as in the run, where the file has them."""

    skip_bad_rows: bool = False
    """With --prompts: skip samples that cannot be used, instead of stopping."""

    output: str | None = None
    """With --prompts: a new file for the answers, as JSON lines; stdout if not given."""

    batch_size: Count = 8
    """With --prompts: prompts answered at once, per rank."""

    chat: bool = False
    """A conversation; the default in a terminal when no prompt is given."""

    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """How a prompt of text is asked: chat with the chat template, text without it; auto: as in the
    fine-tuning."""

    system_prompt: str | None = None
    """The first message of every conversation."""

    max_new_tokens: Count = 256
    """Largest number of tokens in an answer."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature; 0 decodes greedily. If not given: as in generation_config.json, else
    greedy (1.0 with --do_sample, --top_p or --top_k)."""

    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the likeliest tokens that make up this probability; if not given, as in
    generation_config.json, else 1."""

    top_k: CountOrZero | None = None
    """Sample from this many of the likeliest tokens; 0: from all. If not given: as in
    generation_config.json, else 50."""

    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Above 1: repeat less. If not given: as in generation_config.json, else 1."""

    do_sample: bool | None = None
    """False is --temperature 0."""

    seed: CountOrZero = 42
    """Seed of sampling."""


EARLIER_FLAGS = {"output_file": "output"}  # old name -> flag, also of recipes/evaluate.py


def read_inference_flags(argv: list[str], description: str) -> InferenceFlags:
    """Return the flags, with the one model to load in `paths`; raise UserError with all errors."""
    options, parsed, errors = read(argv, InferenceFlags, description, EARLIER_FLAGS)
    errors += check_models(options)
    prompts = [
        f"--{name}"
        for name in ("prompt", "prompt_file", "prompts", "chat")
        if name in parsed.origins
    ]
    for names in (options.paths, prompts):
        if len(names) > 1:
            errors.append(f"{' and '.join(names)}: cannot be combined. Give one of them.")
    files = [("prompt_file", options.prompt_file), ("prompts", options.prompts)]
    files += [("image", image) for image in options.image]
    for name, file in files:
        error = file_problem(file) if file else None
        if error:
            errors.append(f"--{name} {file}: {error}")
    if options.image and options.prompts:
        errors.append(
            "--image: cannot be combined with --prompts, whose samples name their images."
        )
    errors += check_output(options.output)
    check(errors)
    return options


def check_models(options: ModelFlags) -> list[str]:
    """Put every named model into `paths`, or else the newest run, and return the error messages
    about them. With --peft_model, --model_name is the base model, as in llama-recipes."""
    if options.peft_model and options.model_name and not options.base_model:
        options.base_model = options.model_name
        options.model_name = None
    options.paths = [
        name for name in (*options.paths, options.model_name, options.peft_model) if name
    ]
    errors = []
    for place in options.paths:
        problem = result_problem(place)
        if problem:
            errors.append(f"{place}: {problem}")
    problem = model_problem(options.base_model) if options.base_model else None
    if problem:
        errors.append(f"--base_model {options.base_model}: {problem}")
    if not errors and not options.paths:
        newest = newest_run(find_result)
        if newest is None:
            errors.append(f"MODEL is needed, since {NO_RUN}\n{MODEL_NAMES}")
        else:
            options.paths = [str(newest)]
            if rank() == 0:
                print(f"The newest run: {newest}", file=sys.stderr)
    return errors


def check_output(name: str | None) -> list[str]:
    """Return why --output cannot be written, as error messages. An existing file is never
    replaced."""
    if name is None:
        return []
    file = expanded(name)
    # lexists: also a link to nothing, through which a file would be written elsewhere
    if os.path.lexists(file):
        error: str | None = "exists already. Name another file."
    else:
        error = not_writable(file.parent)
    return [f"--output {name}: {error}"] if error else []


def find_result(folder: Path) -> tuple[Result, Path] | None:
    """Return the kind and path of what can be loaded from a directory: of a run the final model, or
    else its checkpoints; None if there is nothing to load."""
    kind = export_kind(folder)
    if kind == "checkpoint":
        return "checkpoint", folder
    for place in (folder, folder / "model"):
        if (place / "adapter_config.json").is_file() and not any(place.glob("model*.safetensors")):
            return "adapter", place
        if (place / "config.json").is_file():
            return "model", place
    return ("run", folder) if kind == "run" else None


def result_problem(name: str) -> str | None:
    """Return why `name` cannot be loaded (it is not a run, checkpoint, adapter, model or Hub name),
    or None."""
    folder = expanded(name)
    if find_result(folder):
        return None
    if not folder.exists():
        is_on_hub = not looks_local(name) and similar_run(folder) is None
        return None if is_on_hub else missing_run(folder)
    expected = "the directory of a run, a checkpoint, a model or an adapter"
    nothing = "holds no run with a final model or a checkpoint, no model and no adapter."
    return folder_problem(folder, expected) or nothing


def settings_of_run(kind: Result, held: Path) -> Config | None:
    """Return the settings of the run that wrote what find_result found; None without a run or for
    another version. A whole model is loaded without its run's quantization, which applies only to
    the base model of an adapter."""
    directory = {"run": held, "checkpoint": held.parent.parent}.get(kind, held.parent)
    try:
        saved = yaml.safe_load((directory / "config.yaml").read_text())
        run = Config(**with_present_names(saved))
    except (OSError, ValueError, yaml.YAMLError, TypeError):
        return None
    return replace(run, quantization=QuantizationConfig()) if kind == "model" else run


def columns_of_run(name: str) -> list[str]:
    """Return --columns of the run that wrote what `name` loads; none without a run."""
    result = find_result(expanded(name))
    run = settings_of_run(*result) if result else None
    return run.data.columns if run else []
