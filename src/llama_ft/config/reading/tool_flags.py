"""Read the command line of a tool: its flags are a dataclass, and the parser is that of the
settings."""

import inspect
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from llama_ft import door
from llama_ft.config.reading.dump import WIDTH, asks_for_help, exit_with_help, flags_text
from llama_ft.config.reading.load import convert
from llama_ft.config.reading.parse import Parsed, read_flags
from llama_ft.config.settings.settings import Setting, settings_of
from llama_ft.config.value_types import STRICT
from llama_ft.config.wording.messages import nearest
from llama_ft.errors import UserError


def read(
    argv: list[str],
    flags: Any,
    description: str,
    other_names: Mapping[str, str] | None = None,
) -> tuple[Any, Parsed, list[str]]:
    """Read a tool's own flags.

    Args:
        argv: the arguments after the script's name.
        flags: the dataclass of its flags. Its field `paths` takes the positional arguments.
        description: what the script does. --help prints its first paragraph.
        other_names: alias of a flag -> its name.

    Returns:
        The flags; the command line as it was read, with the place of each flag; and the error
        messages.
    """
    table = settings_of(flags)
    paths = table.pop("paths", None)
    if asks_for_help(argv):
        exit_with_help(tool_help(flags, description))
    names = other_names or {}

    def find(name: str) -> Setting | None:
        return table.get(names.get(name, name)) or table.get(f"{name}_")  # a word of Python

    def explain(name: str) -> str:
        match = nearest(name, table)
        hint = f"Did you mean --{match}?" if match else "--help lists them all."
        return f" is not a flag. {hint}"

    positional = "paths" if paths is not None else None
    parsed = read_flags(argv, find, explain, positional)
    options, wrong = convert(parsed.values, parsed.origins, flags)
    return options, parsed, [*parsed.errors, *wrong.values()]


def with_extensions(tool: str, flags: Any) -> Any:
    """Return the dataclass of a tool's flags, with those of extensions."""
    bases = (flags, *door.flags_of(tool))
    if len(bases) == 1:
        return flags
    return dataclass(config=STRICT, kw_only=True)(type(flags.__name__, bases, {}))


def tool_help(flags: Any, description: str) -> str:
    """Return what --help prints: the tool's own flags first, then those of each class that its
    dataclass extends."""
    table = settings_of(flags)
    paths = table.pop("paths", None)
    script = sys.argv[0]
    name = Path(script).name
    usage = name if name.startswith("llama-ft ") else f"python {script}"
    notes = []
    if paths is not None:
        words, _, _ = paths.meaning.partition(":")
        usage += f" {words}"
        notes.append(textwrap.fill(paths.meaning, WIDTH))
    parts = [description.partition("\n\n")[0], f"Usage:\n  {usage} [flags]", *notes]
    has_own = False
    for cls in flags.__mro__:
        own = {field: table.pop(field) for field in inspect.get_annotations(cls) if field in table}
        about = f"{inspect.getdoc(cls)}".rstrip(".") if has_own else f"Flags of {name}"
        if own:
            has_own = True
            parts.append(flags_text(own, f"{about}:"))
    return "\n\n".join(parts) + "\n"


def check(errors: list[str]) -> None:
    """Raise a UserError with all `errors`, if there are any."""
    if errors:
        raise UserError(*errors)
