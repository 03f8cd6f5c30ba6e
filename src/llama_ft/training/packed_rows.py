"""Whether the model at hand really keeps the rows of a pack apart: asked of it, not of its name."""

import math
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import collate
from llama_ft.errors import UserError
from llama_ft.models import forget_head_loss, has_head_loss, packed_arguments
from llama_ft.models.quantized import QuantizedLinear
from llama_ft.runtime import Runtime, log
from llama_ft.training.step import free_gathered

ROWS = 3
TOKENS = 16  # of each: enough to see a leak, and next to nothing to compute
# Mean difference of logits over their standard deviation. Rows that see each other, or positions that go on, differ by
# 0.3 and more; rounding to 16 bits, and int8's to a scale that depends on what is computed together, by about 0.01.
TOLERANCE_FP32 = 1e-3
TOLERANCE_ROUNDED = 0.05
TOLERANCE_LOSS = 0.01  # of a sum over some fifty targets, where logits are rounded to 16 bits


@torch.no_grad()
def check_rows_stay_apart(model: PreTrainedModel, rows: Dataset, dtype: torch.dtype, runtime: Runtime) -> None:
    """Compare the logits of a few rows in one pack with those of each row alone, and the loss made in pieces with that
    of the logits; where that differs, it is not made in pieces. All ranks take part.

    Args:
        model: sharded and loaded, in training mode.
        rows: tokenized.
        dtype: that it computes in.
        runtime: where it computes.

    Raises:
        UserError: they differ by more than rounding.
    """
    taken = collate(rows, range(min(ROWS, len(rows))), 0)
    parts = [ids[: min(length, TOKENS)] for ids, length in zip(taken.input_ids, taken.row_lengths, strict=True)]
    model.eval()
    device = runtime.device
    layout = packed_arguments(model, [len(part) for part in parts], device)
    packed = _logits(model, torch.cat(parts), layout, device)
    alone = torch.cat(
        [_logits(model, part, {"attention_mask": torch.ones(1, len(part), device=device)}, device) for part in parts]
    )
    _check_head_loss(model, torch.cat(parts).to(device), layout, packed)
    free_gathered(model)
    model.train()
    difference = ((packed - alone).abs().mean() / alone.std()).item()
    is_exact = dtype == torch.float32 and not any(isinstance(module, QuantizedLinear) for module in model.modules())
    if difference > (TOLERANCE_FP32 if is_exact else TOLERANCE_ROUNDED):
        raise UserError(
            f"--batching_strategy packing: {type(model).__name__} does not keep the rows of a pack apart (their logits "
            f"differ by {difference:.2g}\nof their deviation from those of the rows alone). Use --batching_strategy "
            "padding."
        )


def _check_head_loss(
    model: PreTrainedModel, input_ids: torch.Tensor, layout: dict[str, Any], logits: torch.Tensor
) -> None:
    if not has_head_loss(model):
        return
    positions = torch.arange(len(input_ids) - 1, device=input_ids.device)
    inputs = {"input_ids": input_ids.unsqueeze(0), "use_cache": False, **layout}
    in_pieces = model(**inputs, positions=positions, targets=input_ids[1:]).item()
    of_logits = F.cross_entropy(logits[:-1], input_ids[1:], reduction="sum").item()
    if not math.isclose(in_pieces, of_logits, rel_tol=TOLERANCE_LOSS):
        forget_head_loss(model)
        log.warning(
            f"The loss is computed from all logits at once: in pieces {type(model).__name__} has another, "
            f"{in_pieces:g} and not {of_logits:g}. That takes more memory."
        )


def _logits(
    model: PreTrainedModel, input_ids: torch.Tensor, layout: dict[str, Any], device: torch.device
) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    logits: torch.Tensor = model(input_ids=input_ids.unsqueeze(0).to(device), use_cache=False, **layout).logits
    return logits[0].float()
