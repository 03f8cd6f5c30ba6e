"""What a policy is compared with: the log-probabilities that another model, the reference, gives to the same tokens."""

from typing import Protocol

import torch
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import Batch
from llama_ft.models import adapter_off
from llama_ft.runtime import Runtime
from llama_ft.training.objective import row_log_probabilities, target_losses


class Reference(Protocol):
    """Where the reference's log-probabilities come from."""

    def log_probabilities(self, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> torch.Tensor:
        """Sums over the targets of each row of a micro-batch, float32 [rows] on the device, without gradient. `model`
        is the policy. All ranks call it together."""


class AdapterOff:
    """The model with its adapter off: computed in each step, and needs no memory for weights."""

    def log_probabilities(self, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> torch.Tensor:
        """See `Reference`."""
        with adapter_off(model):
            return score_rows(model, batch, runtime)


@torch.no_grad()
def score_rows(model: PreTrainedModel, batch: Batch, runtime: Runtime) -> torch.Tensor:
    """The model's log-probability of the targets of each row, float32 [rows], without dropout or gradient."""
    is_training = model.training
    model.eval()
    losses, _ = target_losses(model, batch, runtime.device, per_token=True)
    model.train(is_training)
    return row_log_probabilities(losses, batch)
