"""The text of --help, made from the settings' own declarations."""

import inspect
import textwrap
from collections.abc import Mapping
from pathlib import Path

from llama_ft.commands import is_console_script
from llama_ft.config.fields import SECTIONS, SETTINGS, Setting
from llama_ft.config.trainers import LLAMA_RECIPES
from llama_ft.config.wording import show

WIDTH = 100
COLUMN = 36
WORDS = {
    "switch": "",
    "whole number": " N",
    "number": " X",
    "choice": " WORD",
    "text": " TEXT",
    "data": " TEXT",
    "names": " A,B",
    "names or pattern": " A,B",
}


def help_text(description: str, script: str) -> str:
    """Return what --help prints.

    Args:
        description: what the recipe does; its first paragraph is printed.
        script: the recipe as it was called, such as recipes/finetuning.py or /some/where/llama-ft-finetune.
    """
    name = Path(script).name
    python, torchrun = (name, f"--no-python {name}") if is_console_script(script) else (f"python {script}", script)
    parts = [
        _paragraph(inspect.cleandoc(description).partition("\n\n")[0]),
        f"Usage:\n"
        f"  {python} [flags]\n"
        f"  {python} --config configs/quickstart.yaml [flags]\n"
        f"  torchrun --nproc_per_node 2 {torchrun} --enable_fsdp [flags]",
        _paragraph(
            "Flags are written --lr 1e-4 or --lr=1e-4, or with their section: --train.lr 1e-4. Switches stand alone "
            "(--use_peft) or take true or false, and --no_save_model turns one off. Lists are written a,b,c, and none "
            "unsets. With neither a recipe nor model_name nor dataset the embedded demo runs."
        ),
        _paragraph(
            "Coming from llama-recipes: its flags work by their names here, also with their prefixes "
            "(--lora_config.r 8); one whose meaning is gone is refused with a line saying what to use. Names of "
            "torchtune, TRL and axolotl are answered with ours. The pages docs/from-*.md have them all."
        ),
        "  --config FILE\n" + _indented("A YAML recipe to read first.") + "\n  --help, -h\n" + _indented("Print this."),
    ]
    parts += [_section(section) for section in SECTIONS]
    parts.append("\n".join(["Names of llama-recipes that are others here:", *_renamed(LLAMA_RECIPES)]))
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _renamed(names: Mapping[str, str]) -> list[str]:
    """Names that something takes the place of, and what that is."""
    return [_entry(f"  {name}", here.removeprefix("use ")) for name, here in names.items() if here.startswith("use ")]


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _section(section: str) -> str:
    title = f"{section}: {inspect.getdoc(SECTIONS[section])}"
    return "\n".join([title, *(_flag(setting) for setting in SETTINGS.values() if setting.section == section)])


def _flag(setting: Setting) -> str:
    """Lay one flag out: its name at the left, what it means and its default at the right."""
    head = f"  --{setting.name}{WORDS[setting.kind]}"
    if setting.name == "mode":
        head = "  --quantization [WORD]"
    return _entry(head, f"{setting.meaning} {_facts(setting)}")


def _entry(head: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    if len(head) < COLUMN - 1:
        head, lines = head.ljust(COLUMN) + lines[0], lines[1:]
    return "\n".join([head, *(" " * COLUMN + line for line in lines)])


def _facts(setting: Setting) -> str:
    """Tell default and choices."""
    default = setting.default
    facts = f"default: {('on' if default else 'off') if setting.kind == 'switch' else show(default).strip('[]')}"
    if setting.default == []:
        facts = "default: empty"
    if setting.choices:
        facts = f"{', '.join(setting.choices)}; {facts}"
    return f"[{facts}]"
