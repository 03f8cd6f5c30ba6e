"""A run in three objects: `Setup` is known before training, `TrainingRun` has the open directory,
and a `StepRecord` says what is due after one step."""

from llama_ft.run.setup import Setup, start_run
from llama_ft.run.step_record import RankNumbers, StepRecord
from llama_ft.run.training_run import TrainingRun, open_run
