"""What `sections.py` declares, as a table: the one description that flags, help, messages and schema are made from."""

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from llama_ft.config.sections import Config, DatasetPart

Kind = Literal["switch", "whole number", "number", "choice", "text", "data", "names", "names or pattern"]


@dataclass(frozen=True)
class Setting:
    """One field of one section.

    Args:
        section: name of the section, as in YAML.
        name: name of the field, unique across sections.
        kind: what its value is.
        choices: the allowed values where kind is choice, else empty.
        optional: whether it may be none.
        default: the value it has when nobody sets it.
        meaning: the field's docstring, on one line.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    default: Any
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """As commands are printed. torchrun's parser looks at the script's flags too, and stops at an ambiguous
        beginning of its own: --r could be --role or --rdzv-id."""
        return {"mode": "--quantization", "r": "--peft.r"}.get(self.name, f"--{self.name}")


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...], bool]:
    """Tell kind, choices and whether None is allowed from a type annotation."""
    union = get_origin(annotation) in (Union, types.UnionType)
    members = set(get_args(annotation)) if union else {annotation}
    optional = types.NoneType in members
    members.discard(types.NoneType)
    if members == {list[str], str}:
        return "names or pattern", (), optional
    if members == {str, list[DatasetPart]}:
        return "data", (), optional
    (member,) = members
    if get_origin(member) is Literal:
        return "choice", get_args(member), optional
    kinds: dict[Any, Kind] = {bool: "switch", int: "whole number", float: "number", str: "text", list[str]: "names"}
    return kinds[member], (), optional


def _settings_of(section: str, section_class: Any) -> list[Setting]:
    annotations = get_type_hints(section_class)
    settings = []
    for name, field in section_class.__pydantic_fields__.items():
        kind, choices, optional = _kind(annotations[name])
        default = field.get_default(call_default_factory=True)
        meaning = " ".join((field.description or "").split())
        settings.append(Setting(section, name, kind, choices, optional, default, meaning))
    return settings


SECTIONS: dict[str, Any] = get_type_hints(Config)
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for section, section_class in SECTIONS.items()
    for setting in _settings_of(section, section_class)
}


def values_of(config: Config) -> dict[str, Any]:
    """Return the values of all settings by field name, whatever the section."""
    return {name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()}
