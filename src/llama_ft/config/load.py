"""From what the recipe file and the command line set to a checked `Config`, with all mistakes told at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_ft.config.effect import drop_overridden
from llama_ft.config.fields import SETTINGS, Setting, values_of
from llama_ft.config.flags import read_flags
from llama_ft.config.paths import check_paths
from llama_ft.config.recipe_file import read_recipe
from llama_ft.config.rules import broken_rules
from llama_ft.config.sections import Config
from llama_ft.config.trainers import OPTIMIZERS
from llama_ft.config.values import Given
from llama_ft.config.wording import expected, is_flag, nearest, one_of, show, subject
from llama_ft.errors import UserError


def load(argv: list[str], demo_recipe: Path | None = None, *, paths: bool = True) -> tuple[Config, dict[str, str]]:
    """Read `--config` and the flags, the flags winning, and check everything.

    Args:
        argv: the words after the script's name.
        demo_recipe: the recipe to take when the command line names neither a recipe nor a model nor a dataset.
        paths: also check files and folders: that inputs exist, that output_dir may be written.

    Returns:
        The configuration, and where each setting that was set was set: dotted name -> `--lr` or `configs/x.yaml:12`.

    Raises:
        UserError: with one message for every mistake.
    """
    flags, named_recipe = read_flags(argv)
    recipe = Path(named_recipe).expanduser() if named_recipe else demo_recipe
    if named_recipe is None and not {"model_name", "dataset"}.isdisjoint({*flags.places, *flags.doubtful}):
        recipe = None
    file = read_recipe(recipe) if recipe else Given()
    mistakes = [*file.mistakes, *flags.mistakes]

    values = {**file.values, **flags.values}
    places = {**file.places, **flags.places}
    config, wrong = convert(values, places)
    valid = drop_overridden(values_of(config), places)
    config, _ = convert(valid, places)
    mistakes += wrong.values()
    unknown = {*wrong, *file.doubtful, *flags.doubtful}
    if file.readable and "config" not in unknown:
        mistakes += broken_rules(valid, places, unknown)
    if paths:
        mistakes += [mistake for mistake in check_paths(valid, places, unknown) if mistake not in mistakes]
    if mistakes:
        raise UserError(*mistakes)
    return config, {SETTINGS[name].dotted: place for name, place in places.items()}


def load_recipe(path: Path, *, paths: bool = True) -> tuple[Config, dict[str, str]]:
    """Read one YAML recipe, without a command line. Args, returns and raises as `load`."""
    return load([f"--config={path}"], paths=paths)


def convert(values: Mapping[str, Any], places: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """Build a `Config`; what cannot be converted keeps its default.

    Args:
        values: field name -> text, list, None or a value of the field's type.
        places: field name -> where it was set.

    Returns:
        The configuration, and field name -> message for each value that is not valid in itself.
    """
    wrong = {
        name: _complaint(SETTINGS[name], values[name], "empty", {}, places)
        for name in values
        if values[name] == "" or (values[name] is None and not SETTINGS[name].optional)
    }
    while True:
        nested: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in wrong:
                nested.setdefault(SETTINGS[name].section, {})[name] = value
        try:
            return Config(**nested), wrong  # type: ignore[arg-type]  # pydantic makes the sections from dicts
        except ValidationError as refusal:
            for error in refusal.errors(include_url=False, include_input=False):
                name, where = str(error["loc"][1]), error["loc"][3:]
                context = error.get("ctx", {})
                if SETTINGS[name].kind != "data" or not isinstance(values[name], list):
                    wrong.setdefault(name, _complaint(SETTINGS[name], values[name], error["type"], context, places))
                elif where:  # in a part of a mix
                    head = f"{subject(name, places)}[{'].'.join(map(str, where))}"
                    wrong.setdefault(name, _part_complaint(head, values[name], where, error["type"]))


def _part_complaint(head: str, parts: list[Any], where: tuple[int | str, ...], kind: str) -> str:
    """Word a refusal about one part of a mix; where is its index and the key."""
    if kind in ("extra_forbidden", "missing"):
        return f"{head} is {'not known' if kind != 'missing' else 'missing'}; a part has path, weight and split."
    value = parts[int(where[0])][where[1]]
    wanted = "a number greater than 0 and at most 1000" if where[1] == "weight" else "text"
    return f"{head} is {show(value) or 'empty'}; expected {wanted}."


def _complaint(setting: Setting, value: Any, kind: str, context: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Word one refusal of pydantic's as ours.

    On the command line the value stands behind its flag (`--lr 0: must be ...`); elsewhere the sentence tells it.
    """
    typed = is_flag(places.get(setting.name, ""))
    head = subject(setting.name, places)
    shown = show(value)
    if kind == "empty":
        return f"{head} has no value; expected {expected(setting)}."
    if kind == "literal_error":
        match = OPTIMIZERS.get(shown) or nearest(shown, setting.choices)
        hint = f" Did you mean {match}?" if match else ""
        if shown.lower() in ("none", "null"):  # what others write for unset
            hint = f" Leave it out for {show(setting.default)}."
        wanted = f"expected {one_of(setting.choices)}.{hint}"
        return f"{head} {shown}: {wanted}" if typed else f'{head} is "{shown}"; {wanted}'
    limits = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "greater than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind in limits:
        key, words = limits[kind]
        wanted = f"must be {words} {context[key]:g}."
        return f"{head} {shown}: {wanted}" if typed else f"{head} is {shown}; it {wanted}"
    quoted = shown if isinstance(value, dict | list) else f'"{shown}"'
    if typed:
        return f"{head} {shown}: {quoted} is not {expected(setting)}."
    return f"{head} is {quoted}; expected {expected(setting)}."
