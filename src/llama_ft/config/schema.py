"""The JSON schema of YAML recipes, for completion in editors.

`python -m llama_ft.config.schema > configs/schema.json` writes it.
"""

import json
from typing import Any

from pydantic import TypeAdapter

from llama_ft.config.fields import SETTINGS
from llama_ft.config.sections import Config


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12): sections, settings, types, choices, ranges, meanings and defaults."""
    schema = TypeAdapter(Config).json_schema()
    sections = schema["$defs"]
    for setting in SETTINGS.values():
        section_class = schema["properties"][setting.section]["$ref"].rpartition("/")[2]
        field = sections[section_class]["properties"][setting.name]
        field.pop("title")
        field["description"] = setting.meaning
        field["default"] = setting.default
    validation = sections["DataConfig"]["properties"]["validation"]["anyOf"]
    validation.insert(1, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})
    mode = {**sections["QuantizationConfig"]["properties"]["mode"], "description": "Short for quantization.mode."}
    schema["properties"]["quantization"] = {"anyOf": [{"$ref": "#/$defs/QuantizationConfig"}, mode]}
    for section in sections.values():
        del section["title"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "llama_ft recipe",
        "additionalProperties": False,
    }


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
