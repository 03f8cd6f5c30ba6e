"""Private names of Transformers that are used here, and their purpose. Each may be missing in
another version."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils
from transformers.integrations import moe, sdpa_attention

from llama_ft.models.base import attention_kernels
from llama_ft.runtime.target import current_target

# Name -> its purpose. Without it, that feature is rejected with a one-line error, or works as the
# line says.
USES = {
    "_attn_implementation": "packing: which attention the model has",
    "_can_record_outputs": "quantization: routers, which stay as they are, and the line about their auxiliary loss",
    "_init_weights": "buffers that no checkpoint holds, such as rotary frequencies",
    "_keep_in_fp32_modules": "layers that are not quantized, and stay in fp32 in fp16; none without it",
    "_keep_in_fp32_modules_strict": "layers that are not quantized, and stay in fp32 in 16 bits; none without it",
    "_keys_to_ignore_on_load_unexpected": "tensors of a checkpoint that the model does not need; all needed without it",
    "_no_split_modules": "classes of decoder layers; without it they are the items of the model's largest list",
    "_supports_attention_backend": "packing: whether attention goes through transformers' interface",
}
# An attribute of parameters and buffers loaded from the checkpoint: Transformers' _init_weights
# does not change them.
INITIALIZED = "_is_hf_initialized"


def private(owner: Any, name: str) -> Any:
    """Return an attribute, listed in USES, of a model or its config; None if this version of
    Transformers lacks it."""
    assert name in USES
    return getattr(owner, name, None)


# Masks: Transformers inspects tensors on the device, which synchronizes once per packed micro-batch
# and twice per padded one. Here the host marks what it knows about these tensors. It works without
# marks, too.
_find_packed: Any = getattr(masking_utils, "find_packed_sequence_indices", None)
_is_causal: Any = getattr(masking_utils, "_ignore_causal_mask_sdpa", None)
# Without flash attention (fp32, T4, V100), only sdpa's math kernel lets heads share keys, and it
# keeps all scores. So keys are repeated, and the memory-efficient kernel computes padded batches.
_shares_heads: Any = getattr(sdpa_attention, "use_gqa_in_sdpa", None)
# Biases of experts, of gpt-oss for example: Transformers adds them in place to the output of a grouped
# matmul, which selective activation checkpointing keeps, and so must not change.
_grouped_linear: Any = getattr(moe, "_grouped_linear", None)
# position_ids or attention_mask -> whether attention needs no mask. An entry ends with its tensor.
# Tensors are compared by identity: `==` of two tensors is a tensor, which fails as a key.
_NEEDS_NO_MASK: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()


def marked(tensor: torch.Tensor, needs_no_mask: bool) -> torch.Tensor:
    """Mark position_ids, or an attention_mask of bool: attention is causal without a mask, because
    `packed_samples` keep the samples apart or no sample is padded. A copy of the tensor is not
    marked."""
    _NEEDS_NO_MASK[tensor] = needs_no_mask
    return tensor


def _find_unless_marked(position_ids: torch.Tensor) -> torch.Tensor | None:
    if _NEEDS_NO_MASK.get(position_ids, False):
        return None
    return _find_packed(position_ids)


def _is_causal_as_marked(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
    needs_no_mask = None if padding_mask is None else _NEEDS_NO_MASK.get(padding_mask)
    if needs_no_mask is None:
        return _is_causal(padding_mask, *args, **kwargs)
    return needs_no_mask and _is_causal(None, *args, **kwargs)


def _shares_heads_in_flash(
    mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor
) -> bool:
    widths = (key.shape[-1], value.shape[-1])
    capability = current_target().capability
    kernel = attention_kernels.choose_kernel(capability, key.dtype, widths, False)
    return kernel in ("cpu", "varlen") and _shares_heads(mask, key, value)


def _add_bias_to_a_copy(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    output: torch.Tensor = _grouped_linear(inputs, weight, offs, is_transposed=is_transposed)
    return output if bias is None else output + bias


# These are functions of Transformers' modules: it has no other way to choose them. They are replaced
# once, when this module is imported.
masking_utils.find_packed_sequence_indices = _find_unless_marked
masking_utils._ignore_causal_mask_sdpa = _is_causal_as_marked
vars(sdpa_attention)["use_gqa_in_sdpa"] = _shares_heads_in_flash
vars(moe)["_grouped_linear"] = _add_bias_to_a_copy
