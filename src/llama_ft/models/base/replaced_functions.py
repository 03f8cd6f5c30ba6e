"""Functions of Transformers that are replaced in this process, when the first model is built.

These are functions of its modules: Transformers has no other way to choose them. Other models of the
process call them, too, and get what they got before: the functions here differ only for tensors that
`marked` has marked, in the choice of a kernel, and in a copy of an output.
"""

from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from llama_ft.libraries.names import require
from llama_ft.models.base import attention_kernels
from llama_ft.models.base.grouped_matmul import grouped_matmul, multiplies_by_group
from llama_ft.runtime.console import log
from llama_ft.runtime.target import current_target

# position_ids or attention_mask -> whether attention needs no mask. An entry ends with its tensor.
# Tensors are compared by identity: `==` of two tensors is a tensor, which fails as a key.
_NEEDS_NO_MASK: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()
# Transformers' own functions, by name, after they were replaced.
originals: dict[str, Callable[..., Any]] = {}


def replace_functions() -> None:
    """Replace the functions in REPLACED, once per process. Raises UserError if this version of
    Transformers lacks one, or calls it with other arguments."""
    if originals:
        return
    # all, before the first one is replaced
    functions = {(owner, name): require("transformers", owner, name) for owner, name in REPLACED}
    for (owner, name), function in functions.items():
        originals[name] = function
        setattr(import_module(f"transformers.{owner}"), name, REPLACED[owner, name])
        log.debug(f"transformers.{owner}.{name} is replaced in this process.")


def marked(tensor: torch.Tensor, needs_no_mask: bool) -> torch.Tensor:
    """Mark position_ids, or an attention_mask of bool: attention is causal without a mask, because
    `packed_samples` keep the samples apart or no sample is padded. A copy of the tensor is not
    marked."""
    _NEEDS_NO_MASK[tensor] = needs_no_mask
    return tensor


# Transformers inspects masks and positions on the device, which synchronizes once per packed
# micro-batch and twice per padded one. Here the host marks what it knows about these tensors. It
# works without marks, too.
def _find_unless_marked(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Do not look for packed samples in marked positions."""
    if _NEEDS_NO_MASK.get(position_ids, False):
        return None
    indices: torch.Tensor | None = originals["find_packed_sequence_indices"](position_ids)
    return indices


def _is_causal_as_marked(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
    """Do not look for padding in marked masks."""
    is_causal = originals["_ignore_causal_mask_sdpa"]
    needs_no_mask = None if padding_mask is None else _NEEDS_NO_MASK.get(padding_mask)
    if needs_no_mask is None:
        return bool(is_causal(padding_mask, *args, **kwargs))
    return needs_no_mask and bool(is_causal(None, *args, **kwargs))


# Without flash attention (fp32, T4, V100), only sdpa's math kernel lets heads share keys, and it
# keeps all scores. So keys are repeated, and the memory-efficient kernel computes padded batches.
def _shares_heads_in_flash(
    mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor
) -> bool:
    """Repeat keys for kernels without shared heads."""
    widths = (key.shape[-1], value.shape[-1])
    capability = current_target().capability
    kernel = attention_kernels.choose_kernel(capability, key.dtype, widths, False)
    in_flash = kernel in ("cpu", "varlen")
    return in_flash and bool(originals["use_gqa_in_sdpa"](mask, key, value))


# Biases of experts, of gpt-oss for example: Transformers adds them in place to the output of a grouped
# matmul, which selective activation checkpointing keeps, and so must not change. And on GPUs without a
# kernel for all experts, the host would wait in each grouped matmul.
def _multiply_experts(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Multiply in a way for this GPU, and add biases to a copy of the output."""
    if multiplies_by_group(weight.dtype):
        transposed = weight if is_transposed else weight.transpose(-2, -1)
        output = grouped_matmul(inputs.to(weight.dtype), transposed, offs)
    else:
        multiply = originals["_grouped_linear"]
        output = multiply(inputs, weight, offs, is_transposed=is_transposed)
    return output if bias is None else output + bias


# module and name in Transformers -> what takes the function's place
REPLACED: dict[tuple[str, str], Callable[..., Any]] = {
    ("masking_utils", "find_packed_sequence_indices"): _find_unless_marked,
    ("masking_utils", "_ignore_causal_mask_sdpa"): _is_causal_as_marked,
    ("integrations.sdpa_attention", "use_gqa_in_sdpa"): _shares_heads_in_flash,
    ("integrations.moe", "_grouped_linear"): _multiply_experts,
}
