"""From a command line and a YAML config to one checked `Config`: first all names, values and paths, then the rules."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_ft.config.dump import help_text
from llama_ft.config.messages import nearest, show, subject
from llama_ft.config.parse import Parsed, as_keywords, read_flags, read_yaml, words_of
from llama_ft.config.paths import check_paths
from llama_ft.config.rules import broken_rules, drop_overridden
from llama_ft.config.settings import SETTINGS, Config, settings_of, values_of
from llama_ft.errors import UserError, before_imports, exit_on_error, rank


def check_command_line(description: str, demo_config: Path) -> None:
    """Answer --help and errors before anything slow is imported, and leave the words to fire as `--name=value`.

    Args:
        description: what the script does, for --help.
        demo_config: see `load`.

    Raises:
        SystemExit: 0 after --help, 2 after the user's errors.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        if rank() == 0:
            print(help_text(description, script=sys.argv[0]), end="")
        sys.exit(0)
    with before_imports():
        load(sys.argv[1:], demo_config)
    sys.argv[1:] = [f"--{name}={text}" for name, text in as_keywords(sys.argv[1:]).items()]


def load_flags(flags: Mapping[str, str], demo_config: Path) -> tuple[Config, dict[str, str]]:
    """Return what `load` does, out of flags (name -> text) as fire passes them on after `check_command_line`.

    Raises:
        SystemExit: 2 after errors: of a file that has changed since.
    """
    with exit_on_error():
        return load([f"--{name}={text}" for name, text in flags.items()], demo_config)


def load(argv: list[str], demo_config: Path | None = None, *, paths: bool = True) -> tuple[Config, dict[str, str]]:
    """Read `--config` and the flags, the flags winning, and check everything.

    Args:
        argv: the words after the script's name.
        demo_config: the config to take when the command line names neither a config nor a model nor a dataset.
        paths: also check files and directories: that inputs exist, that output_dir may be written.

    Returns:
        The configuration, and where each setting that was set was set: dotted name -> `--lr` or `configs/x.yaml:12`.

    Raises:
        UserError: with one message for every error.
    """
    named, flags = config_file(argv)
    is_demo = named is None and flags.values.keys().isdisjoint({"model_name", "dataset"})
    file_name = demo_config if is_demo else named and Path(named).expanduser()
    file = read_yaml(file_name) if file_name else Parsed()
    values, places = {**file.values, **flags.values}, {**file.places, **flags.places}
    config, wrong = convert(values, places)
    errors = [*file.errors, *flags.errors, *wrong.values()]
    if not errors:  # rules over settings that are not what was meant would mislead
        valid = drop_overridden(values_of(config), places)
        config, _ = convert(valid, places)
        errors = broken_rules(valid, places)
    if paths:
        errors += [error for error in check_paths(values_of(config), places, {*wrong}) if error not in errors]
    if errors:
        raise UserError(*errors)
    return config, {SETTINGS[name].dotted: place for name, place in places.items()}


def config_file(argv: list[str]) -> tuple[str | None, Parsed]:
    """Return the value of --config, and what the other flags set."""
    words = list(words_of(argv))
    named = [word.value or "" for word in words if word.flag == "--config"]
    parsed = read_flags([text for word in words if word.flag != "--config" for text in word.as_typed])
    if len(named) > 1 or named == [""]:
        parsed.errors.append("--config: names one file, as configs/mine.yaml.")
    return (named[0] or None if named else None), parsed


def convert(
    values: Mapping[str, Any], places: Mapping[str, str], settings_class: Any = Config
) -> tuple[Any, dict[str, str]]:
    """Build a dataclass of settings; what cannot be converted keeps its default.

    Args:
        values: field name -> text, list, None or a value of the field's type.
        places: field name -> where it was set.
        settings_class: `Config`, or a pydantic dataclass without sections.

    Returns:
        The instance, and field name -> message for each value that is not valid in itself.
    """
    table = SETTINGS if settings_class is Config else settings_of(settings_class)
    wrong = {name: f"{subject(name, places)}: the value is empty." for name in values if values[name] == ""}
    while True:
        nested: dict[str, Any] = {}
        for name in values.keys() - wrong.keys():
            section = table[name].section
            (nested.setdefault(section, {}) if section else nested)[name] = values[name]
        try:
            return settings_class(**nested), {name: wrong[name] for name in values if name in wrong}
        except ValidationError as refusal:
            for error in refusal.errors(include_url=False, include_input=False):
                *_, name = [str(part) for part in error["loc"][:2] if part in table]
                head, part = f"{subject(name, places)} {show(values[name])}", error["loc"][3:]
                if table[name].kind == "data" and isinstance(values[name], list):
                    head = f"{subject(name, places)}[{'].'.join(map(str, part))}"
                    if not part:
                        continue  # that a list is no text
                match = nearest(str(values[name]), choices := table[name].choices)
                wanted = f"expected one of {', '.join(choices)}" if choices else _plain(error["msg"])
                wrong.setdefault(name, f"{head}: {wanted}." + (f" Did you mean {match}?" if match else ""))


def _plain(message: str) -> str:
    """Say in fewer words what pydantic says."""
    message = message.partition(", unable")[0].removeprefix("Value error, ").replace("Input should", "must")
    return message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
