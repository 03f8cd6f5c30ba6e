"""The command line of recipes/inference.py, with every mistake in it told at once and before torch is imported."""

import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from llama_ft.commands import shown
from llama_ft.config.paths import (
    base_model_of,
    file_complaint,
    looks_safely,
    model_complaint,
    output_complaint,
)
from llama_ft.config.results import find_result, result_complaint
from llama_ft.config.script_flags import MODEL_FLAGS, ScriptFlags, number, whole_number
from llama_ft.config.wording import brief
from llama_ft.errors import UserError

OF_MANY = {"output_key": "answer", "batch_size": 8}  # defaults of what only --prompts has
SAFETY = "answers are not judged here. Leave it out"
# llama-recipes' flags whose meaning is gone, with what to do instead.
GONE = {
    "use_auditnlg": SAFETY,
    "enable_azure_content_safety": SAFETY,
    "enable_sensitive_topics": SAFETY,
    "enable_salesforce_content_safety": SAFETY,
    "enable_llamaguard_content_safety": SAFETY,
    "share_gradio": "there is no web page. --chat is a conversation in the terminal",
    "min_length": "an answer ends where the model ends it. Leave it out",
    "length_penalty": "only beam search has one, and answers are sampled or greedy. Leave it out",
    "use_cache": "what was computed of earlier tokens is always kept. Leave it out",
    "max_padding_length": "prompts are padded to the longest of their batch. Leave it out",
    "use_fast_kernels": "torch's fastest attention is taken by itself. Leave it out",
    "low_cpu_fsdp": "each rank reads its own rows. Leave it out",
}


def open_closed_streams() -> None:
    """Put an empty file where Python has no stdin, stdout or stderr, because the shell has closed it (<&-, >&-)."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def read_inference_flags(argv: list[str], description: str) -> Namespace:
    """The flags, with `place` settled, and in `mode` what is asked for: one, many or chat.

    Args:
        argv: the words after the script's name.
        description: what the script does, for --help.

    Raises:
        UserError: with one message for every mistake.
    """
    flags = ScriptFlags(description, GONE)
    _add_model_flags(flags)
    _add_prompt_flags(flags)
    _add_sampling_flags(flags)
    options = flags.read(argv)
    mistakes = [*_place_mistakes(options), *_prompt_mistakes(options), *_text_mistakes(options)]
    if options.do_sample is False and options.temperature:
        mistakes.append(f"--do_sample False: --temperature {options.temperature:g} asks for sampling.")
    if options.do_sample and options.temperature == 0:
        mistakes.append("--do_sample: --temperature 0 asks for the likeliest token each time.")
    if options.do_sample is False:
        options.temperature = 0.0
    if options.temperature == 0:
        mistakes += unused_sampling(options)
    if mistakes:
        raise UserError(*mistakes)
    return options


def unused_sampling(options: Namespace) -> list[str]:
    """A message for each flag that says nothing of answers made of the likeliest tokens."""
    given = [name for name in ("top_p", "top_k") if getattr(options, name) is not None]
    return [
        f"--{name}: nothing is sampled: the likeliest token is taken each time.\n--temperature above 0 samples."
        for name in given
    ]


def is_utf8(text: str) -> bool:
    """Whether text can be written down: bytes that are not UTF-8 stand in it as halves of surrogate pairs."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def settings_file(answers: Path) -> Path:
    """Where it stands how answers were made."""
    return answers.with_name(f"{answers.name}.settings.json")


@looks_safely
def answers_complaint(name: str) -> str | None:
    """Say why answers cannot be written to `name`: also where it holds something else, which is never replaced."""
    if complaint := output_complaint(name):
        return complaint
    file = Path(name).expanduser()
    return foreign_complaint(file) if file.exists() else None


def foreign_complaint(file: Path) -> str | None:
    """Say why a file holds no answers."""
    if not file.stat().st_size or settings_file(file).is_file():
        return None
    return (
        f"is not empty, and there is no {settings_file(file).name} beside it, which would say what answers it holds.\n"
        "Choose another file."
    )


