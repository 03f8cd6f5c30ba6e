"""A run in two objects: `Setup` is known before training, `TrainingRun` has the open directory. What it
does in addition to training is in `parts`."""

from llama_ft.run.inputs import (
    RunInputs,
    find_model,
    pass_inputs,
    resolve_inputs,
    tokenize_samples,
)
from llama_ft.run.open_run import open_run, run_parts
from llama_ft.run.parts import Part
from llama_ft.run.result import load_best_weights, trainer_record
from llama_ft.run.setup import Setup, start_run
from llama_ft.run.training_run import TrainingRun
