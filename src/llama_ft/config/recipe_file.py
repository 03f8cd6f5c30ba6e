"""Read a YAML recipe, keeping the line of every key."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from llama_ft.config.fields import SECTIONS, SETTINGS, Setting
from llama_ft.config.names import guess, known, told_apart
from llama_ft.config.paths import file_complaint
from llama_ft.config.trainers import TRAINERS
from llama_ft.config.values import Given, from_text, parts_of
from llama_ft.config.wording import nearest, show

NULL = "tag:yaml.org,2002:null"
# llama-recipes' configuration classes, and the sections that took their place.
CLASSES = {"train_config": "train", "fsdp_config": "fsdp", "lora_config": "peft", "wandb_config": "tracking"}
# Keys at the top of a whole recipe for another program: which, and whose page is about it.
MARKS = {
    "base_model": ("axolotl", "axolotl"),
    "model_name_or_path": ("TRL, or for another that takes transformers' arguments", "TRL"),
    "distributed_type": ("accelerate", "TRL"),
}
DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
MOST_MISTAKES = 20
OURS = {"train", "data", "checkpoint"}  # of our sections those that no such recipe has
BAREWORD_MODES = {"true": "8bit", "false": "none"}


def read_recipe(path: Path) -> Given:
    """Read what a YAML recipe sets.

    Args:
        path: the file; its mistakes are told with its path relative to the working directory.

    Returns:
        Values, places such as `configs/mine.yaml:12`, and mistakes. Nothing is raised.
    """
    given = Given()
    shown = _shown(path)
    root = _parse(path, shown, given)
    given.readable = not given.mistakes
    if root is None:
        return given
    if not isinstance(root, yaml.MappingNode):
        given.readable = False
        given.mistakes.append(f"{_at(shown, root)}: a recipe is sections with settings, such as\ntrain:\n  lr: 1e-4")
        return given
    if someone_elses := _someone_elses(root, shown):
        given.readable = False
        given.mistakes.append(someone_elses)
        return given
    for key, place, node in _pairs(root, "", shown, given):
        _read_section(key, place, node, shown, given)
    return given


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _at(shown: str, node: yaml.Node) -> str:
    return f"{shown}:{node.start_mark.line + 1}"


def _parse(path: Path, shown: str, given: Given) -> yaml.Node | None:
    """Compose the file's node tree; tell why it cannot be done, if so."""
    if complaint := file_complaint(str(path)):
        given.mistakes.append(f"--config {shown}: {complaint}")
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        given.mistakes.append(f"--config {shown}: is not a text file in UTF-8; expected YAML.")
        return None
    except OSError as error:
        given.mistakes.append(f"--config {shown}: cannot be read: {error.strerror}.")
        return None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown}:{mark.line + 1}" if mark else shown
        given.mistakes.append(f"{where}: not valid YAML: {error.problem or error.context}.")
    except RecursionError:
        given.mistakes.append(f"{shown}: is nested too deeply; a recipe is sections with settings.")
    except yaml.YAMLError as error:
        given.mistakes.append(f"{shown}: not valid YAML: {error}".split("\n")[0])
    return None


