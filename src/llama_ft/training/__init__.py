"""What the training loop calls: the loss, one step, the learning rate, evaluation."""

from llama_ft.training.doubts import doubts
from llama_ft.training.evaluation import evaluate, mean_loss, perplexity
from llama_ft.training.objective import LossSum, Objective, SupervisedFineTuning, target_losses, target_rows
from llama_ft.training.optimizer import build_optimizer, describe_optimizer, describe_state, learning_rate
from llama_ft.training.packed_rows import check_rows_stay_apart
from llama_ft.training.progress import Progress
from llama_ft.training.sample import answer, show_answer
from llama_ft.training.step import (
    Step,
    Unread,
    accumulate_gradients,
    finish_gradients,
    free_gathered,
    is_due,
    stop_if_not_finite,
    update_weights,
)

__all__ = [
    "LossSum",
    "Objective",
    "Progress",
    "Step",
    "SupervisedFineTuning",
    "Unread",
    "accumulate_gradients",
    "answer",
    "build_optimizer",
    "check_rows_stay_apart",
    "describe_optimizer",
    "describe_state",
    "doubts",
    "evaluate",
    "finish_gradients",
    "free_gathered",
    "is_due",
    "learning_rate",
    "mean_loss",
    "perplexity",
    "show_answer",
    "stop_if_not_finite",
    "target_losses",
    "target_rows",
    "update_weights",
]
