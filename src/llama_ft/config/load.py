"""Load a `Config` from a command line and a YAML file: check all names, values and paths first,
then the rules."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_ft import __version__
from llama_ft.config.data_settings import DatasetPart
from llama_ft.config.dump import exit_with_help, help_text
from llama_ft.config.messages import MOST_ERRORS, describe_setting, format_value, nearest
from llama_ft.config.parse import Parsed, as_keywords, read_flags, read_yaml
from llama_ft.config.paths import check_paths
from llama_ft.config.rules import broken_rules, drop_overridden
from llama_ft.config.settings import SETTINGS, Config, Setting, settings_of, values_of
from llama_ft.errors import UserError, before_imports, exit_on_error, plural, rank

PLAIN = {
    "Input should": "must",
    "Field": "is",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def check_command_line(description: str, demo_config: Path) -> None:
    """Handle --help and errors before anything slow is imported, and rewrite sys.argv as
    `--name=value` for fire.

    Args:
        description: what the script does, for --help.
        demo_config: see `load`.

    Raises:
        SystemExit: with 0 after --help, with 2 after a user's error.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        exit_with_help(help_text(description, script=sys.argv[0]) if rank() == 0 else "")
    if "--version" in sys.argv[1:]:
        print(f"llama_ft {__version__}")
        sys.exit(0)
    with before_imports():
        load(sys.argv[1:], demo_config)
    sys.argv[1:] = [f"--{name}={text}" for name, text in as_keywords(sys.argv[1:]).items()]


def load_flags(flags: Mapping[str, str], demo_config: Path) -> tuple[Config, dict[str, str]]:
    """Return what `load` returns, from flags (name -> text) as fire passes them on after
    `check_command_line`.

    Raises:
        SystemExit: with 2 after errors, for example if a file has changed since
            `check_command_line`.
    """
    with exit_on_error():
        return load([f"--{name}={text}" for name, text in flags.items()], demo_config)


def load(
    argv: list[str], demo_config: Path | None = None, *, paths: bool = True
) -> tuple[Config, dict[str, str]]:
    """Read `--config` and the flags, and check everything. A flag overrides the config.

    Args:
        argv: the arguments after the script's name.
        demo_config: the config to use if the command line names no config, no model and no dataset.
        paths: also check files and directories: inputs must exist, and output_dir must be writable.

    Returns:
        The configuration, and the place of each setting that was set: dotted name -> `--lr` or
        `configs/x.yaml:12`.

    Raises:
        UserError: with one message per error.
    """
    flags = read_flags(argv)
    named = flags.values.pop("config", None)
    is_demo = named is None and flags.values.keys().isdisjoint({"model_name", "dataset"})
    file_name = demo_config if is_demo else named and Path(named)
    file = read_yaml(file_name) if file_name else Parsed()
    values = {**file.values, **flags.values}
    origins = {
        **file.origins,
        **{name: origin for name, origin in flags.origins.items() if name in values},
    }
    config, wrong = convert(values, origins)
    errors = [*file.errors, *flags.errors, *wrong.values()]
    if not errors:  # after an error the rules would see default values and mislead
        valid = drop_overridden(values_of(config), origins)
        config, _ = convert(valid, origins)
        errors = broken_rules(valid, origins)
    if paths:
        errors += [
            error
            for error in check_paths(values_of(config), origins, {*wrong})
            if error not in errors
        ]
    if others := errors[MOST_ERRORS:]:
        raise UserError(*errors[:MOST_ERRORS], f"and {plural(len(others), 'more error')}.")
    if errors:
        raise UserError(*errors)
    return config, {SETTINGS[name].dotted: origin for name, origin in origins.items()}


def convert(
    values: Mapping[str, Any], origins: Mapping[str, str], settings_class: Any = Config
) -> tuple[Any, dict[str, str]]:
    """Build a dataclass of settings. A value that cannot be converted keeps its default.

    Args:
        values: field name -> text, list, None or a value of the field's type.
        origins: field name -> where it was set.
        settings_class: `Config`, or a pydantic dataclass without sections.

    Returns:
        The instance, and field name -> error message for each value that is invalid by itself.
    """
    table = SETTINGS if settings_class is Config else settings_of(settings_class)
    config = settings_class()
    wrong = dict[str, str]()
    for name, value in values.items():
        if value == "":
            wrong[name] = f"{describe_setting(name, origins)}: the value is empty."
            continue
        part = getattr(config, table[name].section) if table[name].section else config
        try:
            part.__pydantic_validator__.validate_assignment(part, name, value)
        except ValidationError as refusal:
            # the last error of a union: a list of datasets, not a text
            *_, error = refusal.errors(include_url=False)
            wrong[name] = _explain(describe_setting(name, origins), table[name], value, error)
    return config, wrong


def _explain(head: str, setting: Setting, value: Any, error: Any) -> str:
    """Return what is wrong with a value, in fewer words than pydantic's."""
    inside = error["loc"][2:]
    candidates = setting.choices
    if error["type"] == "extra_forbidden":  # a key in a part of a dataset mixture
        value = inside[-1]
        candidates = tuple(DatasetPart.__annotations__)
    head += f"[{'].'.join(map(str, inside))}" if inside else f" {format_value(value)}"
    match = nearest(str(value), candidates)
    wanted = error["msg"].partition(", unable")[0].removeprefix("Value error, ")
    for theirs, ours in PLAIN.items():
        wanted = wanted.replace(f"{theirs} to", ours).replace(theirs, ours)
    wanted = f"expected one of {', '.join(candidates)}" if candidates else wanted
    return f"{head}: {wanted}." + (f" Did you mean {match}?" if match else "")
