"""Attention of GPUs in a plan: its kernels, and the memory that they allocate in their backward pass
and free before they return.

The gradient of the queries is summed in fp32 over blocks of keys: 4 bytes per query element, more
than the queries themselves. With fewer key heads than query heads, flash attention writes gradients
of keys and values per query head first. In a plan the kernels are torch's fake functions, which
return only the results.

Sources: mha_bwd and mha_varlen_bwd in flash_attn/flash_api.cpp of FlashAttention 2;
kernel_backward.h of torch's memory-efficient attention; CompositeSDPABackwardNode of cuDNN's
frontend, which allocates the same tensors as flash attention (dQ_accum, softmax_sum, dK_fullhead
and dV_fullhead), without the padding. So cuDNN's kernel is planned as flash attention.
"""

from collections.abc import Callable
from typing import Any

import torch

from llama_ft.models.base.attention_kernels import choose_kernel
from llama_ft.runtime.target import current_target

FP32 = 4  # bytes
FLASH_BLOCK = 128  # queries
EFFICIENT_BLOCK = 128  # queries or keys; 64 for heads up to 64
# Keys and values of heads wider than a block are summed in fp32, for at most this many splits.
EFFICIENT_SPLITS = 200


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def flash_bytes(
    padded_queries: int, keys: int, heads: tuple[int, int], width: int, itemsize: int
) -> int:
    """Return the workspace of flash attention.

    Args:
        padded_queries: of all samples, each padded to whole blocks.
        keys: of all samples.
        heads: of queries, and of keys and values.
        width: head dimension.
        itemsize: of queries, keys and values.
    """
    query_heads, key_heads = heads
    padded_width = _round_up(width, 32 if width <= 128 else 64)
    query_gradient = padded_queries * query_heads * padded_width * FP32
    delta = padded_queries * query_heads * FP32  # sum of output times gradient, per query
    per_query_head = keys * query_heads * width * itemsize if query_heads != key_heads else 0
    return query_gradient + delta + 2 * per_query_head  # of keys and of values


def efficient_bytes(
    samples: int, queries: int, keys: int, heads: int, widths: tuple[int, int], itemsize: int
) -> int:
    """Return the workspace of memory-efficient attention, an upper bound: blocks of some GPUs are
    smaller.

    Args:
        samples: in the batch.
        queries: per sample.
        keys: per sample.
        heads: of queries, and of keys and values.
        widths: head dimension of queries and keys, and of values.
        itemsize: of queries, keys and values.
    """
    width, _ = widths
    block = EFFICIENT_BLOCK if width > 64 else 64
    heads_of_all = samples * heads
    delta = heads_of_all * queries * FP32
    query_gradient = heads_of_all * _round_up(queries, block) * _round_up(width, block) * FP32
    total = delta + query_gradient
    if itemsize == 2 and width > 64:
        splits = max(1, EFFICIENT_SPLITS // heads_of_all)
        summed_keys = min(splits * block, _round_up(keys, block))
        padded_widths = sum(_round_up(each, block) for each in widths)
        total += heads_of_all * summed_keys * padded_widths * FP32
    return total


def _varlen(args: tuple[Any, ...]) -> int:
    _, query, key, _, _, _, offsets, *_ = args  # query: [tokens, heads, width]
    tokens, heads, width = query.shape
    padded_queries = tokens + FLASH_BLOCK * (len(offsets) - 1)
    return flash_bytes(padded_queries, len(key), (heads, key.shape[1]), width, query.itemsize)


def _sdpa(args: tuple[Any, ...]) -> int:
    _, query, key, *_ = args  # query: [samples, heads, tokens, width]
    samples, heads, tokens, width = query.shape
    _, key_heads, keys, _ = key.shape
    padded_queries = samples * _round_up(tokens, FLASH_BLOCK)
    return flash_bytes(padded_queries, samples * keys, (heads, key_heads), width, query.itemsize)


def _efficient(args: tuple[Any, ...]) -> int:
    # query: [samples, tokens, heads, width], or of packed samples [1, all tokens, heads, width]
    _, query, key, value, _, _, offsets, _, longest, longest_key, *_ = args
    samples, tokens, heads, width = query.shape
    widths = (width, value.shape[3])
    if offsets is None:
        return efficient_bytes(samples, tokens, key.shape[1], heads, widths, query.itemsize)
    packed = len(offsets) - 1
    return efficient_bytes(packed, longest, longest_key, heads, widths, query.itemsize)


def _efficient_sdpa(args: tuple[Any, ...]) -> int:
    _, query, key, value, *_ = args  # query: [samples, heads, tokens, width]
    samples, heads, tokens, width = query.shape
    widths = (width, value.shape[3])
    return efficient_bytes(samples, tokens, key.shape[2], heads, widths, query.itemsize)


# Operators of a plan. Tensors of a plan are on the CPU, so sdpa chooses the CPU's operator, which
# stands for the GPU's flash attention. See `sdpa_of_a_gpu` for the other kernel.
WORKSPACES: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "torch_attn._varlen_attn_backward": _varlen,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _sdpa,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_sdpa,
    "aten._efficient_attention_backward": _efficient,
}


def attention_workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an attention operator needs in addition to its results on CUDA; 0 for
    other operators. `func`: an overload of torch.ops."""
    workspace = WORKSPACES.get(f"{func.namespace}.{func._opname}")
    return 0 if workspace is None else workspace(args)


def sdpa_of_a_gpu(sdpa: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's sdpa for tensors on the CPU that stand for tensors on a GPU: it calls the
    memory-efficient kernel where a GPU takes it. Flash attention supports no mask, and cuDNN is not
    used outside of packed sequences.

    Source: sdp_utils.cpp and attention.cpp of torch, which also make a mask of numbers.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,  # scale, enable_gqa
    ) -> torch.Tensor:
        widths = (query.shape[-1], value.shape[-1])
        kernel = choose_kernel(current_target().capability, query.dtype, widths, False)
        is_efficient = kernel == "efficient" or (kernel == "varlen" and attn_mask is not None)
        if others.get("enable_gqa") or not is_efficient:
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, **others)
        bias = None
        if attn_mask is not None:
            bias = attn_mask
            if attn_mask.dtype == torch.bool:
                bias = torch.where(attn_mask, 0.0, query.new_full((), -torch.inf))
            bias = bias.expand(*query.shape[:3], key.shape[2])
        needs_gradient = any(tensor.requires_grad for tensor in (query, key, value))
        keeps_sums = torch.is_grad_enabled() and needs_gradient
        compute = torch.ops.aten._scaled_dot_product_efficient_attention
        how = (bias, keeps_sums, dropout_p, is_causal)
        output, *_ = compute(query, key, value, *how, scale=others.get("scale"))
        return output

    return attend
