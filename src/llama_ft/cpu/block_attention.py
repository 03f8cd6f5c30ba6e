"""Causal attention for packed short samples in bf16 on the CPU: a block of queries at a time, over
the keys from the first sample in the block on.

    queries   a a a b | b b c c | c d d e         samples a to e in blocks of equal length
    keys      a a a b | b b b c c | c c c d d e   of each block

torch's flash attention for CPUs takes a call per sample. Its backward pass takes 1.2 to 2.5 times as
long as this one. As there, scores are computed again, in fp32.

Its forward pass multiplies by MKL. On AMD processors, MKL's products of bf16 and of fp32 matrices
reach a quarter of the rate of oneDNN's bf16 products. So there the forward pass is in blocks, too,
and oneDNN multiplies queries and keys: in 0.45 to 0.9 of the time for samples of 60 to 512 tokens.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from llama_ft.operators import LIBRARY
from llama_ft.runtime.devices import MATMUL_FEATURES, cpu_features, cpu_vendor

LONGEST = 512  # tokens of a sample
BLOCK = 128  # queries
# oneDNN compiles and keeps kernels for every shape, on every thread, so lengths are rounded up. No
# earlier token sees the added ones, which have no gradient.
LENGTH_MULTIPLE = 32


@cache
def is_faster(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices in bf16. One that emulates it takes longer in
    blocks. In fp16 the products of scaled gradients could overflow."""
    features = MATMUL_FEATURES[torch.bfloat16]
    return dtype == torch.bfloat16 and not cpu_features().isdisjoint(features)


@cache
def is_faster_forward(dtype: torch.dtype) -> bool:
    """Return whether the forward pass, too, takes less time in blocks on this CPU."""
    return is_faster(dtype) and cpu_vendor() == "AuthenticAMD"


