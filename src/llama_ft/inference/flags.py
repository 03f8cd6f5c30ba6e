"""The command line of recipes/inference.py."""

import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llama_ft.commands import shown
from llama_ft.config.messages import brief
from llama_ft.config.paths import base_model_of, file_problem, model_problem, output_problem
from llama_ft.config.run_settings import STRICT, Count, CountOrZero
from llama_ft.config.tool_flags import check, read
from llama_ft.errors import UserError
from llama_ft.inference.results import find_result, result_problem

SAFETY = "answers are not judged here. Leave it out"
# llama-recipes' flags whose meaning is gone, with what to do instead.
REMOVED_FLAGS = {
    **dict.fromkeys(
        ("use_auditnlg", "enable_azure_content_safety", "enable_sensitive_topics", "enable_salesforce_content_safety",
         "enable_llamaguard_content_safety"), SAFETY),
    "share_gradio": "there is no web page. --chat is a conversation in the terminal",
    "min_length": "an answer ends where the model ends it. Leave it out",
    "length_penalty": "only beam search has one, and answers are sampled or greedy. Leave it out",
    "use_cache": "what was computed of earlier tokens is always kept. Leave it out",
    "max_padding_length": "prompts are padded to the longest of their batch. Leave it out",
    "use_fast_kernels": "torch's fastest attention is taken by itself. Leave it out",
    "low_cpu_fsdp": "each rank reads its own rows. Leave it out",
}  # fmt: skip
Share = Annotated[float, Field(ge=0, le=1)]


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
    """What is computed in; auto: bf16 where the device computes that itself, else fp32."""

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

    output_key: str = "answer"
    """With --prompts: the key of the answers."""

    overwrite: bool = False
    """With --output_file: replace the answers that it holds."""

    batch_size: Count = 8
    """With --prompts: prompts answered at once, per rank."""

    chat: bool = False
    """A conversation; the default in a terminal when no prompt is given."""

    system_prompt: str | None = None
    """The first message of every conversation."""

    no_chat_template: bool = False
    """Prompts are text to continue, for models that do not chat."""

    max_new_tokens: Count = 256
    """Most tokens of an answer."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """0: the likeliest token each time. If not given, this and the next three are what the model's
    generation_config.json says, else 0 (with --do_sample 1), 1, 50 and 1."""

    top_p: Share | None = None
    """Sample from the likeliest tokens that make up this probability."""

    top_k: CountOrZero | None = None
    """Sample from this many of the likeliest tokens; 0: from all."""

    min_p: Share | None = None
    """Sample from tokens at least so likely, relative to the likeliest; 0: from all."""

    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Above 1: repeat less."""

    do_sample: bool | None = None
    """False is --temperature 0."""

    seed: CountOrZero = 42
    """Seed of sampling, combined with the number of the prompt."""

    stop: list[str] = Field(default_factory=list)
    """End answers before this text; may be given again."""

    mode: ClassVar[str] = "one"  # no flag: settled by the others


