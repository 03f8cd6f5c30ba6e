"""The loss: a sum over target tokens, divided once by their number in the whole global batch."""

import torch
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import IGNORED, Batch
from llama_ft.models import packed_arguments


def token_loss_sum(model: PreTrainedModel, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's target tokens, fp32, on the device.

    Dividing the sum over all micro-batches and ranks by the global number of targets gives a loss that does not depend
    on how rows were dealt, padded or packed; the mean of micro-batch means would.

    Args:
        model: causal language model; position t predicts token t + 1.
        batch: labels are not shifted; IGNORED positions are no targets. A batch without targets gives 0, with
            gradients of 0, so that a rank without rows takes part in the collectives.
        device: where the model computes.
    """
    targets = batch.labels[:, 1:]
    positions = (targets != IGNORED).flatten().nonzero().squeeze(1)  # on the host: no device synchronisation
    layout = (
        packed_arguments(model, batch.row_lengths, device)
        if batch.is_packed
        else {"attention_mask": batch.attention_mask.to(device)}
    )
    logits = model(input_ids=batch.input_ids.to(device), use_cache=False, **layout).logits  # [rows, length, vocab]
    predicting = logits[:, :-1].flatten(0, 1)[positions.to(device)]  # [targets, vocab]: fp32 only where it counts
    return F.cross_entropy(predicting.float(), targets.flatten()[positions].to(device), reduction="sum")
