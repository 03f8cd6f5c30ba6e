"""The settings of a saved adapter."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pydantic import TypeAdapter, ValidationError

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.base.source import listed

ADAPTER_CONFIG = "adapter_config.json"
# the values of peft_method in PEFT's spelling
METHODS = [method.upper() for method in get_args(PeftConfig.__annotations__["peft_method"])]


def saved_config(folder: Path) -> Any:
    """Return the settings of the adapter saved in `folder`. Raises UserError if they cannot be
    read, or the method is not one of peft_method."""
    try:
        stored = json.loads((folder / ADAPTER_CONFIG).read_text())
        kind = stored.get("peft_type")
        if kind not in METHODS:
            raise UserError(
                f"{folder}: {kind} adapters are not supported; only {' and '.join(METHODS)}."
            )
        settings: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(str(folder))
        # PEFT ignores what it does not know, and with it perhaps how the adapter computes
        unknown = [name for name in stored if stored[name] and not hasattr(settings, name)]
        if unknown:
            raise ValueError(f"this version of PEFT does not know {listed(unknown)}")
        _check_containers(settings, stored)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / ADAPTER_CONFIG}: cannot be used ({error}).") from error
    settings.inference_mode = False
    # LoRA's: they are read from the file, whatever they first were
    settings.init_lora_weights = True
    return settings


def _check_containers(settings: Any, stored: dict[str, Any]) -> None:
    """Raise ValueError for a setting that is not the list or dict that PEFT documents. PEFT checks
    no types, and would end in a traceback or adapt nothing."""
    for name, annotation in get_type_hints(type(settings)).items():
        kind = str(annotation)
        is_container = ("list" in kind or "dict" in kind) and "Config" not in kind
        value = stored.get(name)
        if not is_container or value is None:
            continue
        try:
            TypeAdapter(annotation).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name} is {value}; expected {kind}") from error
