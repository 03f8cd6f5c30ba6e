"""Ask the hub at HF_ENDPOINT for models, one after another; print what came of each as JSON."""

import json
import sys

from llama_ft.errors import UserError
from llama_ft.models import local_folder

outcomes = {}
for name in sys.argv[1:]:
    try:
        outcomes[name] = str(local_folder(name, "--model_name"))
    except UserError as error:
        outcomes[name] = str(error)
print(json.dumps(outcomes))
