"""Values on their way in: both YAML and the command line bring text, and both are read by the same few lines.

Reading YAML scalars as text, not as YAML 1.1 takes them, spares its surprises: `1e-4` would be a string, `off` a
boolean and `2025-01-31` a date.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from llama_ft.config.fields import Setting

TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")
FALSE_WORDS = ("false", "f", "no", "n", "off", "0")
PLAIN_NAME = re.compile(r"[\w.\-]+")


@dataclass
class Given:
    """What one source (a recipe file, the command line) sets.

    Args:
        values: field name -> value: text, a list of texts, None, or what no setting takes (a mapping).
        places: field name -> where it was set, `configs/mine.yaml:12` or `--lr`.
        mistakes: messages about what could not be read.
        doubtful: fields that the mistakes are probably about: what other fields need of them is not known.
        readable: false when the source as a whole could not be read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    readable: bool = True


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
            parts = parts_of(yaml.compose(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError:
            parts = None
        return text if parts in (None, {}) else parts  # [1]*.jsonl is a name
    if setting.kind in ("text", "data") and text.startswith("~"):
        return os.path.expanduser(text)
    return text


def parts_of(node: yaml.Node | None) -> Any:
    """Return the parts of a mix as dicts of text, a plain name as a part with a path; {} for what is no such list."""
    if not isinstance(node, yaml.SequenceNode):
        return {}
    return [_part(item) for item in node.value] or ""


def _part(node: yaml.Node) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(yaml.ScalarNode("", "path"), node)]
    texts = {str(key.value): value.value if isinstance(value, yaml.ScalarNode) else {} for key, value in pairs}
    if isinstance(path := texts.get("path"), str):
        texts["path"] = os.path.expanduser(path)
    return texts


def _items(text: str) -> list[str]:
    """Split `a,b` or `[a, b]` or `['a', 'b']`."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    items = [item.strip().strip("'\"") for item in inside.split(",")]
    return [item for item in items if item]
