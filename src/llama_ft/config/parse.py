"""Read a command line and a YAML config into texts by field name, with the place of each; nothing is raised here.

Both bring text, and both are read by the same few lines. Reading YAML scalars as text spares YAML 1.1's surprises:
`1e-4` would be a string, `off` a boolean and `2025-01-31` a date.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llama_ft.config.aliases import explain_unknown, is_foreign, known, meant_by
from llama_ft.config.messages import expected, nearest, show
from llama_ft.config.paths import file_problem
from llama_ft.config.settings import SECTIONS, SETTINGS, Setting

TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")
FALSE_WORDS = ("false", "f", "no", "n", "off", "0")
PLAIN_NAME = re.compile(r"[\w.\-]+")
NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
DASHES = ("-", "\u2013", "\u2014")  # word processors and web pages make the others of --
NULL = "tag:yaml.org,2002:null"
# llama-recipes' configuration classes, and the sections that took their place.
CLASSES = {"train_config": "train", "fsdp_config": "fsdp", "lora_config": "peft", "wandb_config": "tracking"}
MOST_ERRORS = 20  # of one file

Find = Callable[[str], Setting | None]


@dataclass
class Parsed:
    """What one source sets.

    Attributes:
        values: field name -> value: text, a list of texts, None, or what no setting takes (a mapping).
        places: field name -> where it was set, `configs/mine.yaml:12` or `--lr`.
        errors: messages about what could not be read.
        doubtful: fields that the errors are probably about: their value is not known.
        readable: False if the source as a whole could not be read.
        is_foreign: a name in it is probably another trainer's.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    readable: bool = True
    is_foreign: bool = False


