"""Read a command line and a YAML config: field name -> text, and the place of each. Errors are
collected, not raised.

Both sources are read as text, by the same code. YAML scalars are read as text, too, because YAML
1.1 would make `1e-4` a string, `off` a boolean and `2025-01-31` a date.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llama_ft.config.data_names import listed_names
from llama_ft.config.paths import file_problem
from llama_ft.config.settings.settings import SECTIONS, SETTINGS, Setting
from llama_ft.config.wording.messages import (
    EARLIER_NAMES,
    MOST_ERRORS,
    MOST_SHOWN,
    explain_section,
    explain_unknown,
    is_other_name,
    known,
)
from llama_ft.errors import rank, reason
from llama_ft.packaged import find_config, is_file, nearest_configs

# The spellings that pydantic takes for a switch, and the opposite of each.
OPPOSITES = dict.fromkeys(("true", "t", "yes", "y", "on", "1"), "false")
OPPOSITES |= dict.fromkeys(("false", "f", "no", "n", "off", "0"), "true")
MODES = {"true": "8bit", "false": "none"}  # bare --quantization means 8bit, as in llama-recipes
PLAIN_NAME = re.compile(r"[\w.\-]+")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
LARGEST_CONFIG = 2**18  # bytes; PyYAML reads about 100,000 per second
LIST_KINDS = ("data", "names", "names or pattern")  # settings that take a,b,c
MOST_NODES = 100_000  # of a YAML text, with aliases written out
NULL = "tag:yaml.org,2002:null"

Find = Callable[[str], Setting | None]


@dataclass
class Parsed:
    """The settings of one source.

    Attributes:
        values: field name -> value: a text, a list of texts, None, or a mapping, which no setting
            accepts.
        origins: field name -> where it was set, `configs/mine.yaml:12` or `--lr`.
        errors: messages about what could not be read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add_unknown(
        self,
        shown: str,
        name: str,
        explain: Callable[[str], str],
    ) -> None:
        """Add the message about an unknown name. Finding a similar name takes milliseconds, so
        after many errors the message has no explanation."""
        has_room = len(self.errors) < MOST_ERRORS
        explanation = explain(name) if has_room else ""
        self.errors.append(shown[:MOST_SHOWN] + explanation)


def from_text(setting: Setting, text: str) -> Any:
    """Parse none, lists, and ~ for the home directory, which pydantic cannot do. Everything else
    stays text."""
    text = text.strip()
    has_names = setting.kind in ("names", "names or pattern")
    if setting.name == "mode":
        return MODES.get(text.lower(), text)
    if setting.optional and text.lower() in ("none", "null"):
        return None
    is_list = text.startswith("[") and text.endswith("]")
    is_nested = setting.kind in ("groups", "options")
    is_mapping = text.startswith("{") and text.endswith("}")
    node = None
    with suppress(yaml.YAMLError, RecursionError):  # [*.jsonl] is a pattern of names
        if is_list or is_mapping or is_nested:
            node = compose(text)
    if is_nested and node is not None:
        return _texts(node)
    if setting.kind == "data or sets" and isinstance(node, yaml.MappingNode):
        return _sets(node)
    if has_names and text:
        inside = text[1:-1] if is_list else text
        stripped = [item.strip().strip("'\"") for item in inside.split(",")]
        items = [item for item in stripped if item]
        if node is not None:  # YAML handles commas inside quotes
            items = _value(setting, node) or items
        # PEFT takes a string as a pattern for whole module paths, which the bare name q_proj would
        # never match. So plain names become a list; patterns and the keyword all-linear stay
        # strings.
        is_pattern = text == "all-linear" or not all(PLAIN_NAME.fullmatch(item) for item in items)
        return text if setting.kind == "names or pattern" and is_pattern else items
    if setting.kind == "data" and node is not None:
        return _parts(node)
    if setting.kind == "data" and (names := listed_names(text)):
        return [{"path": os.path.expanduser(name)} for name in names]
    is_path = setting.kind in ("text", "data", "data or sets")
    return os.path.expanduser(text) if is_path else text


