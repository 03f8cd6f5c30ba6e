"""Whether the model at hand really keeps packed rows apart: computed with it, not read from its name."""

import inspect
import math
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from llama_ft.data import collate
from llama_ft.errors import UserError
from llama_ft.models import forget_chunked_loss, has_chunked_loss, packed_arguments, without_graphs
from llama_ft.models.quantized import QuantizedLinear
from llama_ft.runtime import Runtime, log
from llama_ft.training.step import free_unsharded

ROWS = 3
TOKENS = 16  # of each: enough to see a leak, and next to nothing to compute. One row is longer than a sliding window.
# Mean difference of logits over their standard deviation. Rows that see each other, or positions that go on, differ by
# 0.3 and more; rounding to 16 bits, and int8's to a scale that depends on what is computed together, by about 0.01.
TOLERANCE_FP32 = 1e-3
TOLERANCE_ROUNDED = 0.05
TOLERANCE_LOSS = 0.01  # of a sum over some fifty targets, where logits are rounded to 16 bits


@torch.no_grad()
def check_packing(model: PreTrainedModel, rows: Dataset, longest: int, dtype: torch.dtype, runtime: Runtime) -> None:
    """Compare the logits of a few packed rows with those of each row alone, and the chunked loss with that of all
    logits; if that differs, the loss is not chunked.

    Args:
        model: loaded, and in training mode. All ranks take part.
        rows: tokenized samples, of which the first few are taken.
        longest: how many tokens a row can have.
        dtype: what the model computes in.
        runtime: the ranks.

    Raises:
        UserError: logits differ by more than rounding.
    """
    taken = collate(rows, range(min(ROWS, len(rows))), 0)
    rows_taken = [ids[:length] for ids, length in zip(taken.input_ids, taken.row_lengths, strict=True)]
    parts = [ids[:TOKENS] for ids in rows_taken]
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    if 0 < window < longest:  # Phi-MoE has its window in the mask only, which is not there in a pack
        ids, length = torch.cat(rows_taken), min(window + TOKENS, longest)
        parts[0] = ids.repeat(-(-length // len(ids)))[:length]
    model.eval()
    device = runtime.device
    layout = packed_arguments(model, [len(part) for part in parts], device)
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    last = [torch.arange(end - min(len(part), TOKENS), end) for part, end in zip(parts, ends, strict=True)]
    packed = _logits(model, torch.cat(parts), torch.cat(last), layout, device)
    differences = []
    for part, ours in zip(parts, packed.split([len(positions) for positions in last]), strict=True):
        mask = {"attention_mask": torch.ones(1, len(part), device=device)}
        alone = _logits(model, part, torch.arange(len(part) - len(ours), len(part)), mask, device)
        differences.append(((ours - alone).abs().mean() / alone.std()).item())
    if has_chunked_loss(model):
        input_ids, positions = torch.cat(parts).to(device), torch.cat(last).to(device)
        targets = input_ids.roll(-1)[positions]
        inputs = {"input_ids": input_ids.unsqueeze(0), "use_cache": False, **layout}
        with without_graphs(model):
            chunked = model(**inputs, positions=positions, targets=targets)[0].item()
        of_logits = F.cross_entropy(packed, targets, reduction="sum").item()
        if not math.isclose(chunked, of_logits, rel_tol=TOLERANCE_LOSS):
            forget_chunked_loss(model)
            log.warning(
                f"The loss is computed from all logits at once, which takes more memory: the chunked loss of "
                f"{type(model).__name__} is {chunked:g} and not {of_logits:g}."
            )
    free_unsharded(model)
    model.train()
    difference = max(differences)
    is_exact = dtype == torch.float32 and not any(isinstance(module, QuantizedLinear) for module in model.modules())
    if difference > (TOLERANCE_FP32 if is_exact else TOLERANCE_ROUNDED):
        raise UserError(
            f"--batching_strategy packing: {type(model).__name__} does not keep packed rows apart (their logits differ "
            f"by {difference:.2g} of their deviation).\nUse --batching_strategy padding."
        )


def _logits(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    layout: dict[str, Any],
    device: torch.device,
) -> torch.Tensor:
    """float32 [positions, vocab]. Those of a whole window of tokens would take gigabytes."""
    positions = positions.to(device)
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": positions} if can_keep else {}
    inputs = {"input_ids": input_ids.unsqueeze(0).to(device), "use_cache": False, **keep, **layout}
    with without_graphs(model):
        logits: torch.Tensor = model(**inputs).logits
    return (logits[0] if can_keep else logits[0, positions]).float()
