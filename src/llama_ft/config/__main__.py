"""Print the JSON schema of YAML configs, for editors: `python -m llama_ft.config > configs/schema.json`."""

import json

from llama_ft.config.dump import json_schema

print(json.dumps(json_schema(), indent=2))
