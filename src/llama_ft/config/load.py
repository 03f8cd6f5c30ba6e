"""From a command line and a YAML config to one checked `Config`; every error is reported at once."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_ft.config.aliases import TRANSLATIONS
from llama_ft.config.dump import help_text
from llama_ft.config.messages import brief, expected, is_flag, nearest, one_of, show, subject
from llama_ft.config.parse import Parsed, as_keywords, read_flags, read_yaml, words_of
from llama_ft.config.paths import check_paths
from llama_ft.config.rules import broken_rules, drop_overridden
from llama_ft.config.settings import SETTINGS, Config, Setting, settings_of, values_of
from llama_ft.errors import UserError, before_imports, exit_on_error, rank

LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


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
    """Return the settings that `check_command_line` has found to be right, out of flags as fire passes them on.

    Args:
        flags: name -> text.
        demo_config: see `load`.

    Returns:
        As `load`.

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
    file_name = Path(named).expanduser() if named else demo_config
    if named is None and not {"model_name", "dataset"}.isdisjoint({*flags.places, *flags.doubtful}):
        file_name = None
    file = read_yaml(file_name) if file_name else Parsed()
    errors = [*file.errors, *flags.errors]
    if errors and (file.is_foreign or flags.is_foreign):
        errors[-1] += f"\n{TRANSLATIONS}"
    values, places = {**file.values, **flags.values}, {**file.places, **flags.places}
    config, wrong = convert(values, places)
    valid = drop_overridden(values_of(config), places)
    config, _ = convert(valid, places)
    errors += wrong.values()
    unknown = {*wrong, *file.doubtful, *flags.doubtful}
    if file.readable and "config" not in unknown:
        errors += broken_rules(valid, places, unknown)
    if paths:
        errors += [error for error in check_paths(valid, places, unknown) if error not in errors]
    if errors:
        raise UserError(*errors)
    return config, {SETTINGS[name].dotted: place for name, place in places.items()}


def config_file(argv: list[str]) -> tuple[str | None, Parsed]:
    """Return the value of --config, and what the other flags set."""
    named = [word.value for word in words_of(argv) if word.flag == "--config"]
    others = [text for word in words_of(argv) if word.flag != "--config" for text in word.as_typed]
    parsed = read_flags(others)
    if len(named) > 1:
        parsed.errors.append("--config: given twice.")
    if named and not named[0]:
        parsed.errors.append("--config needs a file, as configs/mine.yaml.")
        parsed.doubtful.add("config")
    return (named[0] if named else None), parsed


def load_recipe(path: Path, *, paths: bool = True) -> tuple[Config, dict[str, str]]:
    """Read one YAML config, without a command line. Args, returns and raises as `load`."""
    return load([f"--config={path}"], paths=paths)


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
    wrong = {
        name: _invalid(table[name], values[name], "empty", {}, places)
        for name in values
        if values[name] == "" or (values[name] is None and not table[name].optional)
    }
    while True:
        nested: dict[str, Any] = {}
        for name, value in values.items():
            if name not in wrong:
                section = table[name].section
                (nested.setdefault(section, {}) if section else nested)[name] = value
        try:
            return settings_class(**nested), wrong
        except ValidationError as refusal:
            for error in refusal.errors(include_url=False, include_input=False):
                *_, name = [part for part in error["loc"][:2] if part in table]
                setting, where = table[str(name)], error["loc"][3:]
                if setting.kind != "data" or not isinstance(values[setting.name], list):
                    message = _invalid(setting, values[name], error["type"], error.get("ctx", {}), places)
                    wrong.setdefault(setting.name, message)
                elif where:  # in a part of a dataset mixture
                    head = f"{subject(setting.name, places)}[{'].'.join(map(str, where))}"
                    wrong.setdefault(setting.name, _invalid_part(head, values[name], where, error["type"]))


def _invalid_part(head: str, parts: list[Any], where: tuple[int | str, ...], kind: str) -> str:
    """Word an error of one part of a dataset mixture; where is its index and the key."""
    if kind in ("extra_forbidden", "missing"):
        return f"{head} is {'not known' if kind != 'missing' else 'missing'}; a part has path, weight and split."
    value = parts[int(where[0])][where[1]]
    wanted = "a number greater than 0 and at most 1000" if where[1] == "weight" else "text"
    return f"{head} is {show(value) or 'empty'}; expected {wanted}."


def _invalid(setting: Setting, value: Any, kind: str, context: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Word one of pydantic's errors as ours.

    On the command line the value stands behind its flag (`--lr 0: must be ...`); elsewhere the sentence has it.
    """
    typed = is_flag(places.get(setting.name, ""))
    head = subject(setting.name, places)
    shown = brief(show(value))
    if kind == "empty":
        return f"{head} has no value; expected {expected(setting)}."
    if kind == "literal_error":
        match = nearest(shown, setting.choices)
        hint = f" Did you mean {match}?" if match else ""
        if shown.lower() in ("none", "null"):  # what others write for unset
            hint = f" Leave it out for {show(setting.default)}."
        wanted = f"expected {one_of(setting.choices)}.{hint}"
        return f"{head} {shown}: {wanted}" if typed else f'{head} is "{shown}"; {wanted}'
    if kind in LIMITS:
        key, words = LIMITS[kind]
        wanted = f"must be {words} {context[key]:g}."
        return f"{head} {shown}: {wanted}" if typed else f"{head} is {shown}; it {wanted}"
    quoted = shown if isinstance(value, dict | list) else f'"{shown}"'
    if typed:
        return f"{head} {shown}: {quoted} is not {expected(setting)}."
    return f"{head} is {quoted}; expected {expected(setting)}."
