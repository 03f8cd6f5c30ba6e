"""A run in two objects: `Setup` is known before training, `TrainingRun` has the open directory."""

from llama_ft.run.setup import Setup, start_run
from llama_ft.run.training_run import TrainingRun, open_run
