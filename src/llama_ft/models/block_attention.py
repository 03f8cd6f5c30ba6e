"""The backward pass of causal attention, for packed short samples in bf16 on the CPU: a block of
queries at a time, over the keys from the first sample in the block on.

    queries   a a a b | b b c c | c d d e         samples a to e in blocks of equal length
    keys      a a a b | b b b c c | c c c d d e   of each block

torch's flash attention for CPUs takes a call per sample. Its forward pass is fast, its backward pass
takes 1.2 to 2.5 times as long as this one. As there, scores are computed again, in fp32.
"""

from functools import cache, lru_cache

import torch
from torch.nn import functional

from llama_ft.runtime.devices import MATMUL_FEATURES, cpu_features

LONGEST = 512  # tokens of a sample
BLOCK = 128  # queries
# oneDNN compiles and keeps kernels for every shape, on every thread, so lengths are rounded up. No
# earlier token sees the added ones, which have no gradient.
LENGTH_MULTIPLE = 32


@cache
def is_faster(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices in bf16. One that emulates it takes longer in
    blocks. In fp16 the products of scaled gradients could overflow. A plan replaces this
    function."""
    features = MATMUL_FEATURES[torch.bfloat16]
    return dtype == torch.bfloat16 and not cpu_features().isdisjoint(features)


def gradients_in_blocks(
    by_output: torch.Tensor,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: tuple[int, ...],
    scale: float,
) -> list[torch.Tensor]:
    """Return the gradients of query, key and value for attention within samples of `lengths`
    tokens.

    Args:
        by_output: gradient of the output, [1, heads, tokens, width].
        tensors: query, like `by_output`; key and value with as many heads or fewer, which query
            heads share.
    """
    tokens = by_output.shape[2]
    by_output, query, key, value = _padded(by_output, *tensors)
    by_query = torch.empty_like(query)
    # sums over blocks
    by_key = torch.zeros_like(key, dtype=torch.float32)
    by_value = torch.zeros_like(value, dtype=torch.float32)
    for block, keys, is_hidden in _blocks(lengths, query.shape[1]):
        queries = _together(query[:, block], key)
        outputs = _together(by_output[:, block], key)
        probabilities = _probabilities(queries, key[:, keys], is_hidden, scale)
        by_value[:, keys] += torch.bmm(probabilities.transpose(1, 2), outputs)
        by_probabilities = torch.bmm(outputs, value[:, keys].transpose(1, 2))
        by_scores = torch._softmax_backward_data(by_probabilities, probabilities, -1, query.dtype)
        by_key[:, keys] += torch.bmm(by_scores.transpose(1, 2), queries)
        of_block = torch.bmm(by_scores, key[:, keys])
        by_query[:, block] = of_block.view(by_query[:, block].shape)
    by_query *= scale
    by_key *= scale
    return [part[None, :, :tokens].to(query.dtype) for part in (by_query, by_key, by_value)]


def _padded(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return [heads, tokens, width] of [1, heads, tokens, width], with zeros at the end."""
    added = -parts[0].shape[2] % LENGTH_MULTIPLE
    return [functional.pad(part[0], (0, 0, 0, added)) if added else part[0] for part in parts]


def _together(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Join the queries of heads that share keys: [heads, n, width] -> [shared, heads / shared * n,
    width]."""
    return queries.reshape(len(key), -1, queries.shape[2])


@lru_cache(maxsize=1)  # all layers have the same blocks
def _blocks(lengths: tuple[int, ...], tokens: int) -> list[tuple[slice, slice, torch.Tensor]]:
    """Return the queries of each block, its keys, and which of them each query does not see: bool
    [queries, keys]. Added tokens are a sample of their own."""
    blocks = []
    starts = torch.zeros(tokens, dtype=torch.int64)  # per token: where its sample begins
    begin = 0
    for length in lengths:
        starts[begin : begin + length] = begin
        begin += length
    starts[begin:] = begin
    positions = torch.arange(tokens)
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        first = int(starts[start])
        first -= first % LENGTH_MULTIPLE
        block = slice(start, stop)
        keys = slice(first, stop)
        is_earlier = positions[keys] < starts[block, None]
        is_later = positions[keys] > positions[block, None]
        blocks.append((block, keys, is_earlier | is_later))
    return blocks


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, is_hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.bmm(queries.float() * scale, keys.float().transpose(1, 2))
    by_head = scores.view(-1, *is_hidden.shape)  # a view, written in place
    by_head.masked_fill_(is_hidden, -torch.inf)
    return torch.softmax(scores, dim=-1).to(queries.dtype)