def _pairs(node: yaml.MappingNode, inside: str, shown: str, given: Given) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield key, place and value node of a mapping, each key once."""
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if len(given.mistakes) >= MOST_MISTAKES:  # finding the nearest name takes a millisecond per key
            if given.readable:
                given.readable = False
                given.mistakes.append(f"{_at(shown, key_node)}: what follows was not read, after so many mistakes.")
            return
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            given.mistakes.append(f"{shown}:{line}: {inside}{key} is set twice, first in line {lines[key]}.")
            continue
        lines[key] = line
        yield key, f"{shown}:{line}", value_node


def _someone_elses(root: yaml.MappingNode, shown: str) -> str | None:
    """Tell a whole recipe for another trainer by its keys, so that it is one mistake and not one a line."""
    below = [key for _, value in root.value if isinstance(value, yaml.MappingNode) for key, _ in value.value]
    found = [(key, "torchtune", "torchtune") for key in below if key.value == "_component_"]
    keys = {str(key.value): key for key, _ in root.value}
    if not OURS & keys.keys():
        found += [(keys[mark], *owner) for mark, owner in MARKS.items() if mark in keys]
        if marks := [keys[mark] for mark in DEEPSPEED if mark in keys]:
            return (
                f"{_at(shown, marks[0])}: {marks[0].value} tells that this is a configuration for DeepSpeed.\n"
                "Leave it out and use --enable_fsdp: FSDP2 shards parameters, gradients and optimizer, as ZeRO 3 does."
            )
    if not found:
        return None
    key, program, trainer = found[0]
    page = next(other.page for other in TRAINERS if other.name == trainer)
    return (
        f"{_at(shown, key)}: {key.value} tells that this is a recipe for {program}.\n"
        f"{page} has its keys with what they are here, and a command to begin with."
    )


def _read_section(section: str, place: str, node: yaml.Node, shown: str, given: Given) -> None:
    if section == "quantization" and isinstance(node, yaml.ScalarNode) and node.tag != NULL:
        _set(SETTINGS["mode"], BAREWORD_MODES.get(node.value.lower(), node.value), place, given)
    elif section not in SECTIONS:
        _doubt(section, given)
        below = node.value if isinstance(node, yaml.MappingNode) else []
        given.doubtful.update(SETTINGS.keys() & {str(key.value) for key, _ in below})
        given.mistakes.append(_not_a_section(section, place, node))
    elif isinstance(node, yaml.MappingNode):
        for key, key_place, value_node in _pairs(node, f"{section}.", shown, given):
            setting = SETTINGS.get(key)
            if setting is None or setting.section != section:
                _doubt(key, given)
                given.mistakes.append(_not_a_setting(section, key, key_place, value_node))
            else:
                _set(setting, _value(setting, value_node), key_place, given)
    elif node.tag != NULL:  # a section whose settings are all commented out is empty, and fine
        example = next(setting.name for setting in SETTINGS.values() if setting.section == section)
        given.mistakes.append(f"{place}: {section} is a section; its settings stand indented below, as {example}: ...")


def _doubt(name: str, given: Given) -> None:
    meant = guess(name)
    if meant:
        given.doubtful.add(meant.setting.name)


def _set(setting: Setting, value: Any, place: str, given: Given) -> None:
    given.values[setting.name] = value
    given.places[setting.name] = place


def _value(setting: Setting, node: yaml.Node) -> Any:
    """Return the text of a scalar, the texts of a list, None for null, and {} for what no setting takes."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == NULL:
            return None
        quoted = node.style in ("'", '"') and setting.kind == "text"
        return node.value if quoted else from_text(setting, node.value)
    if setting.kind == "data":
        return parts_of(node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return {}


def _typed(node: yaml.Node) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _not_a_section(name: str, place: str, node: yaml.Node) -> str:
    setting = known(name)
    if setting is not None:
        return f"{place}: {name} stands outside its section; write it as {setting.name} below {setting.section}:"
    said = None if name in CLASSES else told_apart(name, _typed(node), as_key=True)
    if said:
        return f"{place}: {name}{said}"
    match = CLASSES.get(name) or nearest(name, SECTIONS)
    if match and isinstance(node, yaml.MappingNode):
        return f"{place}: {name} is not a section. Did you mean {match}?"
    meant = guess(name)
    hint = f"Did you mean {meant.as_key}?" if meant else f"The sections are {show([*SECTIONS])[1:-1]}."
    return f"{place}: {name} is not a section. {hint}"


def _not_a_setting(section: str, name: str, place: str, node: yaml.Node) -> str:
    said = told_apart(name, _typed(node), as_key=True)
    if said:
        return f"{place}: {section}.{name}{said}"
    meant = guess(name)
    if meant:
        return f"{place}: {section}.{name} is not a setting. Did you mean {meant.as_key}?"
    names = ", ".join(setting.name for setting in SETTINGS.values() if setting.section == section)
    return f"{place}: {section}.{name} is not a setting. {section} has {names}."
