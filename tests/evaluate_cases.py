"""Runs recipes/evaluate.py once for every list of flags in a JSON file, all in the processes of one
launch."""

import importlib.util
import json
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "evaluate.py"

if __name__ == "__main__":
    sys.path.insert(0, str(RECIPE.parent))  # it imports finetuning.py
    spec = importlib.util.spec_from_file_location("evaluate_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    for flags in json.loads(Path(sys.argv[1]).read_text()):
        recipe.main(recipe.read_evaluate_flags(flags, ""))
