"""Memory that CUDA's attention kernels allocate in their backward pass and free before they return.

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


# Operators of a plan. Tensors of a plan are on the CPU, so sdpa chooses the CPU's operator; on the
# GPU it is flash attention, or with a mask memory-efficient attention with repeated key heads.
WORKSPACES: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "torch_attn._varlen_attn_backward": _varlen,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _sdpa,
    "aten._efficient_attention_backward": _efficient,
}


def attention_workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an attention operator needs in addition to its results on CUDA; 0 for
    other operators. `func`: an overload of torch.ops."""
    workspace = WORKSPACES.get(f"{func.namespace}.{func._opname}")
    return 0 if workspace is None else workspace(args)
