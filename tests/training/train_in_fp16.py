"""Runs the recipe in fp16 on the CPU, where it is slow but right and the command line refuses it:
the device's rules are left out. Arguments: a JSON file with a list of [first loss scale, flags],
one run each."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning

from llama_ft import checkpoint
from llama_ft.config.reading.parse import as_keywords
from llama_ft.training import train_state

if __name__ == "__main__":
    checkpoint.resolve_precision = lambda config, *_: config
    for first_scale, flags in json.loads(Path(sys.argv[1]).read_text()):
        train_state.INITIAL_FACTOR = first_scale
        finetuning.main(**as_keywords(flags))
