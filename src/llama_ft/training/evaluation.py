"""The validation loss, and early stopping."""

import math
from typing import Any

import torch
from datasets import Dataset
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.data import collate, evaluation_batches, group_size, row_lengths
from llama_ft.runtime import Runtime
from llama_ft.training.objective import Objective
from llama_ft.training.step import free_unsharded

LARGEST_EXPONENT = 700.0  # math.exp overflows above 709


def evaluate(
    model: PreTrainedModel,
    objective: Objective,
    validation: Dataset,
    settings: TrainConfig,
    pad_token_id: int,
    pack_length: int | None,
    runtime: Runtime,
) -> dict[str, float]:
    """`eval/loss` and `eval/perplexity`; arguments as of `mean_loss`."""
    mean, _ = mean_loss(model, objective, validation, settings, pad_token_id, pack_length, runtime)
    return {"eval/loss": mean, "eval/perplexity": perplexity(mean)}


def perplexity(loss: float) -> float:
    """Its exponential, or what floats have next to that."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    objective: Objective,
    validation: Dataset,
    settings: TrainConfig,
    pad_token_id: int,
    pack_length: int | None,
    runtime: Runtime,
) -> tuple[float, int]:
    """Mean loss over the validation set, dropout off, and of how many loss tokens or pairs it is.

    Args:
        model: left in training mode.
        objective: makes the loss of a batch.
        validation: tokenized samples, sharded across ranks; each counts once.
        settings: val_batch_size and max_eval_step.
        pad_token_id: fills rows of a batch up to the longest.
        pack_length: tokens of a packed sequence; None: no packing.
        runtime: the ranks.
    """
    ranks, sizes = (runtime.world_size, runtime.rank), (settings.val_batch_size, settings.max_eval_step)
    group = group_size(validation)
    model.eval()
    loss, count = torch.zeros((), dtype=torch.float64, device=runtime.device), 0
    for indices in evaluation_batches(row_lengths(validation), *ranks, *sizes, pack_length, group):
        batch = collate(validation, indices, pad_token_id, pack_length is not None)
        summed = objective.loss(model, batch, runtime)
        loss += summed.loss
        count += summed.count
    free_unsharded(model)
    model.train()
    loss_sum, total = runtime.all_gather_floats(loss.item(), count).sum(dim=0).tolist()
    return loss_sum / total, int(total)


class BestLoss:
    """Keeps the best validation loss and counts the evaluations since; `train` has the settings of early stopping."""

    def __init__(self, train: TrainConfig) -> None:
        self.loss, self.step, self.evaluations_since = float("inf"), 0, 0
        self._patience, self._min_delta = train.early_stopping_patience, train.early_stopping_min_delta

    def update(self, loss: float, step: int) -> bool:
        """Note an evaluation; returns whether it is the best so far."""
        if loss < self.loss - (self._min_delta if self.loss < float("inf") else 0.0):
            self.loss, self.step, self.evaluations_since = loss, step, 0
            return True
        self.evaluations_since += 1
        return False

    @property
    def should_stop(self) -> bool:
        return 0 < self._patience <= self.evaluations_since

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; JSON has no infinity."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"loss": loss, "step": self.step, "evaluations_since": self.evaluations_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that saved `state` would have."""
        self.loss = float("inf") if state["loss"] is None else float(state["loss"])
        self.step, self.evaluations_since = int(state["step"]), int(state["evaluations_since"])
