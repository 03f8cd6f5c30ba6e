"""Attention kernels for neighboring samples of a packed sequence, which also return the log-sum-exp of each
token's scores. All take tensors [1, heads, tokens, head_dim]: query, key and value forward; the
gradient, these and the output backward.
"""

from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from llama_ft.models.base.torch_2_11 import shared_heads

ATEN = torch.ops.aten
CAUSAL = 1  # mask type of the memory-efficient kernel
# In 16 bits oneDNN compiles and keeps kernels of the backward pass for every length, on every
# thread: 11 MiB each on 4 threads of an AMD Zen 4. So lengths are rounded up: no earlier token sees
# the added ones, which have no gradient.
KERNEL_LENGTH_MULTIPLE = 32


class AttentionCall(NamedTuple):
    """Neighboring samples that one call of a kernel computes."""

    tokens: int  # of all of them
    longest: int
    offsets: torch.Tensor | None  # int32 [samples + 1], on the device; None: one sample


def cpu_forward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    scale: float | None,
    window: int | None,
) -> Any:
    mask = sample_mask(sample[0].shape[2], window, sample[0])
    return ATEN._scaled_dot_product_flash_attention_for_cpu(
        *sample, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def cpu_backward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    log_sums: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> Any:
    length = sample[0].shape[2]
    added = -length % KERNEL_LENGTH_MULTIPLE
    if sample[0].itemsize == 2 and added:
        sample = [functional.pad(part, (0, 0, 0, added)) for part in sample]
        log_sums = functional.pad(log_sums, (0, added))
    mask = sample_mask(length, window, sample[0])
    gradients = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        *sample, log_sums, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return [part[:, :, :length] for part in gradients]


def efficient_forward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    scale: float | None,
    window: int | None,
) -> Any:
    parts = [part.transpose(1, 2) for part in sample]
    how = {"scale": scale, "window_size": window}
    longest = call.longest if call.offsets is not None else None
    several = (call.offsets, call.offsets, longest, longest)
    output, log_sums, *_ = ATEN._efficient_attention_forward(
        *parts, None, *several, 0.0, CAUSAL, True, **how
    )
    return output.transpose(1, 2), log_sums


def efficient_backward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    log_sums: Any,
    scale: float | None,
    window: int | None,
) -> Any:
    # Not autograd: torch's derivative of the forward operator ignores the window.
    gradient, *parts, output = (part.transpose(1, 2) for part in sample)
    several = (call.offsets, call.offsets, call.longest, call.longest)
    inputs = (gradient, *parts, None, output, *several, log_sums)  # None: no bias
    # used only with dropout
    no_seeds = (log_sums, log_sums)
    how = {"scale": scale, "window_size": window}
    *gradients, _ = ATEN._efficient_attention_backward(
        *inputs, 0.0, *no_seeds, CAUSAL, False, **how
    )
    return [part.transpose(1, 2) for part in gradients]


def varlen_forward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    scale: float | None,
    window: int | None,
) -> Any:
    query, key, value = (part[0].transpose(0, 1) for part in sample)
    offsets = cast(torch.Tensor, call.offsets)
    longest = call.longest
    output, log_sums = varlen_attn(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=varlen_window(window),
        **shared_heads(sample[0], sample[1]),
    )
    return output.transpose(0, 1).unsqueeze(0), log_sums.unsqueeze(0)


def varlen_backward(
    sample: list[torch.Tensor],
    call: AttentionCall,
    log_sums: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> Any:
    # Not autograd: it would take its own output and log-sum-exp.
    parts = [part[0].transpose(0, 1) for part in sample]
    several = (call.offsets, call.offsets, call.longest, call.longest)
    no_seed = torch.zeros(2, dtype=torch.uint64, device=log_sums.device)  # used only with dropout
    gradients = torch.ops.torch_attn._varlen_attn_backward(
        *(*parts, log_sums[0], *several), window is None, no_seed, scale, varlen_window(window)
    )
    return [part.transpose(0, 1).unsqueeze(0) for part in gradients]


def varlen_window(window: int | None) -> tuple[int, int]:
    """Return how many earlier and later tokens a token sees, as the varlen kernel wants it."""
    return (-1, 0) if window is None else (window - 1, 0)


def sample_mask(
    length: int, window: int | None, query: torch.Tensor, may_be_causal: bool = True
) -> torch.Tensor | None:
    """Return what is added to a sample's scores [1, 1, tokens, tokens]; None if the kernel's causal
    mask is enough. `query` may be padded beyond `length`."""
    if may_be_causal and (window is None or length <= window):
        return None
    tokens = query.shape[2]
    every = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
    allowed = every.tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    added = torch.zeros_like(allowed, dtype=query.dtype)
    return added.masked_fill(~allowed, -torch.inf)[None, None]
