"""Sections of settings that extensions add."""

from typing import Any


def check_names(sections: dict[str, Any], added: dict[str, Any]) -> None:
    """Raise a ValueError if an added section has the name of another one, or a field of it that of
    another field: flags have no sections."""
    taken = set(sections)
    for section in sections.values():
        taken |= section.__pydantic_fields__.keys()
    for name, section in added.items():
        names = {name, *section.__pydantic_fields__}
        for wrong in sorted(names & taken):
            raise ValueError(
                f"{section.__module__}: another section of the settings has the name {wrong}. "
                "Choose another one: flags have no sections."
            )
        taken |= names
