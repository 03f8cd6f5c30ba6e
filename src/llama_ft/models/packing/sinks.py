"""Attention with sinks (gpt-oss): each head has a learned score that takes part in the softmax and attends to
nothing.

A kernel computes attention o without the sink, and l, the log-sum-exp of each token's scores. For a sink s:

    L = log(e^l + e^s)        y = e^(l - L) o        ds = sum over tokens of -e^(s - L) (g . y)

The kernel's backward pass gets y and L instead of o and l. From L it computes the softmax with the
sink, and from g . y the sum that its derivative needs. So it returns the gradients of query, key and
value, without a change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from llama_ft.models.packing.kernels import (
    AttentionCall,
    cpu_backward,
    cpu_forward,
    efficient_backward,
    efficient_forward,
    varlen_backward,
    varlen_forward,
)
from llama_ft.models.packing.packed_samples import PackedSamples


class _Kernel(NamedTuple):
    """See kernels.py for the arguments of both."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    takes_all_samples: bool
    shares_heads: bool  # query heads can share keys and values


KERNELS = {
    "varlen": _Kernel(varlen_forward, varlen_backward, True, True),
    "efficient": _Kernel(efficient_forward, efficient_backward, False, False),
    "cpu": _Kernel(cpu_forward, cpu_backward, False, True),
}


@torch.compiler.disable(reason="a graph would hold for one tuple of lengths")
def attend_with_sinks(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks: torch.Tensor,
    samples: PackedSamples,
    kernel: str,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Compute causal attention within each sample.

    Args:
        tensors: query, key and value, [1, heads, tokens, head_dim].
        sinks: [query heads].
        samples: of the packed sequence.
        kernel: one of KERNELS.
        scale: of the scores; None: 1 / sqrt(head_dim).
        window: how many tokens a token sees; None: all before it.

    Returns:
        [1, tokens, heads, head_dim].
    """
    chosen = KERNELS[kernel]
    query, *shared = tensors
    repeats = 1 if chosen.shares_heads else query.shape[1] // shared[0].shape[1]
    if repeats > 1:
        shared = [part.repeat_interleave(repeats, dim=1) for part in shared]
    if chosen.takes_all_samples:
        calls = [AttentionCall(query.shape[2], samples.longest, samples.offsets)]
    else:
        calls = [AttentionCall(length, length, None) for length in samples.lengths]
    how = (chosen, calls, scale, window)
    output = _SinkAttention.apply(query, *shared, sinks, *how)
    return cast(torch.Tensor, output).transpose(1, 2)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, sinks: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        kernel, calls, scale, window = how
        ctx.how = how
        _, heads, tokens, _ = query.shape
        # the layout that the memory-efficient kernel's backward pass assumes for any strides
        memory = query.new_empty(1, tokens, heads, value.shape[3])
        output = memory.transpose(1, 2)
        sums = []
        for call, sample in zip(calls, _divide(calls, query, key, value, output), strict=True):
            *inputs, target = sample
            plain, log_sums = kernel.forward(inputs, call, scale, window)
            total = torch.logaddexp(log_sums, sinks.float()[:, None])
            share = log_sums.sub(total).exp_()[..., : call.tokens]  # kernels may round tokens up
            torch.mul(plain, share.unsqueeze(-1), out=target)
            sums.append(total)
        ctx.save_for_backward(query, key, value, output, sinks, *sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, sinks, *sums = ctx.saved_tensors
        kernel, calls, scale, window = ctx.how
        gradients = [torch.empty_like(whole) for whole in (query, key, value)]
        samples = _divide(calls, gradient, query, key, value, output)
        targets = _divide(calls, *gradients)
        d_sinks = torch.zeros_like(sinks, dtype=torch.float32)
        for call, sample, total, target in zip(calls, samples, sums, targets, strict=True):
            if ctx.needs_input_grad[3]:
                of_output = (sample[0].float() * sample[-1]).sum((0, 3))  # [heads, tokens]
                share = sinks.float()[:, None].sub(total[0]).exp_()[:, : call.tokens]
                d_sinks.sub_(of_output.mul_(share).sum(1))
            parts = kernel.backward(sample, call, total, scale, window)
            for whole, part in zip(target, parts, strict=True):
                whole.copy_(part)
        none_for_how = [None] * len(ctx.how)
        return *gradients, d_sinks.to(sinks.dtype), *none_for_how


def _divide(calls: Sequence[AttentionCall], *sequences: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return views of each call's tokens of sequences [1, heads, tokens, width]."""
    lengths = [call.tokens for call in calls]
    views = [whole.split(lengths, dim=2) for whole in sequences]
    return [list(sample) for sample in zip(*views, strict=True)]