def _add_model_flags(flags: ScriptFlags) -> None:
    flags.add_argument(
        "place", nargs="?", metavar="MODEL", help="a run's directory (its model/, or without one its newest sound "
        "checkpoint), a checkpoint, a saved adapter, or the folder or hub name of a model"
    )  # fmt: skip
    flags.add_model_flags(*MODEL_FLAGS)
    flags.set_defaults(precision="auto")


def _add_prompt_flags(flags: ScriptFlags) -> None:
    flags.add_argument("--prompt", metavar="TEXT", help="one prompt; the answer alone goes to stdout")
    flags.add_argument("--prompt_file", metavar="FILE", help="one prompt, from a file")
    flags.add_argument(
        "--prompts", metavar="FILE", help='many prompts: a line each in .txt; in .jsonl rows with "prompt" or '
        '"messages"'
    )  # fmt: skip
    flags.add_argument(
        "--output_file", metavar="FILE", help="with --prompts: answers as JSON lines; the same command goes on after "
        "those that are there. Default: stdout"
    )  # fmt: skip
    flags.add_argument("--output_key", metavar="NAME", help=f"its key there (default {OF_MANY['output_key']})")
    flags.add_argument("--overwrite", action="store_true", help="with --output_file: begin anew")
    flags.add_argument(
        "--batch_size", type=whole_number(1), metavar="N", help="with --prompts: so many at once, a rank (default "
        f"{OF_MANY['batch_size']})"
    )  # fmt: skip
    flags.add_argument(
        "--chat", action="store_true", help="a conversation; also what happens in a terminal when no prompt is given"
    )
    flags.add_argument("--system_prompt", metavar="TEXT", help="the first turn of every conversation")
    flags.add_argument(
        "--no_chat_template", action="store_true", help="prompts are text to go on with, for models that do not chat"
    )


def _add_sampling_flags(flags: ScriptFlags) -> None:
    flags.add_argument(
        "--max_new_tokens", default=256, type=whole_number(1), metavar="N", help="of an answer (default 256)"
    )
    flags.add_argument(
        "--temperature", type=number(), metavar="T", help="0: the likeliest token each time. Default of this and of "
        "the next three: what generation_config.json of the model says, else 0 (with --do_sample 1), 1, 50 and 1"
    )  # fmt: skip
    flags.add_argument("--top_p", type=number(1), metavar="P", help="sample from the likeliest that make up P")
    flags.add_argument("--top_k", type=whole_number(0), metavar="K", help="sample from the K likeliest; 0: from all")
    flags.add_argument("--repetition_penalty", type=number(above_zero=True), metavar="R", help="above 1: repeat less")
    flags.add_argument(
        "--do_sample", nargs="?", const=True, type=_boolean, metavar="True|False", help="False is --temperature 0"
    )
    flags.add_argument(
        "--seed", default=42, type=whole_number(0), metavar="N", help="of sampling, beside the row's number"
    )
    flags.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end answers before this text; may be given again"
    )


def _place_mistakes(options: Namespace) -> list[str]:
    """Also settle `place` and `base_model`."""
    mistakes, base_flag = [], settle_base(options)
    named = {"MODEL": options.place, "--peft_model": options.peft_model, "--model_name": options.model_name}
    given = {name: value for name, value in named.items() if value}
    if len(given) != 1:
        if given:
            return [f"{' and '.join(given)}: one of them names what is loaded. --base_model names the model beside it."]
        return [f"MODEL is needed: {shown('inference')} output/<run>, or the folder or hub name of a model."]
    [(flag, options.place)] = given.items()
    where = "" if flag == "MODEL" else f"{flag} "
    if complaint := result_complaint(options.place):
        mistakes.append(f"{where}{brief(options.place)}: {complaint}")
    elif not options.base_model and (complaint := _base_complaint(options.place)):
        mistakes.append(f"{where}{options.place}: {complaint}")
    return mistakes + base_mistakes(base_flag, options.base_model, [] if mistakes else [options.place])


