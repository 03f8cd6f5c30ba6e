"""Runs the recipe in fp16 on the CPU, where it is slow but right and the command line refuses it: the device's rules
are left out. Arguments: a JSON file with a list of [first loss scale, flags], one run each."""

import importlib.util
import json
import sys
from pathlib import Path

from llama_ft import checkpoint
from llama_ft.config.parse import as_keywords
from llama_ft.training import train_state

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetuning.py"

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("finetuning", RECIPE)
    assert spec is not None and spec.loader is not None
    finetuning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetuning)
    checkpoint.resolve_precision = lambda config, sources, job, resumed: config
    for first_scale, flags in json.loads(Path(sys.argv[1]).read_text()):
        train_state.INITIAL_FACTOR = first_scale
        finetuning.main(**as_keywords(flags))
