"""Causal attention of one short sample on the CPU in 16 bits, for a block of queries at a time.

torch's flash attention for CPUs takes 1.4 to 2 times as long for 512 tokens and 1.5 to 3 times for 64 tokens, mostly in
the backward pass (AMD Zen 4 with AVX512-BF16, one thread). Longer samples would need more calls and memory. As in
torch, scores and softmax are in fp32, and the backward pass recomputes the probabilities.
"""

import torch
from torch.nn import functional

ATEN = torch.ops.aten
LONGEST_IN_BLOCKS = 512  # tokens of a sample
BLOCK = 64  # queries
# oneDNN compiles and keeps kernels for every length, on every thread: 11 MiB each on 4 threads of an AMD Zen 4. So
# lengths are rounded up. Tokens after the end have no gradient, and no earlier token sees them.
KERNEL_ROWS = 32


def is_short(query: torch.Tensor, window: int | None) -> bool:
    """Return whether `attend` supports a sample [1, heads, tokens, head_dim]: 16 bits, short, and inside the window."""
    return query.itemsize == 2 and query.shape[2] <= min(LONGEST_IN_BLOCKS, window or LONGEST_IN_BLOCKS)


def padded(part: torch.Tensor) -> torch.Tensor:
    """Pad a sample [1, heads, tokens, head_dim] with zeros to a multiple of KERNEL_ROWS tokens."""
    return functional.pad(part, (0, 0, 0, -part.shape[2] % KERNEL_ROWS))


def attend(row: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Compute attention from query, key and value of a sample: [1, heads, tokens, head_dim] in and out. Several query
    heads may share a head of key and value."""
    query, key, value = (padded(part) for part in row)
    outputs = []
    for start, stop in _blocks(query):
        probabilities = _probabilities(query, key, start, stop, scale)
        outputs.append(torch.bmm(probabilities, value[0, :, :stop]).view(1, query.shape[1], stop - start, -1))
    return torch.cat(outputs, dim=2)[:, :, : row[0].shape[2]]


def attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """Compute the gradients of query, key (fp32) and value (fp32) from the output's gradient, all padded."""
    heads, by_query = key.shape[1], []
    by_key, by_value = (torch.zeros_like(each[0], dtype=torch.float32) for each in (key, value))
    for start, stop in _blocks(query):
        probabilities = _probabilities(query, key, start, stop, scale)
        by_output, queries = (part[0, :, start:stop].reshape(heads, -1, part.shape[3]) for part in (gradient, query))
        by_value[:, :stop] += torch.bmm(probabilities.transpose(1, 2), by_output)
        by_probabilities = torch.bmm(by_output, value[0, :, :stop].transpose(1, 2))
        by_scores = ATEN._softmax_backward_data(by_probabilities, probabilities, -1, query.dtype).mul_(scale)
        by_query.append(torch.bmm(by_scores, key[0, :, :stop]).view(1, query.shape[1], stop - start, -1))
        by_key[:, :stop] += torch.bmm(by_scores.transpose(1, 2), queries)
    return [torch.cat(by_query, dim=2), by_key[None], by_value[None]]


def _probabilities(query: torch.Tensor, key: torch.Tensor, start: int, stop: int, scale: float) -> torch.Tensor:
    """Return the probabilities of queries start to stop: [key heads, queries of the heads that share one, stop]."""
    queries = query[0, :, start:stop].reshape(key.shape[1], -1, key.shape[3]).float()
    # Not in place: selective checkpointing keeps what bmm returns.
    scores = torch.bmm(queries, key[0, :, :stop].transpose(1, 2).float()) * scale
    later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
    scores.view(query.shape[1], stop - start, stop)[..., start:].masked_fill_(later, -torch.inf)
    return torch.softmax(scores, dim=-1).to(query.dtype)


def _blocks(query: torch.Tensor) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, query.shape[2])) for start in range(0, query.shape[2], BLOCK)]
