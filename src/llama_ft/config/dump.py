"""Settings on their way out: --help, what differs from the defaults, a run's YAML, the JSON schema."""

import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from llama_ft.commands import is_console_script
from llama_ft.config.aliases import LLAMA_RECIPES
from llama_ft.config.messages import show
from llama_ft.config.settings import SECTIONS, SETTINGS, Config, Setting, values_of

WIDTH, COLUMN = 100, 36
WORDS = {"switch": "", "whole number": " N", "number": " X", "choice": " WORD", "text": " TEXT", "data": " TEXT"}
# They belong to one run and not to what it does: a repetition gets a directory of its own and deletes nothing.
ONE_RUN_ONLY = ("output_dir", "overwrite", "resume", "resume_allow_changes")


def help_text(description: str, script: str) -> str:
    """Return what --help prints.

    Args:
        description: what the recipe does; its first paragraph is printed.
        script: the recipe as it was called, such as recipes/finetuning.py or /some/where/llama-ft-finetune.
    """
    name = Path(script).name
    python, torchrun = (name, f"--no-python {name}") if is_console_script(script) else (f"python {script}", script)
    renamed = {old: here[4:] for old, here in LLAMA_RECIPES.items() if here.startswith("use ")}
    parts = [
        _paragraph(inspect.cleandoc(description).partition("\n\n")[0]),
        f"Usage:\n"
        f"  {python} [flags]\n"
        f"  {python} --config configs/quickstart.yaml [flags]\n"
        f"  torchrun --nproc_per_node 2 {torchrun} --enable_fsdp [flags]",
        _paragraph(
            "Flags are written --lr 1e-4 or --lr=1e-4, or with their section: --train.lr 1e-4. Switches stand alone "
            "(--use_peft) or take true or false, and --no_save_model turns one off. Lists are written a,b,c, and none "
            "unsets. Without a config, model_name and dataset the embedded demo runs."
        ),
        _paragraph(
            "Coming from llama-recipes: its flags work by their names here, also with their prefixes "
            "(--lora_config.r 8); one whose meaning is gone is rejected with a line saying what to use. The pages "
            "docs/from-*.md translate the names of torchtune, TRL and axolotl, too."
        ),
        "\n".join([_entry("  --config FILE", "A YAML config to read first."), _entry("  --help, -h", "Print this.")]),
        *(flags_text(_of_section(name), f"{name}: {inspect.getdoc(SECTIONS[name])}") for name in SECTIONS),
        "\n".join(["Names of llama-recipes that are others here:", *(_entry(f"  {a}", b) for a, b in renamed.items())]),
    ]
    return "\n\n".join(parts) + "\n"


def _of_section(section: str) -> dict[str, Setting]:
    return {name: setting for name, setting in SETTINGS.items() if setting.section == section}


def flags_text(settings: Mapping[str, Setting], title: str) -> str:
    """Lay flags out: the name on the left, meaning, choices and default on the right."""
    lines = [title]
    for setting in settings.values():
        head = f"  --{setting.name}{WORDS.get(setting.kind, ' A,B')}"
        lines.append(
            _entry("  --quantization [WORD]" if setting.dotted == "quantization.mode" else head, _about(setting))
        )
    return "\n".join(lines)


def _about(setting: Setting) -> str:
    default = setting.default
    shown = ("on" if default else "off") if setting.kind == "switch" else show(default).strip("[]") or "empty"
    choices = f"{', '.join(setting.choices)}; " if setting.choices else ""
    return f"{setting.meaning} [{choices}default: {shown}]"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _entry(head: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    if len(head) < COLUMN - 1:
        head, lines = head.ljust(COLUMN) + lines[0], lines[1:]
    return "\n".join([head, *(" " * COLUMN + line for line in lines)])


def differences(config: Config) -> list[str]:
    """Return one line, `train.lr = 0.002 (default 0.0001)`, for each setting that is not at its default."""
    return [
        f"{SETTINGS[name].dotted} = {show(value)} (default {show(SETTINGS[name].default)})"
        for name, value in values_of(config).items()
        if value != SETTINGS[name].default
    ]


def to_yaml(config: Config, header: str = "") -> str:
    """Write the resolved configuration as YAML that `--config` reads.

    No secret can be in it: keys and tokens are no settings. output_dir, overwrite and what resumes a run are left out,
    so that reading it again repeats the run in a new directory.

    Args:
        config: the configuration.
        header: text that becomes the comment at the top.
    """
    values = values_of(config)
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, setting in SETTINGS.items():
        if name not in ONE_RUN_ONLY:
            sections[setting.section][name] = values[name]
    body = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)
    return textwrap.indent(header.strip(), "# ", lambda _: True) + f"\n\n{body}" if header.strip() else body


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12): sections, settings, types, choices, ranges, meanings and defaults."""
    schema = TypeAdapter(Config).json_schema()
    sections = schema["$defs"]
    for setting in SETTINGS.values():
        section_class = schema["properties"][setting.section]["$ref"].rpartition("/")[2]
        field = sections[section_class]["properties"][setting.name]
        field.pop("title")
        field |= {"description": setting.meaning, "default": setting.default}
    validation = sections["DataConfig"]["properties"]["validation"]["anyOf"]
    validation.insert(1, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})
    mode = {**sections["QuantizationConfig"]["properties"]["mode"], "description": "Short for quantization.mode."}
    schema["properties"]["quantization"] = {"anyOf": [{"$ref": "#/$defs/QuantizationConfig"}, mode]}
    for section in sections.values():
        del section["title"]
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **schema, "title": "llama_ft recipe", "additionalProperties": False}
