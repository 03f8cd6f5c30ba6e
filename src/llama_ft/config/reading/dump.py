"""Write settings: as --help, as a list of differences from the defaults, as a run's YAML, and as a
JSON schema."""

import inspect
import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import TypeAdapter

from llama_ft.config.settings.settings import SECTIONS, SETTINGS, Config, Setting, values_of
from llama_ft.config.wording.messages import format_value

WIDTH = 100  # characters per line of --help
COLUMN = 36  # where the meanings begin
PAD = " " * COLUMN
# kind of a setting -> what --help shows for its value; other kinds are lists
WORDS = {
    "switch": "",
    "whole number": " N",
    "number": " X",
    "choice": " WORD",
    "text": " TEXT",
    "data": " TEXT",
    "data or sets": " TEXT",
    "groups": " LIST",
    "options": " MAPPING",
}
# Settings that most runs set: the first part of --help, and all that it prints without `all`.
COMMON_SETTINGS = (
    "model_name",
    "dataset",
    "validation",
    "output_dir",
    "use_peft",
    "r",
    "mode",
    "lr",
    "num_epochs",
    "batch_size_training",
    "gradient_accumulation_steps",
    "context_length",
    "activation_checkpointing",
    "enable_fsdp",
    "objective",
    "resume",
)
# Settings that must differ in a repeated run: it gets a directory of its own and deletes nothing.
SETTINGS_OF_ONE_RUN = ("output_dir", "overwrite", "resume", "resume_allow_changes")


def exit_with_help(text: str) -> NoReturn:
    """Print what --help asks for, and exit; quietly if the reader, such as head, stops reading."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # Python flushes stdout again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def asks_for_help(argv: list[str]) -> bool:
    """Return whether a command line has --help or -h."""
    return not {"--help", "-h"}.isdisjoint(argv)


def help_text(description: str, script: str, everything: bool = True) -> str:
    """Return the text that --help prints.

    Args:
        description: what the recipe does. Only its first paragraph is printed.
        everything: also the settings that few runs set (`--help all`).
        script: the recipe as it was called, such as recipes/finetuning.py or `/some/where/llama-ft
            train`.
    """
    name = Path(script).name
    python = f"python {script}"
    many = f"torchrun --nproc_per_node 2 {script}"
    if name.startswith("llama-ft "):  # and its verb
        python = name
        many = f"{name} --nproc 2"
    usage = f"Usage:\n  {python} [flags]\n  {many} --enable_fsdp [flags]"
    notes = (
        "Write flags as --lr 1e-4 or --lr=1e-4, or with their section: --train.lr 1e-4. Switches need no value "
        "(--use_peft) or take true or false; --no_save_model turns one off. Write lists as a,b,c; none unsets a "
        "value. --config FILE reads a YAML config first; --config llama3.1_8b_lora_24gb is one of the configs "
        "that come with llama_ft. Without --config, --model_name and --dataset, a demo runs. "
        "llama-recipes' flags work by their names and prefixes (--lora_config.r 8); docs/migrate translates those of "
        "torchtune, TRL and axolotl."
    )
    about = inspect.cleandoc(description).partition("\n\n")[0]
    parts = [textwrap.fill(about, WIDTH), usage, textwrap.fill(notes, WIDTH)]
    common = {name: SETTINGS[name] for name in COMMON_SETTINGS}
    parts.append(flags_text(common, "The flags that most runs need:"))
    if not everything:
        left = len(SETTINGS) - len(common)
        parts.append(f"--help all prints {left} more; docs/reference/config.md has them, too.")
        return "\n\n".join(parts) + "\n"
    for section, cls in SECTIONS.items():
        settings = {
            name: setting
            for name, setting in SETTINGS.items()
            if setting.section == section and name not in common
        }
        parts.append(flags_text(settings, f"{section}: {inspect.getdoc(cls)}"))
    return "\n\n".join(parts) + "\n"


def flags_text(settings: Mapping[str, Setting], title: str) -> str:
    """Format flags in two columns: the name, then its meaning, choices and default."""
    lines = [title]
    for setting in settings.values():
        if setting.dotted == "quantization.mode":
            head = "  --quantization [WORD]"
        else:
            head = f"  {setting.flag}{WORDS.get(setting.kind, ' A,B')}"
        default = format_value(setting.default).strip("[]{}")
        choices = f"{', '.join(setting.choices)}; " if setting.choices else ""
        text = f"{setting.meaning} [{choices}default: {default or 'empty'}]"
        body = textwrap.fill(
            text,
            WIDTH,
            initial_indent=PAD,
            subsequent_indent=PAD,
            break_on_hyphens=False,
        )
        fits_one_line = len(head) < COLUMN - 1
        if fits_one_line:
            lines.append(head + body[len(head) :])  # in place of the body's first blanks
        else:
            lines.append(f"{head}\n{body}")
    return "\n".join(lines)


def differences(config: Config) -> list[str]:
    """Return one line, `train.lr = 0.002 (default 0.0001)`, for each setting that is not at its
    default."""
    lines = []
    for name, value in values_of(config).items():
        setting = SETTINGS[name]
        if value != setting.default:
            default = format_value(setting.default)
            lines.append(f"{setting.dotted} = {format_value(value)} (default {default})")
    return lines


def to_yaml(config: Config, header: str = "") -> str:
    """Write the resolved configuration as YAML that `--config` can read.

    Values are written as they were given; keys and tokens are not settings. The YAML leaves out the
    settings in SETTINGS_OF_ONE_RUN, so that a run with this config repeats the run in a new directory.

    Args:
        config: the configuration.
        header: text that becomes the comment at the top.
    """
    values = values_of(config)
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, setting in SETTINGS.items():
        if name not in SETTINGS_OF_ONE_RUN:
            sections[setting.section][name] = values[name]
    body = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)
    if not header.strip():
        return body
    comment = textwrap.indent(header.strip(), "# ", lambda _: True)  # empty lines, too
    return f"{comment}\n\n{body}"


def json_schema() -> dict[str, Any]:
    """Return pydantic's schema (draft 2020-12), extended by the short forms that the loader also
    accepts."""
    schema = TypeAdapter(Config).json_schema()
    sections = schema["$defs"]
    # a fraction: in YAML a number, which the loader reads as text
    fraction = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    validation = sections["DataConfig"]["properties"]["validation"]["anyOf"]
    validation.insert(1, fraction)
    # quantization: 8bit
    mode = dict(sections["QuantizationConfig"]["properties"]["mode"])
    mode["description"] = "Short for quantization.mode."
    schema["properties"]["quantization"] = {"anyOf": [{"$ref": "#/$defs/QuantizationConfig"}, mode]}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **schema, "title": "llama_ft recipe", "additionalProperties": False}
