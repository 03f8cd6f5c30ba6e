"""Runs recipes/finetuning.py once for every list of flags in a JSON file, all in the processes of
one launch."""

import importlib.util
import json
import sys
from pathlib import Path

from llama_ft.config.reading.parse import as_keywords
from llama_ft.observe import flops

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "finetuning.py"

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("finetuning", RECIPE)
    assert spec is not None and spec.loader is not None
    finetuning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetuning)
    # A run measures the speed of matmuls for 0.1 s of each core, of 0.25 s that a tiny run takes.
    flops.SECONDS_MEASURED = 0.0
    for flags in json.loads(Path(sys.argv[1]).read_text()):
        flags.append("--no_plan")  # a second of a core for each run; plans are tested by themselves
        finetuning.main(**as_keywords(flags))