def from_text(setting: Setting, text: str) -> Any:
    """Read what cannot be left to pydantic: none, lists, and ~ for the home directory. The rest stays text."""
    text = text.strip()
    if setting.optional and text.lower() in ("none", "null"):
        return None
    if setting.kind == "names":
        return _items(text)
    if setting.kind == "names or pattern":
        # peft takes a string for a pattern over whole module paths, which the bare name q_proj would never match:
        # plain names become a list, patterns and the keyword all-linear stay as they are.
        items = _items(text)
        return items if text != "all-linear" and all(PLAIN_NAME.fullmatch(item) for item in items) else text
    if setting.kind == "data" and text.startswith("["):
        try:
            parts = _parts(yaml.compose(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError:
            parts = None
        return text if parts in (None, {}) else parts  # [1]*.jsonl is a name
    return os.path.expanduser(text) if setting.kind in ("text", "data") else text


def _items(text: str) -> list[str]:
    """Split `a,b` or `[a, b]` or `['a', 'b']`."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item for item in (item.strip().strip("'\"") for item in inside.split(",")) if item]


def _parts(node: yaml.Node | None) -> Any:
    """Return a dataset mixture as dicts of text, a plain name as a part with a path; {} for what is no such list."""
    if not isinstance(node, yaml.SequenceNode):
        return {}
    parts = []
    for item in node.value:
        pairs = item.value if isinstance(item, yaml.MappingNode) else [(yaml.ScalarNode("", "path"), item)]
        part = {str(key.value): value.value if isinstance(value, yaml.ScalarNode) else {} for key, value in pairs}
        if isinstance(path := part.get("path"), str):
            part["path"] = os.path.expanduser(path)
        parts.append(part)
    return parts or ""


@dataclass(frozen=True)
class Word:
    """A flag as typed, with its value if it has one; or a word that stands alone (flag empty)."""

    flag: str
    value: str | None
    before: str = ""

    @property
    def name(self) -> str:
        return self.flag.lstrip("".join(DASHES)).replace("-", "_")

    @property
    def as_typed(self) -> list[str]:
        return (
            [self.value or ""] if not self.flag else [self.flag if self.value is None else f"{self.flag}={self.value}"]
        )


def words_of(argv: list[str]) -> Iterator[Word]:
    """Pair every flag with its value: what follows `=`, or the next word unless that is a flag, too."""
    before, rest = "", list(argv)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            yield Word("", word, before)
            continue
        flag, equals, text = word.partition("=")
        value = text if equals else rest.pop(0) if rest and not _is_flag(rest[0]) else None
        before = flag if value is None else f"{flag} {value}"
        yield Word(flag, value, before)


def _is_flag(word: str) -> bool:
    return word.startswith(DASHES) and not NEGATIVE_NUMBER.match(word) and word != "-"


def read_flags(
    argv: list[str],
    find: Find = known,
    explain: Callable[[str, str | None], str] = explain_unknown,
    positional: str | None = None,
    repeated: frozenset[str] = frozenset(),
) -> Parsed:
    """Read what a command line sets.

    Args:
        argv: the words after the script's name, without --help.
        find: the setting of a flag's name, or None.
        explain: what to say of an unknown name and its value.
        positional: the field that takes words without a flag, as a list; None: they are errors.
        repeated: fields that may be given again; their values become a list.
    """
    parsed = Parsed()
    for word in words_of(argv):
        if not word.flag and positional:
            parsed.values.setdefault(positional, []).append(word.value)
            continue
        setting, text, error = _read(word, find, explain)
        if setting is None:
            parsed.is_foreign |= bool(word.flag) and is_foreign(word.name)
            if meant := meant_by(word.name) if word.flag else None:
                parsed.doubtful.add(meant.setting.name)
        elif error:
            parsed.doubtful.add(setting.name)
        elif setting.name in repeated:
            parsed.values.setdefault(setting.name, []).append(text)
            parsed.places[setting.name] = word.flag
        elif setting.name in parsed.places:
            first = parsed.places[setting.name]
            error = f"{word.flag}: given twice{'' if first == word.flag else f', as {first} and {word.flag}'}."
        else:
            parsed.places[setting.name] = word.flag
            parsed.values[setting.name] = from_text(setting, text)
        if error:
            parsed.errors.append(error)
    return parsed


def _read(word: Word, find: Find, explain: Callable[[str, str | None], str]) -> tuple[Setting | None, str, str | None]:
    """Return a flag's setting, its value as text, and what is wrong with it."""
    if not word.flag:
        return None, "", _alone(word, find)
    setting, is_negated = find(word.name), False
    if not word.flag.startswith("--"):
        return (
            None,
            "",
            f"{word.flag}: flags begin with two plain dashes." + (f" Did you mean --{word.name}?" if setting else ""),
        )
    if setting is None and word.name.startswith("no"):
        setting = find(word.name.removeprefix("no").removeprefix("_"))
        is_negated = setting is not None
    if setting is None:
        return None, "", word.flag + explain(word.name, word.value)
    shorthand = setting.dotted == "quantization.mode"  # bare --quantization means 8bit, as in llama-recipes
    off, on = ("none", "8bit") if shorthand else ("false", "true")
    is_switch = setting.kind == "switch" or shorthand
    if is_negated and not is_switch:
        return setting, "", f"{word.flag}: {setting.name} is not a switch; --no_ goes with switches only."
    if is_negated and word.value is not None:
        return setting, "", f"{word.flag} {word.value}: {word.flag} takes no value. Or write --{setting.name} false."
    if is_negated or word.value is None:
        error = None if is_switch else f"{word.flag} needs a value: {expected(setting)}."
        return setting, off if is_negated else on, error
    if not word.value.strip():
        return setting, "", f"{word.flag}: the value is empty."
    if shorthand and word.value.lower() in (*TRUE_WORDS, *FALSE_WORDS):
        return setting, on if word.value.lower() in TRUE_WORDS else off, None
    return setting, word.value, None


def as_keywords(argv: list[str]) -> dict[str, str]:
    """Return flag -> text of a command line without errors: `--no_save_model --lr 1` gives `save_model` false."""
    keywords = {}
    for word in words_of(argv):
        setting, text, _ = _read(word, known, explain_unknown)
        name = word.name if setting is None or known(word.name) else setting.name
        keywords[name] = text if setting else word.value or ""  # --config is no setting
    return keywords


def _alone(word: Word, find: Find) -> str:
    """Say what a word without a flag may have meant."""
    text = word.value or ""
    name, equals, _ = text.partition("=")
    if equals and find(name.replace("-", "_")):
        return f'"{text}" is not a flag. Did you mean --{text}?'
    if text.endswith((".yaml", ".yml")):
        return f'"{text}" stands alone. Did you mean --config {text}?'
    if word.before:
        return f'"{text}" after {word.before} stands alone: a flag takes one value, and lists are written a,b,c.'
    return f'"{text}" stands alone: a value follows its flag, as in --lr 1e-4.'


def read_yaml(path: Path) -> Parsed:
    """Read what a YAML config sets; errors name its path relative to the working directory."""
    parsed = Parsed()
    relative = os.path.relpath(path)
    shown = str(path) if relative.startswith("..") else relative
    root = _compose(path, shown, parsed)
    if root is not None and not isinstance(root, yaml.MappingNode):
        parsed.errors.append(f"{_at(shown, root)}: a config is sections with settings, such as\ntrain:\n  lr: 1e-4")
    parsed.readable = not parsed.errors
    if isinstance(root, yaml.MappingNode):
        for section, place, node in _pairs(root, "", shown, parsed):
            _read_section(section, place, node, shown, parsed)
    return parsed


def _at(shown: str, node: yaml.Node) -> str:
    return f"{shown}:{node.start_mark.line + 1}"


def _compose(path: Path, shown: str, parsed: Parsed) -> yaml.Node | None:
    """Compose the file's node tree, or add why this cannot be done."""
    if wrong := file_problem(str(path)):
        parsed.errors.append(f"--config {shown}: {wrong}")
        return None
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        parsed.errors.append(f"--config {shown}: is not a text file in UTF-8; expected YAML.")
    except OSError as error:
        parsed.errors.append(f"--config {shown}: cannot be read: {error.strerror}.")
    except RecursionError:
        parsed.errors.append(f"{shown}: is nested too deeply; a config is sections with settings.")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).split("\n")[0]
        parsed.errors.append(f"{shown}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {reason}.")
    return None


def _pairs(node: yaml.MappingNode, inside: str, shown: str, parsed: Parsed) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield key, place and value node of a mapping, each key once."""
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        if len(parsed.errors) >= MOST_ERRORS:  # finding the nearest name takes a millisecond per key
            if parsed.readable:
                parsed.readable = False
                parsed.errors.append(f"{_at(shown, key_node)}: what follows was not read, after so many errors.")
            return
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            parsed.errors.append(f"{shown}:{line}: {inside}{key} is set twice, first in line {lines[key]}.")
            continue
        lines[key] = line
        yield key, f"{shown}:{line}", value_node


def _read_section(section: str, place: str, node: yaml.Node, shown: str, parsed: Parsed) -> None:
    if section == "quantization" and isinstance(node, yaml.ScalarNode) and node.tag != NULL:
        words = {"true": "8bit", "false": "none"}
        parsed.values["mode"], parsed.places["mode"] = words.get(node.value.lower(), node.value), place
    elif section not in SECTIONS:
        below = [str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        parsed.doubtful.update(SETTINGS.keys() & {*below})
        _unknown_key(section, "", place, node, parsed)
    elif isinstance(node, yaml.MappingNode):
        for key, key_place, value_node in _pairs(node, f"{section}.", shown, parsed):
            setting = SETTINGS.get(key)
            if setting is None or setting.section != section:
                _unknown_key(key, section, key_place, value_node, parsed)
            else:
                parsed.values[key], parsed.places[key] = _value(setting, value_node), key_place
    elif node.tag != NULL:  # a section whose settings are all commented out is empty, and fine
        example = next(name for name, setting in SETTINGS.items() if setting.section == section)
        parsed.errors.append(f"{place}: {section} is a section; its settings stand indented below, as {example}: ...")


def _value(setting: Setting, node: yaml.Node) -> Any:
    """Return the text of a scalar, the texts of a list, None for null, and {} for what no setting takes."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == NULL:
            return None
        is_quoted = node.style in ("'", '"') and setting.kind == "text"
        return node.value if is_quoted else from_text(setting, node.value)
    if setting.kind == "data":
        return _parts(node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return {}


def _unknown_key(name: str, section: str, place: str, node: yaml.Node, parsed: Parsed) -> None:
    """Add the message about a key that is neither a section nor a setting of its section."""
    meant, setting = meant_by(name), known(name)
    if meant:
        parsed.doubtful.add(meant.setting.name)
    parsed.is_foreign |= is_foreign(name)
    match = None if section else CLASSES.get(name) or nearest(name, SECTIONS)
    if not section and setting is not None:
        error = f" stands outside its section; write it as {setting.name} below {setting.section}:"
    elif match and isinstance(node, yaml.MappingNode):
        error = f" is not a section. Did you mean {match}?"
    else:
        others = [key for key, other in SETTINGS.items() if other.section == section] if section else [*SECTIONS]
        typed = node.value if isinstance(node, yaml.ScalarNode) else None
        list_them = f"{section} has {', '.join(others)}." if section else f"The sections are {show(others)[1:-1]}."
        error = explain_unknown(name, typed, as_key=True, otherwise=list_them)
    parsed.errors.append(f"{place}: {section}{'.' if section else ''}{name}{error}")


def by_field(places: Mapping[str, str]) -> dict[str, str]:
    """Turn dotted name -> place into field name -> place."""
    return {name: places[setting.dotted] for name, setting in SETTINGS.items() if setting.dotted in places}