# Operators, so that a plan needs no real tensors, and selective checkpointing keeps the output and
# not those of the matmuls.
LIBRARY.define(
    "attention_in_blocks(Tensor query, Tensor key, Tensor value, int[] lengths, float scale) -> Tensor"
)
LIBRARY.define(
    "attention_in_blocks_backward(Tensor by_output, Tensor query, Tensor key, Tensor value, int[] lengths, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)


def attention_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Return attention within samples of `lengths` tokens: bf16 [1, heads, tokens, width], in
    memory [tokens, heads, width].

    Args:
        query: [1, heads, tokens, width].
        key, value: like `query`, with as many heads or fewer, which query heads share.
    """
    heads = query.shape[1]
    output = _output(query, key, value)
    query, key, value = _padded(query, key, value)
    for block, keys, is_hidden in _blocks(tuple(lengths), query.shape[1]):
        queries = _together(query[:, block], key)
        probabilities = _probabilities(queries, key[:, keys], is_hidden, scale)
        sums = torch.bmm(probabilities, value[:, keys])
        of_block = output[0, :, block]  # without added tokens
        of_block.copy_(sums.view(heads, -1, sums.shape[2])[:, : of_block.shape[1]])
        del queries, probabilities, sums  # not held while the next block is computed
    return output


LIBRARY.impl("attention_in_blocks", attention_in_blocks, "CPU")


@torch.library.register_fake("llama_ft::attention_in_blocks", lib=LIBRARY)
def _output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> torch.Tensor:
    heads, tokens = query.shape[1:3]
    return query.new_empty(1, tokens, heads, value.shape[3]).transpose(1, 2)


def gradients_in_blocks(
    by_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value for attention within samples of `lengths`
    tokens.

    Args:
        by_output: gradient of the output, [1, heads, tokens, width].
        query: like `by_output`.
        key, value: with as many heads or fewer, which query heads share.
    """
    tokens = by_output.shape[2]
    by_output, query, key, value = _padded(by_output, query, key, value)
    by_query = torch.empty_like(query)
    # sums over blocks
    by_key = torch.zeros_like(key, dtype=torch.float32)
    by_value = torch.zeros_like(value, dtype=torch.float32)
    for block, keys, is_hidden in _blocks(tuple(lengths), query.shape[1]):
        queries = _together(query[:, block], key)
        outputs = _together(by_output[:, block], key)
        keys_of_block = key[:, keys].contiguous()
        probabilities = _probabilities(queries, keys_of_block, is_hidden, scale)
        by_value[:, keys] += torch.bmm(probabilities.transpose(1, 2), outputs)
        # contiguous, because bmm would copy it transposed, which takes ten times as long
        values_of_block = value[:, keys].contiguous()
        by_probabilities = torch.bmm(outputs, values_of_block.transpose(1, 2))
        by_scores = torch._softmax_backward_data(by_probabilities, probabilities, -1, query.dtype)
        by_key[:, keys] += torch.bmm(by_scores.transpose(1, 2), queries)
        of_block = torch.bmm(by_scores, keys_of_block)
        by_query[:, block] = of_block.view(by_query[:, block].shape)
        # not held while the next block is computed
        del queries, outputs, keys_of_block, values_of_block
        del probabilities, by_probabilities, by_scores, of_block
    by_query *= scale
    by_key *= scale
    whole = [tensor[None, :, :tokens].to(query.dtype) for tensor in (by_query, by_key, by_value)]
    return whole[0], whole[1], whole[2]


LIBRARY.impl("attention_in_blocks_backward", gradients_in_blocks, "CPU")


@torch.library.register_fake("llama_ft::attention_in_blocks_backward", lib=LIBRARY)
def _gradients(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Return the bytes that an operator above allocates and frees: copies with added tokens, the
    longest block's scores and probabilities in fp32 and these in bf16, its queries and keys in fp32
    and in bf16, and what is added to its scores. In the backward pass these are also its gradient of
    the output, and the sums of the gradients of keys and values. The masks of all blocks are counted,
    too, although they are kept for the next layer."""
    *tensors, lengths, _ = arguments
    *_, query, key, value = tensors
    tokens = query.shape[2]
    padded = tokens + -tokens % LENGTH_MULTIPLE
    ranges = _ranges(tuple(lengths), padded)
    all_pairs = [(block.stop - block.start) * (keys.stop - keys.start) for block, keys in ranges]
    pairs = max(all_pairs)
    longest = max(keys.stop - keys.start for _, keys in ranges)
    added = sum(tensor.nbytes for tensor in tensors) if padded > tokens else 0
    of_pairs = query.shape[1] * pairs * (4 + 4 + 2)
    of_queries = query.shape[1] * min(BLOCK, padded) * query.shape[3]
    of_keys = key.shape[1] * longest * query.shape[3]
    is_backward = len(tensors) > 3
    copies = (4 + 2) * (of_queries + of_keys) + (2 * of_queries if is_backward else 0)
    masks = 4 * pairs + sum(all_pairs)
    sums = 4 * (key.numel() + value.numel()) if is_backward else 0
    return int(added + of_pairs + copies + masks + sums)


def _padded(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return [heads, tokens, width] of [1, heads, tokens, width], with zeros at the end."""
    added = -parts[0].shape[2] % LENGTH_MULTIPLE
    return [functional.pad(tensor[0], (0, 0, 0, added)) if added else tensor[0] for tensor in parts]


def _together(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Join the queries of heads that share keys: [heads, n, width] -> [shared, heads / shared * n,
    width]. Contiguous, because oneDNN would copy them for every product."""
    return queries.reshape(len(key), -1, queries.shape[2]).contiguous()


def _ranges(lengths: tuple[int, ...], tokens: int) -> list[tuple[slice, slice]]:
    """Return the queries of each block, and its keys. Tokens after the samples are a sample of their
    own."""
    starts = [0, *accumulate(lengths)]  # of the samples
    ranges = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        first = starts[bisect_right(starts, start) - 1]
        first -= first % LENGTH_MULTIPLE
        ranges.append((slice(start, stop), slice(first, stop)))
    return ranges


@lru_cache(maxsize=1)  # all layers have the same blocks
def _blocks(lengths: tuple[int, ...], tokens: int) -> list[tuple[slice, slice, torch.Tensor]]:
    """Return the queries of each block, its keys, and which of the last keys each query does not
    see: bool [queries, last keys]. Every query sees the keys before these."""
    blocks = []
    starts = torch.zeros(tokens, dtype=torch.int64)  # per token: where its sample begins
    begin = 0
    for length in lengths:
        starts[begin : begin + length] = begin
        begin += length
    starts[begin:] = begin
    positions = torch.arange(tokens)
    for block, keys in _ranges(lengths, tokens):
        is_earlier = positions[keys] < starts[block, None]
        is_later = positions[keys] > positions[block, None]
        is_hidden = is_earlier | is_later
        first_hidden = int(is_hidden.any(0).int().argmax())
        blocks.append((block, keys, is_hidden[:, first_hidden:].clone()))
    return blocks


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, is_hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the softmax of the scores, [shared, heads / shared * n, keys], in bf16. The products
    of bf16 numbers are exact in fp32, whoever computes them."""
    # contiguous, because oneDNN would copy them
    wide_queries = queries.to(torch.float32, memory_format=torch.contiguous_format)
    wide_keys = keys.to(torch.float32, memory_format=torch.contiguous_format)
    with _products_by_onednn():
        scores = torch.bmm(wide_queries, wide_keys.transpose(1, 2))
    scores *= scale
    queries_of_block, hidden_keys = is_hidden.shape
    by_head = scores.view(-1, queries_of_block, scores.shape[2])
    # added, which takes a seventh of the time of masking the scores of all heads
    bias = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
    by_head[..., by_head.shape[2] - hidden_keys :] += bias
    return torch.softmax(scores, dim=-1).to(queries.dtype)


@contextmanager
def _products_by_onednn() -> Iterator[None]:
    """Let oneDNN multiply fp32 matrices as bf16 ones, with sums in fp32, where that is faster.
    Nothing is rounded if the numbers are those of bf16 matrices."""
    if not is_faster_forward(torch.bfloat16):
        yield
        return
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
