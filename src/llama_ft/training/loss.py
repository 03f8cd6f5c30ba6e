"""The loss: a sum over target tokens, divided once by their number in the whole global batch."""

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from llama_ft.data import IGNORED


class LabelledBatch(Protocol):
    """A micro-batch, each tensor int64 [rows, length]; `sources` says where each row came from."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def attention_mask(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def sources(self) -> list[str]: ...


def token_loss_sum(model: nn.Module, batch: LabelledBatch, device: torch.device) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's target tokens, fp32, on the device.

    Dividing the sum over all micro-batches and ranks by the global number of targets gives a loss that does not depend
    on how rows were dealt; the mean of micro-batch means would.

    Args:
        model: causal language model; position t predicts token t + 1.
        batch: labels are not shifted; IGNORED positions are no targets. A batch without targets gives 0, with
            gradients of 0, so that a rank without rows takes part in the collectives.
        device: where the model computes.
    """
    targets = batch.labels[:, 1:]
    positions = (targets != IGNORED).flatten().nonzero().squeeze(1)  # on the host: no device synchronisation
    logits = model(
        input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device), use_cache=False
    ).logits  # [rows, length, vocab]
    predicting = logits[:, :-1].flatten(0, 1)[positions.to(device)]  # [targets, vocab]: fp32 only where it counts
    return F.cross_entropy(predicting.float(), targets.flatten()[positions].to(device), reduction="sum")