def compose(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text; None if it is empty. Raises YAMLError if it is not YAML, or if
    aliases (*name) make it endless or huge."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _count_nodes(root, {})
    return root


def _count_nodes(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many nodes a node has if its aliases are written out. `sizes` has the nodes that
    were counted; 0: being counted."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = 0
        size = 1
        for part in node.value:
            for inside in part if isinstance(part, tuple) else (part,):
                size += _count_nodes(inside, sizes)
        sizes[id(node)] = size
    size = sizes[id(node)]
    problem = None
    if size == 0:
        problem = "an alias (*name) is inside of its own anchor (&name)"
    elif size > MOST_NODES:
        problem = f"aliases (*name) make it larger than {MOST_NODES:,} values"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size


def _parts(node: yaml.Node | None) -> Any:
    """Return the parts of a dataset mixture as dicts of texts (a plain name: its path); {} if it is
    not such a list."""
    if not isinstance(node, yaml.SequenceNode):
        return {}
    parts = []
    for item in node.value:
        part = dict[str, Any]()
        if isinstance(item, yaml.MappingNode):
            for key, value in item.value:
                part[str(key.value)] = _scalar_text(value)
        else:
            part["path"] = _scalar_text(item)
        path = part.get("path")
        if isinstance(path, str):
            part["path"] = os.path.expanduser(path)
        parts.append(part)
    return parts or ""


class Repeated(list[Any]):
    """The values of a key that a mapping has more than once. No setting accepts them."""


def _sets(node: yaml.MappingNode) -> dict[str, Any]:
    """Return the datasets of a mapping, by name."""
    sets = dict[str, Any]()
    for name, path in _texts(node).items():
        sets[name] = path if isinstance(path, Repeated) else os.path.expanduser(str(path))
    return sets


def _texts(node: yaml.Node) -> Any:
    """Return lists and mappings whose scalars are texts. pydantic converts them."""
    if isinstance(node, yaml.SequenceNode):
        return [_texts(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        values = dict[str, list[Any]]()
        for key, value in node.value:
            values.setdefault(str(key.value), []).append(_texts(value))
        return {key: Repeated(texts) if texts[1:] else texts[0] for key, texts in values.items()}
    return node.value


def _scalar_text(node: yaml.Node) -> Any:
    """Return the text of a scalar, and {} for anything else, which no setting accepts."""
    return node.value if isinstance(node, yaml.ScalarNode) else {}


@dataclass(frozen=True)
class Word:
    """A flag as typed, with its value if it has one; or a positional argument (flag is empty)."""

    flag: str
    value: str | None

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def as_typed(self) -> list[str]:
        if not self.flag:
            return [self.value or ""]
        return [self.flag if self.value is None else f"{self.flag}={self.value}"]


def words_of(argv: list[str]) -> Iterator[Word]:
    """Pair every flag with its value: the text after `=`, or the next argument unless that is a
    flag."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            yield Word("", word)
            continue
        flag, equals, text = word.partition("=")
        if equals:
            yield Word(flag, text)
        elif rest and not _is_flag(rest[0]):
            yield Word(flag, rest.pop(0))
        else:
            yield Word(flag, None)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not NEGATIVE_NUMBER.match(word) and word != "-"


def read_flags(
    argv: list[str],
    find: Find = known,
    explain: Callable[[str], str] = explain_unknown,
    positional: str | None = None,
) -> Parsed:
    """Read the settings of a command line.

    Args:
        argv: the arguments after the script's name, without --help.
        find: returns the setting of a flag's name, or None.
        explain: returns the text for an unknown name.
        positional: the field for positional arguments, as a list; None: they are errors.
    """
    parsed = Parsed()
    listed = ""  # the last flag with its value, if that may be a list
    list_error = ""
    for word in words_of(argv):
        setting, text, error = _read(word, find)
        if not word.flag and positional:
            parsed.values.setdefault(positional, []).append(word.value)
        elif not word.flag:
            taken = "A flag takes one value; write lists as a,b,c, and a config as --config FILE."
            if listed:
                listed += f",{word.value}"
                taken = f"Write a list as {listed}."
                if list_error:  # of the word before
                    parsed.errors.remove(list_error)
            elif meant := _meant_by(str(word.value)):
                taken = f"Did you mean {meant}?"
            list_error = f'"{word.value}" is an unexpected argument. {taken}'
            parsed.errors.append(list_error)
        elif setting is None:
            parsed.add_unknown(word.flag, word.name, explain)
        elif error:
            parsed.errors.append(f"{word.flag}{error}")
        else:
            if setting.name in parsed.origins and rank() == 0:
                print(
                    f"warning: {word.flag} is given twice; the last value is used.", file=sys.stderr
                )
            parsed.origins[setting.name] = word.flag
            parsed.values[setting.name] = from_text(setting, text)
            listed = f"{word.flag} {text}" if setting.kind in LIST_KINDS else ""
            list_error = ""
    return parsed


def _meant_by(argument: str) -> str:
    """Return the flag for which an argument without one is a value; "" if it is not known."""
    if argument == "help":
        return "--help"
    if argument.endswith(DATA_SUFFIXES) and is_file(argument):
        return f"--dataset {argument}"
    if is_file(str(find_config(argument))):
        return f"--config {argument}"
    if HUB_NAME.fullmatch(argument):
        return f"--model_name {argument}"
    return ""


def _read(word: Word, find: Find) -> tuple[Setting | None, str, str]:
    """Return a flag's setting, its value as text, and an error message to append to the flag's
    name, or ""."""
    setting = find(word.name) if word.flag.startswith("--") else None
    is_negated = False
    if setting is None and word.flag.startswith("--no"):
        setting = find(word.name.removeprefix("no").removeprefix("_"))
        is_negated = setting is not None
    if setting is None:
        return None, "", ""
    is_switch = setting.kind == "switch" or setting.name == "mode"
    if is_negated and (not is_switch or word.value is not None):
        error = f": --no_ works for switches only and takes no value. Write --{setting.name}."
        return setting, "", error
    if is_negated:
        return setting, "false", ""
    if word.value is not None:
        return setting, word.value, ""
    if is_switch:
        return setting, "true", ""
    return setting, "", " needs a value."


def as_keywords(argv: list[str]) -> dict[str, str]:
    """Return flag -> text of a valid command line: `--no_save_model --lr 1` gives `save_model`
    false."""
    keywords = {}
    for word in words_of(argv):
        setting, text, _ = _read(word, known)
        if setting is not None:
            is_negated = known(word.name) is None
            name = setting.name if is_negated else word.name
            keywords[name] = text
    return keywords


def read_yaml(path: Path) -> Parsed:
    """Read the settings of a YAML config. Errors show its path relative to the working
    directory."""
    parsed = Parsed()
    root: yaml.Node | None = None
    relative = os.path.relpath(path)
    shown = str(path) if relative.startswith("..") else relative
    try:
        problem = file_problem(str(path))
        if problem and not path.exists() and "Did you mean" not in problem:
            problem = f"{problem} {nearest_configs(str(path))}"
        if not problem and path.stat().st_size > LARGEST_CONFIG:
            problem = f"larger than {LARGEST_CONFIG:,} bytes; a config has a few thousand."
        if not problem:
            # compose stops before YAML's types: the nodes have texts, and line numbers
            text = path.read_text(encoding="utf-8")
            root = compose(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        shown = f"{shown}:{mark.line + 1}" if mark else shown
        problem = f"not valid YAML: {getattr(error, 'problem', None) or reason(error)}."
        if isinstance(error, UnicodeDecodeError):
            problem = f"not a text in UTF-8 (byte {error.start:,})."
        if isinstance(error, OSError):
            problem = f"cannot be read ({reason(error)})."
    if root is not None and not isinstance(root, yaml.MappingNode):
        problem = "a config is sections with settings, such as\ntrain:\n  lr: 1e-4"
    if problem:
        parsed.errors.append(f"--config {shown}: {problem}")
        return parsed
    if root is None:  # an empty file
        return parsed
    for key_node, value_node in root.value:
        section = str(key_node.value)
        origin = f"{shown}:{key_node.start_mark.line + 1}"
        _read_section(section, origin, value_node, shown, parsed)
    return parsed


def explain_key(name: str) -> str:
    """Return the text that follows an unknown name in a YAML file."""
    return explain_unknown(name, as_key=True)


def _read_section(
    section: str,
    origin: str,
    node: yaml.Node,
    file_name: str,
    parsed: Parsed,
) -> None:
    """Add the settings of a section to `parsed`.

    Args:
        section: its name.
        origin: its line, `configs/mine.yaml:12`.
        node: what the file has under that name.
        file_name: the file, as messages show it.
        parsed: receives values, origins and errors.
    """
    is_empty = node.tag == NULL
    if section == "quantization" and isinstance(node, yaml.ScalarNode) and not is_empty:
        # `quantization: 8bit` is short for `quantization.mode`
        parsed.values["mode"] = from_text(SETTINGS["mode"], node.value)
        parsed.origins["mode"] = origin
        return
    if section not in SECTIONS:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = [str(key_node.value) for key_node, _ in pairs]
        unknown = f"{origin}: {section}"
        parsed.add_unknown(unknown, section, lambda name: explain_section(name, keys))
        # a section of another trainer: fsdp_config.reshard_after_forward
        for key_node, _ in pairs:
            dotted = f"{section}.{key_node.value}"
            if is_other_name(dotted):
                line = key_node.start_mark.line + 1
                parsed.add_unknown(f"{file_name}:{line}: {dotted}", dotted, explain_key)
        return
    if not isinstance(node, yaml.MappingNode):
        if not is_empty:  # an empty section is valid: all its settings may be commented out
            parsed.errors.append(f"{origin}: {section} is a section; indent its settings below it.")
        return
    for key_node, value_node in node.value:
        written = str(key_node.value)
        is_negated = written == "no_plan"
        field_name = written.removeprefix("no_") if is_negated else written
        key = EARLIER_NAMES.get(field_name, field_name)
        origin = f"{file_name}:{key_node.start_mark.line + 1}"
        setting = SETTINGS.get(key)
        if setting is None or setting.section != section:
            dotted = f"{section}.{written}"
            parsed.add_unknown(f"{origin}: {dotted}", dotted, explain_key)
        elif key in parsed.origins:
            first = parsed.origins[key]
            parsed.errors.append(f"{origin}: {section}.{key} is set twice, first in {first}.")
        else:
            value = _value(setting, value_node)
            parsed.values[key] = OPPOSITES.get(str(value).lower(), value) if is_negated else value
            parsed.origins[key] = origin


def _value(setting: Setting, node: yaml.Node | None) -> Any:
    """Return the text of a scalar, the texts of a list, None for null, and {} for anything else."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL else from_text(setting, node.value)
    if setting.kind == "data":
        return _parts(node)
    if setting.kind in ("groups", "options") and node is not None:
        return _texts(node)
    if setting.kind == "data or sets" and isinstance(node, yaml.MappingNode):
        return _sets(node)
    if isinstance(node, yaml.SequenceNode):
        items = node.value
        if all(isinstance(item, yaml.ScalarNode) for item in items):
            return [item.value for item in items]
    return {}
