"""Ask the hub at HF_ENDPOINT for models, one after another; print what came of each as JSON."""

import json
import sys

from llama_ft.errors import UserError
from llama_ft.models import local_folder

outcomes = {}
for name in sys.argv[1:]:
    try:
        outcome = str(local_folder(name, "--model_name"))
    except UserError as error:
        outcome = str(error)
    outcomes[name] = {"outcome": outcome}
print(json.dumps(outcomes))
