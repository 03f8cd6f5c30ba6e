"""The command line of recipes/inference.py."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.config.paths import model_problem, output_problem
from llama_ft.config.run_settings import STRICT, Count, CountOrZero
from llama_ft.config.tool_flags import check, read
from llama_ft.inference.results import result_problem


@dataclass(config=STRICT, kw_only=True)
class ModelFlags:
    """Which model is loaded, and how."""

    places: list[str] = Field(default_factory=list)
    """MODEL, which stands alone: a run's directory, a checkpoint, a saved adapter, or the directory or Hub name of a
    model."""

    model_name: str | None = None
    """Another way to name MODEL; with --peft_model its base model."""

    peft_model: str | None = None
    """Another way to name a saved adapter."""

    base_model: str | None = None
    """Directory or Hub name of the model that was fine-tuned; if not given, what the run or the adapter names."""

    tokenizer_name: str | None = None
    """Directory or Hub name of another tokenizer."""

    quantization: Literal["none", "8bit", "4bit"] | None = None
    """Of frozen weights; if not given, as the run had it."""

    precision: Literal["auto", "bf16", "fp16", "fp32", "bf16_mixed", "bf16_pure"] | None = None
    """Precision of the computation; auto: bf16 if the device computes in bf16 itself, else fp32."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: a GPU, if there is one."""

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

    prompts: str | None = None
    """Many prompts: one per line in .txt; in .jsonl, samples with "prompt" or "messages"."""

    output_file: str | None = None
    """With --prompts: a file for the answers, as JSON lines; stdout if not given."""

    overwrite: bool = False
    """Replace --output_file if it exists."""

    batch_size: Count = 8
    """With --prompts: prompts answered at once, per rank."""

    chat: bool = False
    """A conversation; the default in a terminal when no prompt is given."""

    system_prompt: str | None = None
    """The first message of every conversation."""

    max_new_tokens: Count = 256
    """Largest number of tokens in an answer."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """0: greedy. If not given, this and the next three are as in the model's generation_config.json, else greedy, or
    with --do_sample, --top_p or --top_k 1; 1, 50 and 1."""

    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the likeliest tokens that make up this probability."""

    top_k: CountOrZero | None = None
    """Sample from this many of the likeliest tokens; 0: from all."""

    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Above 1: repeat less."""

    do_sample: bool | None = None
    """False is --temperature 0."""

    seed: CountOrZero = 42
    """Seed of sampling."""


def read_inference_flags(argv: list[str], description: str) -> InferenceFlags:
    """Return the flags, with the one model to load in `places`; raise UserError with all errors."""
    options, parsed, errors = read(argv, InferenceFlags, description)
    errors += check_models(options)
    prompts = [f"--{name}" for name in ("prompt", "prompt_file", "prompts", "chat") if name in parsed.places]
    for given in (options.places, prompts):
        if len(given) > 1:
            errors.append(f"{' and '.join(given)}: cannot be combined. Give one of them.")
    if options.output_file:
        errors += check_output_file(options.output_file, options.overwrite)
        if Path(options.output_file).expanduser().resolve() == Path(options.prompts or "").expanduser().resolve():
            errors.append(f"--output_file {options.output_file}: is what --prompts reads. Choose another file.")
    check(errors)
    return options


def check_models(options: ModelFlags) -> list[str]:
    """Put every model that is named into `places`, and return the errors about them. With --peft_model, --model_name is
    the base model, as in llama-recipes."""
    if options.peft_model and options.model_name and not options.base_model:
        options.base_model, options.model_name = options.model_name, None
    options.places = [name for name in (*options.places, options.model_name, options.peft_model) if name]
    errors = [f"{place}: {error}" for place in options.places if (error := result_problem(place))]
    if options.base_model and (error := model_problem(options.base_model)):
        errors.append(f"--base_model {options.base_model}: {error}")
    return errors or ([] if options.places else ["MODEL is needed: output/<run>, or a model's directory or Hub name."])


def check_output_file(name: str, overwrite: bool) -> list[str]:
    """Return why --output_file cannot be written, or would replace what nobody allowed to replace."""
    error = output_problem(name)
    if not error and Path(name).expanduser().exists() and not overwrite:
        error = "exists already. --overwrite replaces it."
    return [f"--output_file {name}: {error}"] if error else []
