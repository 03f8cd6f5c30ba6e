"""What the host knows of a micro-batch, noted on its tensors. Transformers looks at their values on the device, for
which the host waits: once per packed micro-batch, twice per padded one. It still does without a note."""

from typing import Any

import torch
from transformers import masking_utils

_find_packed, _is_causal = masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa


def noted(tensor: torch.Tensor, needs_no_mask: bool) -> torch.Tensor:
    """Note on position_ids, or on an attention_mask of bool, whether attention is causal without a mask: `packed_rows`
    keep the rows apart, or no row is padded. A copy of the tensor has no note."""
    tensor.needs_no_mask = needs_no_mask  # type: ignore[attr-defined]
    return tensor


def _find_unless_noted(position_ids: torch.Tensor) -> torch.Tensor | None:
    return None if getattr(position_ids, "needs_no_mask", False) else _find_packed(position_ids)


def _is_causal_as_noted(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
    needs_no_mask = getattr(padding_mask, "needs_no_mask", None)
    if needs_no_mask is None:
        return _is_causal(padding_mask, *args, **kwargs)
    return needs_no_mask and _is_causal(None, *args, **kwargs)


masking_utils.find_packed_sequence_indices = _find_unless_noted
masking_utils._ignore_causal_mask_sdpa = _is_causal_as_noted
