"""The loss: a sum over target tokens, divided once by their number in the whole global batch."""

import torch
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import IGNORED, Batch
from llama_ft.models import has_head_loss, packed_arguments, router_loss
from llama_ft.runtime import sent


def token_loss_sum(model: PreTrainedModel, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's target tokens, fp32, on the device; in training with the auxiliary
    loss of routers where config.json asks for it, once for each target.

    Dividing the sum over all micro-batches and ranks by the global number of targets gives a loss that does not depend
    on how rows were dealt, padded or packed; the mean of micro-batch means would.

    Args:
        model: causal language model; position t predicts token t + 1. Prepared by `use_head_loss` it makes logits of a
            few hundred positions at a time; otherwise those of all positions with a target.
        batch: labels are not shifted; IGNORED positions are no targets. A batch without targets gives 0, with
            gradients of 0, so that a rank without rows takes part in the collectives.
        device: where the model computes.
    """
    aims = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()  # what each position is to predict
    on_host = (aims != IGNORED).nonzero().squeeze(1)  # computed there: the device is not waited for
    positions, targets = sent(on_host, device), sent(aims[on_host], device)  # [targets]
    layout = (
        packed_arguments(model, batch.row_lengths, device)
        if batch.is_packed
        else {"attention_mask": sent(batch.attention_mask, device)}
    )
    inputs = {"input_ids": sent(batch.input_ids, device), "use_cache": False, **layout}
    if has_head_loss(model):
        loss: torch.Tensor = model(**inputs, positions=positions, targets=targets)
        return loss
    output = model(**inputs)
    predicting = output.logits.flatten(0, 1).index_select(0, positions)  # [targets, vocab]: fp32 only where it counts
    loss = F.cross_entropy(predicting.float(), targets, reduction="sum")
    return loss + router_loss(model, output, inputs["attention_mask"], len(targets))