def settle_base(options: Namespace) -> str:
    """Settle llama-recipes' --model_name beside --peft_model, which is the base; returns what the base is given by."""
    if not options.peft_model or not options.model_name or options.base_model:
        return "--base_model"
    options.base_model, options.model_name = options.model_name, None
    return "--model_name"


def base_mistakes(flag: str, base: str | None, places: Sequence[str]) -> list[str]:
    """What is wrong with a base model: its name, or that all of `places`, which are right, are whole models."""
    if not base:
        return []
    if complaint := model_complaint(base):
        return [f"{flag} {brief(base)}: {complaint}"]
    found = [find_result(Path(place).expanduser()) for place in places]
    if not found or not all(result and result[0] == "model" for result in found):
        return []
    return [f"{flag} {base}: would not be read: {brief(' and '.join(places))} needs no model beside it. Leave it out."]


def _base_complaint(place: str) -> str | None:
    """Say why the model that an adapter names as its base is not there."""
    found = find_result(Path(place).expanduser())
    if found is None or found[0] != "adapter":
        return None
    try:
        named = base_model_of(str(found[1]))
    except UserError as error:
        return error.messages[0]
    complaint = model_complaint(named)
    return f"its base model {named}: {complaint}\n--base_model says where it is now." if complaint else None


def _prompt_mistakes(options: Namespace) -> list[str]:
    """Also settle `mode`."""
    ways = {"--prompt": options.prompt, "--prompt_file": options.prompt_file, "--prompts": options.prompts}
    given = [flag for flag, value in ways.items() if value is not None] + ["--chat"] * options.chat
    if len(given) > 1:
        return [f"{' and '.join(given)}: one of them says what is answered."]
    options.mode = "many" if options.prompts else "chat" if options.chat else "one"
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if not given and ranks == 1 and sys.stdin.isatty():
        options.mode = "chat"
    mistakes = []
    for flag in ("--prompt_file", "--prompts"):
        if ways[flag] is not None and (complaint := file_complaint(ways[flag])):
            mistakes.append(f"{flag} {brief(ways[flag])}: {complaint}")
    if options.prompt_file and options.prompt_file.endswith(".jsonl"):
        mistakes.append("--prompt_file: is one prompt. --prompts takes a file of many.")
    if options.prompts and not options.prompts.endswith((".txt", ".jsonl")):
        mistakes.append(f"--prompts {options.prompts}: expected .txt, a prompt a line, or .jsonl.")
    if options.output_file and options.mode != "many":
        mistakes.append("--output_file: is for the answers to --prompts. One answer goes to stdout.")
    elif options.output_file and (complaint := answers_complaint(options.output_file)):
        mistakes.append(f"--output_file {brief(options.output_file)}: {complaint}")
    elif options.output_file and not mistakes and _is_same(options.output_file, options.prompts):
        mistakes.append(f"--output_file {options.output_file}: is what --prompts reads. Choose another file.")
    for name, default in OF_MANY.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.mode != "many":
            mistakes.append(f"--{name}: is for --prompts, a file of many.")
    if options.overwrite and not options.output_file:
        mistakes.append("--overwrite: nothing is written without --output_file.")
    if options.no_chat_template and options.system_prompt:
        mistakes.append("--system_prompt: without a chat template there is no place for it.")
    if options.no_chat_template and options.mode == "chat":
        mistakes.append("--no_chat_template: a chat needs one. --prompt takes plain text.")
    if ranks > 1 and options.mode != "many" and not options.enable_fsdp:
        mistakes.append(f"{ranks} processes: each would answer. --enable_fsdp shares the model out over them.")
    return mistakes


def _is_same(one: str, other: str) -> bool:
    file = Path(one).expanduser()
    return file.exists() and file.samefile(Path(other).expanduser())


def _text_mistakes(options: Namespace) -> list[str]:
    texts = {"--prompt": [options.prompt], "--system_prompt": [options.system_prompt], "--stop": options.stop}
    mistakes = [f"{flag}: is not UTF-8." for flag, given in texts.items() if not all(is_utf8(it or "") for it in given)]
    return mistakes + ["--stop: is empty; expected text to end before."] * ("" in options.stop)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"expected True or False, not {text}")
    return text.lower() == "true"
