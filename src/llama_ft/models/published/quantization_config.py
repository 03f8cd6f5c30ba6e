"""The quantization_config of a checkpoint, in its config.json: find it, remove it, and say what is
wrong with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from llama_ft.errors import UserError


def find_quantization_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of a config.json, or of one of its sections: Transformers reads
    that of a text_config, too. Raises UserError if it cannot be one."""
    for section in (settings, *settings.values()):
        if isinstance(section, Mapping) and section.get("quantization_config"):
            quantization: dict[str, Any] = section["quantization_config"]
            if not isinstance(quantization, dict):
                raise wrong_setting("", quantization, "settings by name")
            method = quantization.get("quant_method")
            if not isinstance(method, str | None):
                raise wrong_setting("quant_method", method, 'a name such as "fp8"')
            return quantization
    return None


def check_quantization_config(folder: Path) -> None:
    """Raise a UserError if the config.json of a model's directory has something else in its place."""
    find_quantization_config(read_settings(folder))


def remove_quantization_config(model_config: PretrainedConfig) -> dict[str, Any] | None:
    """Remove the quantization_config from a model's config, and return it."""
    removed = find_quantization_config(model_config.to_dict())
    sections = [getattr(model_config, name, None) for name in model_config.sub_configs]
    for section in (model_config, model_config.get_text_config(), *sections):
        if section is not None:
            vars(section).pop("quantization_config", None)
    return removed


def read_settings(folder: Path) -> dict[str, Any]:
    """Return config.json, or nothing if it cannot be read: building the model reports it."""
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def wrong_setting(name: str, value: Any, expected: str) -> UserError:
    """Return the error for a setting that no checkpoint can have; `name` "": for all of them."""
    shown = str(value)[:100]
    place = f"quantization_config.{name}" if name else "quantization_config"
    return UserError(
        f"config.json: {place} is {shown}; expected {expected}.\n"
        "Download config.json again, or use a version in 16 bits."
    )


def unsupported(method: str, problems: list[str], supported: str) -> UserError:
    """Return the error for a variant of a format that cannot be read."""
    return UserError(
        f"--model_name: quantized with {method} ({', '.join(problems)}), which is not supported. "
        f"Supported are: {supported}.\nUse a version in 16 bits or in bitsandbytes' 4 bits."
    )


def is_positive(value: Any) -> bool:
    """Return whether a setting is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_block(value: Any) -> bool:
    """Return whether a setting is the size of a block of rows and columns."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_positive, value))
