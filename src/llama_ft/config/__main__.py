"""`python -m llama_ft.config > configs/schema.json` writes the schema, which editors complete YAML configs with."""

import json

from llama_ft.config.dump import json_schema

print(json.dumps(json_schema(), indent=2))
