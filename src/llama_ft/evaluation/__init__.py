"""How good a model is: its loss on rows that it was not trained on, and tasks of lm-evaluation-harness."""

from llama_ft.evaluation.held_out import HeldOut, measure
from llama_ft.evaluation.results import Evaluated, describe, find_warnings, to_json
from llama_ft.evaluation.tasks import Tasks, find_tasks

__all__ = ["Evaluated", "HeldOut", "Tasks", "describe", "find_tasks", "find_warnings", "measure", "to_json"]