def read_inference_flags(argv: list[str], description: str) -> InferenceFlags:
    """Return the flags: in `places` the one model to load, in `mode` what is asked for: one, many or chat.

    Raises:
        UserError: with one message for every error.
        SystemExit: 0 after --help.
    """
    options, parsed, errors = read(argv, InferenceFlags, description, gone=REMOVED_FLAGS, repeated=frozenset({"stop"}))
    options.precision = options.precision or "auto"
    places, base_errors = named_models(options)
    if len(places) != 1:
        what = f"{' and '.join(places)}: name one of them" if places else "MODEL is needed"
        errors.append(f"{what}: {shown('inference')} output/<run>, or the directory or Hub name of a model.")
    elif error := result_problem(places[0]):
        errors.append(f"{brief(places[0])}: {error}")
    elif not options.base_model and (error := base_error(places[0])):
        errors.append(f"{places[0]}: {error}")
    errors += base_errors
    given = [f"--{name}" for name in ("prompt", "prompt_file", "prompts", "chat") if name in parsed.places]
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    is_chat = options.chat or (not given and ranks == 1 and sys.stdin.isatty())
    mode = "many" if options.prompts else "chat" if is_chat else "one"
    if len(given) > 1:
        errors.append(f"{' and '.join(given)}: one of them says what is answered.")
    for flag, name in (("--prompt_file", options.prompt_file), ("--prompts", options.prompts)):
        if name and (error := file_problem(name)):
            errors.append(f"{flag} {brief(name)}: {error}")
    if options.prompt_file and options.prompt_file.endswith(".jsonl"):
        errors.append(f"--prompt_file {brief(options.prompt_file)}: is one prompt. --prompts takes a file of many.")
    if options.prompts and not options.prompts.endswith((".txt", ".jsonl")):
        errors.append(f"--prompts {options.prompts}: expected .txt, one prompt per line, or .jsonl.")
    if options.output_file and options.prompts and mode == "many":
        file = Path(options.output_file)
        if error := output_problem(options.output_file):
            errors.append(f"--output_file {brief(options.output_file)}: {error}")
        elif file.expanduser().exists() and file.expanduser().samefile(Path(options.prompts).expanduser()):
            errors.append(f"--output_file {file}: is what --prompts reads. Choose another file.")
        elif file.expanduser().exists() and not options.overwrite:
            errors.append(f"--output_file {file}: is there already. --overwrite replaces it.")
    for name in ("output_file", "output_key", "batch_size", "overwrite"):
        if name in parsed.places and mode != "many":
            errors.append(f"--{name}: is for --prompts, a file of many.")
    if options.no_chat_template and (options.system_prompt or mode == "chat"):
        errors.append("--no_chat_template: a system prompt or a chat needs the chat template.")
    if ranks > 1 and mode != "many" and not options.enable_fsdp:
        errors.append(f"{ranks} processes: each would answer. --enable_fsdp shards the model across them.")
    for name, texts in {
        "prompt": [options.prompt],
        "system_prompt": [options.system_prompt],
        "stop": options.stop,
    }.items():
        if not all(is_utf8(text or "") for text in texts):
            errors.append(f"--{name}: is not UTF-8.")
    if (
        options.do_sample is not None
        and options.temperature is not None
        and options.do_sample != (options.temperature > 0)
    ):
        errors.append(f"--do_sample {options.do_sample}: --temperature {options.temperature:g} says otherwise.")
    if options.do_sample is False:
        options.temperature = 0.0
    if options.temperature == 0:
        errors += [
            f"--{name}: nothing is sampled at --temperature 0." for name in ("top_p", "top_k") if name in parsed.places
        ]
    check(errors)
    options.places, options.mode = places, mode
    return options


def is_utf8(text: str) -> bool:
    """Whether text can be written down: bytes that are not UTF-8 stand in it as halves of surrogate pairs."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def named_models(options: ModelFlags) -> tuple[list[str], list[str]]:
    """Return the models that are named, and errors about the base model; with --peft_model, --model_name is the base
    model, as in llama-recipes."""
    flag = "--base_model"
    if options.peft_model and options.model_name and not options.base_model:
        flag, options.base_model, options.model_name = "--model_name", options.model_name, None
    places = [*filter(None, options.places), *filter(None, (options.model_name, options.peft_model))]
    base = options.base_model
    if base and (error := model_problem(base)):
        return places, [f"{flag} {brief(base)}: {error}"]
    found = [find_result(Path(place).expanduser()) for place in places if result_problem(place) is None]
    if base and found and len(found) == len(places) and all(result and result[0] == "model" for result in found):
        return places, [f"{flag} {base}: would not be read: {brief(' and '.join(places))} is a whole model. Remove it."]
    return places, []


def base_error(place: str) -> str | None:
    """Say why the model that an adapter names as its base model is not there."""
    found = find_result(Path(place).expanduser())
    if found is None or found[0] != "adapter":
        return None
    try:
        named = base_model_of(str(found[1]))
    except UserError as error:
        return error.messages[0]
    error_of_base = model_problem(named)
    return f"its base model {named}: {error_of_base}\n--base_model says where it is now." if error_of_base else None
