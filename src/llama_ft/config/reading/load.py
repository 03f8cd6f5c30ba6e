"""Load a `Config` from a command line and a YAML file: check all names, values and paths first,
then the rules."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_ft import __version__
from llama_ft.config.paths import check_paths
from llama_ft.config.reading.dump import asks_for_help, exit_with_help, help_text
from llama_ft.config.reading.parse import Parsed, Repeated, as_keywords, read_flags, read_yaml
from llama_ft.config.rules import broken_rules, broken_values, drop_overridden
from llama_ft.config.settings.data_settings import DatasetPart
from llama_ft.config.settings.settings import SETTINGS, Config, Setting, settings_of, values_of
from llama_ft.config.settings.structured_values import ParameterGroup, PeftOptions
from llama_ft.config.wording.messages import (
    MOST_ERRORS,
    UNSUPPORTED_VALUES,
    describe_setting,
    format_value,
    nearest,
)
from llama_ft.config.wording.other_names import SAME_VALUES
from llama_ft.environment import Launch
from llama_ft.errors import UserError, before_imports, exit_on_error, plural, rank
from llama_ft.packaged import find_config, find_input

# Settings that may name a file in examples/, which a plain install has inside the package
PACKAGED_INPUTS = ("dataset", "validation", "score", "optimizer")
# Words of pydantic's messages, and the plain words that replace them.
PLAIN = {
    "Input should": "must",
    "Field": "is",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "String should have at least 1 character": "must not be empty",
}
# pydantic's name of a type among those of a union, which is not a key of the user's
UNION_MEMBER = re.compile(r"str|constrained-\w+|(function-\w+|list)\[.*\]|\[key\]")
# kind of a setting -> its mappings
KEYS: dict[str, Any] = {"data": DatasetPart, "groups": ParameterGroup, "options": PeftOptions}
EXAMPLES = {
    "groups": "a list such as '[{match: embed_tokens, lr: 0.1x}]'",
    "options": "a mapping such as '{exclude_modules: [o_proj]}'",
    "data or sets": "a dataset, or datasets by name such as '{chat: a.jsonl, code: b.jsonl}'",
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
    if asks_for_help(sys.argv[1:]):
        text = help_text(description, sys.argv[0], everything="all" in sys.argv[1:])
        exit_with_help(text if rank() == 0 else "")
    if "--version" in sys.argv[1:]:
        print(f"llama_ft {__version__}")
        sys.exit(0)
    with before_imports():
        Launch.from_environment(os.environ)
        load(sys.argv[1:], demo_config)
    keywords = as_keywords(sys.argv[1:])
    sys.argv[1:] = [f"--{name}={text}" for name, text in keywords.items()]


def load_flags(
    flags: Mapping[str, str],
    demo_config: Path,
) -> tuple[Config, dict[str, str]]:
    """Return what `load` returns, from flags (name -> text) as fire passes them on after
    `check_command_line`.

    Raises:
        SystemExit: with 2 after errors, for example if a file has changed since
            `check_command_line`.
    """
    argv = [f"--{name}={text}" for name, text in flags.items()]
    with exit_on_error():
        return load(argv, demo_config)


def load(
    argv: list[str],
    demo_config: Path | None = None,
    *,
    paths: bool = True,
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
    config_name = flags.values.pop("config", None)
    flags.origins.pop("config", None)  # it is not a setting
    if config_name == "":  # of an unset variable of the shell
        flags.errors.append("--config: the value is empty.")
    is_demo = config_name is None and flags.values.keys().isdisjoint({"model_name", "dataset"})
    if is_demo:
        config_file = demo_config
    else:
        config_file = find_config(config_name) if config_name else None
    file = read_yaml(config_file) if config_file else Parsed()
    values = {**file.values, **flags.values}
    for name in PACKAGED_INPUTS:
        if isinstance(values.get(name), str):
            values[name] = find_input(values[name])
    origins = {**file.origins, **flags.origins}
    config, wrong = convert(values, origins)
    errors = [*file.errors, *flags.errors, *wrong.values()]
    errors += broken_values(values_of(config), origins)
    if not errors:  # after an error the rules would see default values and mislead
        valid = drop_overridden(values_of(config), origins)
        config, _ = convert(valid, origins)
        errors = broken_rules(valid, origins)
    if paths:
        problems = check_paths(values_of(config), origins, set(wrong))
        errors += [problem for problem in problems if problem not in errors]
    left_out = len(errors) - MOST_ERRORS
    if left_out > 0:
        errors = [*errors[:MOST_ERRORS], f"and {plural(left_out, 'more error')}."]
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
        setting = table[name]
        section = getattr(config, setting.section) if setting.section else config
        try:
            # A plain assignment would not be checked: pydantic's dataclasses check at construction.
            section.__pydantic_validator__.validate_assignment(section, name, value)
        except ValidationError as rejection:
            # the last error of a union: a list of datasets, not a text
            *_, error = rejection.errors(include_url=False)
            wrong[name] = _explain(describe_setting(name, origins), setting, value, error)
    return config, wrong


def _explain(head: str, setting: Setting, value: Any, error: Any) -> str:
    """Return what is wrong with a value, in fewer words than pydantic's.

    Args:
        head: name and place of the setting.
        setting: the setting.
        value: the value that was rejected.
        error: one of `pydantic.ValidationError.errors()`.
    """
    # of a mapping in a list: its number, and the key
    inside = error["loc"][2:]
    if setting.kind in KEYS and setting.kind != "data":  # not a union
        inside = error["loc"][1:]
    candidates = setting.choices
    if error["type"] == "extra_forbidden":
        value = inside[-1]
        candidates = tuple(KEYS[setting.kind].__annotations__)
    if inside:
        shown = [key for key in inside if not UNION_MEMBER.fullmatch(str(key))]
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in shown]
        head += "".join(keys)
    else:
        head = f"{head} {format_value(value)}"
    if candidates:
        expectation = f"expected one of {', '.join(candidates)}"
    else:
        expectation = error["msg"].partition(", unable")[0].removeprefix("Value error, ")
        for theirs, ours in PLAIN.items():
            expectation = expectation.replace(f"{theirs} to", ours)
            expectation = expectation.replace(theirs, ours)
    if "[key]" in inside:
        expectation = "expected a name of letters, digits and underscores"
    if isinstance(error["input"], Repeated):
        expectation = "is given more than once"
    if setting.kind in EXAMPLES and not inside:
        expectation = f"expected {EXAMPLES[setting.kind]}"
    if setting.name in ("optimizer", "score"):
        expectation += ", or path/to/file.py:function"
    if setting.name == "tiled_mlp":
        expectation += ", or a number of tokens from 1 on"
    same = SAME_VALUES.get((setting.name, str(value).lower()))
    match = same or nearest(str(value), candidates)
    unsupported = UNSUPPORTED_VALUES.get((setting.name, str(value).lower()))
    if unsupported:
        return f"{head}: {unsupported}"
    suggestion = f" Did you mean {match}?" if match else ""
    if str(value).lower() == "auto":  # as in other trainers, for what is the default here
        suggestion = " Leave it out for its default."
    return f"{head}: {expectation}.{suggestion}"


def with_present_names(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved run, by section, with earlier names replaced. Raises TypeError
    or ValueError if they are not dicts by section."""
    renamed = {section: dict(settings) for section, settings in dict(sections).items()}
    memory = renamed.get("memory", {})
    if "no_plan" in memory:
        memory["plan_memory"] = not memory.pop("no_plan")
    preference = renamed.get("preference", {})
    if "label_smoothing" in preference:
        preference["dpo_label_smoothing"] = preference.pop("label_smoothing")
    return renamed
