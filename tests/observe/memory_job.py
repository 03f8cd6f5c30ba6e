"""Runs recipes/finetuning.py for every case of a JSON file, some of them broken on purpose, and
prints what it says."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning

from llama_ft import models
from llama_ft.config.reading.parse import as_keywords

RANK = int(os.environ["RANK"])
KEPT: list[Any] = []


def load_whole_model_too(built: models.BuiltModel, *arguments: Any, **keywords: Any) -> Any:
    """Run load_weights. Rank 0 also keeps copies of all tensors in the files."""
    if RANK == 0:
        tensors = [
            tensor
            for file in sorted(built.folder.glob("*.safetensors"))
            for tensor in load_file(file).values()
        ]
        KEPT.extend(tensor.clone() for tensor in tensors for _ in range(6))
    return MATERIALIZE(built, *arguments, **keywords)


def keep_states_of_the_whole_model(
    built: models.BuiltModel, objective: Any, optimizer: torch.optim.Optimizer, *arguments: Any
) -> Any:
    """Run train_step. Rank 1 has one more state, which is not sharded."""
    outcome = TRAIN_STEP(built, objective, optimizer, *arguments)
    if RANK == 1:
        for parameter, state in optimizer.state.items():
            state.setdefault("whole", torch.ones(parameter.shape))
    return outcome


MATERIALIZE = models.load_weights
TRAIN_STEP = finetuning.train_step
BROKEN = {
    "nothing": [],
    "loading": [patch.object(models, "load_weights", load_whole_model_too)],
    "states": [patch.object(finetuning, "train_step", keep_states_of_the_whole_model)],
}

if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        with ExitStack() as stack:
            for change in BROKEN[case["broken"]]:
                stack.enter_context(change)
            if RANK == 0:
                print(f"CASE {case['name']}", flush=True)
            finetuning.main(**as_keywords(case["flags"]))
        KEPT.clear()
