"""Attention kernels of CUDA by their formula. Each is one launch forward and one backward."""

from collections.abc import Callable
from typing import Any

import torch
from emulated_cuda.device import CudaTensor, unwrap
from emulated_cuda.recorder import RECORDER
from torch.nn import functional

ATEN = torch.ops.aten
EFFICIENT_MULTIPLE = (
    32  # to which the memory-efficient kernel rounds up the tokens of a log-sum-exp
)
sdpa_on_cpu = functional.scaled_dot_product_attention
Formula = Callable[..., torch.Tensor]  # of query, key and value on the CPU


class _AttentionKernel(torch.autograd.Function):
    """A formula of query, key and value as one kernel."""

    @staticmethod
    def forward(
        ctx: Any, name: str, formula: Formula, query: Any, key: Any, value: Any
    ) -> torch.Tensor:
        RECORDER.launch(name)
        ctx.name = name
        ctx.formula = formula
        ctx.save_for_backward(query, key, value)
        return CudaTensor(formula(query.inner, key.inner, value.inner))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        RECORDER.launch(f"{ctx.name} backward")
        inputs = [unwrap(saved) for saved in ctx.saved_tensors]
        gradients = gradients_of(ctx.formula, inputs, unwrap(gradient))
        return None, None, *map(CudaTensor, gradients)


def gradients_of(
    formula: Formula, inputs: list[torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(formula(*leaves), leaves, gradient)


def _attend(
    query: torch.Tensor,  # [batch, heads, tokens, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if mask is not None and mask.dtype == torch.bool:  # the formula would add it as 0 and 1
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    output, _ = ATEN._scaled_dot_product_attention_math(
        query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function. Its kernel for CUDA is chosen in code that a build for CPUs lacks."""
    if not isinstance(query, CudaTensor):
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return sdpa_on_cpu(query, key, value, attn_mask, dropout_p, is_causal, **how)
    assert dropout_p == 0, "attention dropout is not emulated"
    name = "cudnn attention" if torch.backends.cuda.cudnn_sdp_enabled() else "sdpa"
    mask = unwrap(attn_mask)

    def formula(*tensors: torch.Tensor) -> torch.Tensor:
        return _attend(*tensors, mask, is_causal, scale, enable_gqa)

    return _AttentionKernel.apply(name, formula, query, key, value)


def varlen_attn(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    _: torch.Tensor,
    longest: int,
    __: int,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_aux: Any = None,
    **___: Any,
) -> Any:
    """torch.nn.attention.varlen.varlen_attn for samples of a packed sequence, each causal, or for
    images."""
    lengths = unwrap(offsets).diff().tolist()
    assert max(lengths) == longest
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    is_causal = window_size[1] == 0
    if return_aux is not None:
        assert is_causal
        RECORDER.launch("varlen attention")
        by_head = [unwrap(tensor).transpose(0, 1) for tensor in (query, key, value)]
        output, log_sums = _output_and_sums(by_head, lengths, scale, window)
        return CudaTensor(output.transpose(0, 1).contiguous()), CudaTensor(log_sums)

    def formula(*tensors: torch.Tensor) -> torch.Tensor:
        by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]
        output = _per_sample(by_head, lengths, scale, window, is_causal)[0]
        return output.transpose(0, 1).contiguous()

    return _AttentionKernel.apply("varlen attention", formula, query, key, value)


def varlen_backward(
    gradient: torch.Tensor,  # [tokens, heads, head_dim]
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,  # [heads, tokens]
    offsets: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    """torch_attn._varlen_attn_backward."""
    RECORDER.launch("varlen attention backward")
    *_, scale, (earlier, _) = others
    tensors = (gradient, query, key, value, output)
    by_head = [unwrap(tensor).transpose(0, 1) for tensor in tensors]
    lengths = unwrap(offsets).diff().tolist()
    window = earlier + 1 if earlier >= 0 else None
    gradients = _gradients(by_head, unwrap(log_sums), lengths, scale, window)
    return tuple(CudaTensor(part.transpose(0, 1).contiguous()) for part in gradients)


def _visible(lengths: list[int], window: int | None) -> torch.Tensor:
    """Return which tokens of a packed sequence see which, [tokens, tokens]."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = len(sample)
    return (sample[:, None] == sample).tril().triu(1 - (window or tokens))


def _scores(
    query: torch.Tensor,  # [heads, tokens, head_dim]
    key: torch.Tensor,
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().transpose(1, 2) * scale
    return scores.masked_fill(~_visible(lengths, window), float("-inf"))


def _output_and_sums(
    tensors: list[torch.Tensor],  # query, key and value [heads, tokens, head_dim]
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the log-sum-exp of each token's scores, [heads, tokens]."""
    query, *shared = tensors
    key, value = (part.repeat_interleave(len(query) // len(part), 0) for part in shared)
    scores = _scores(query, key, lengths, scale, window)
    output = scores.softmax(-1) @ value.float()
    return output.to(query.dtype), scores.logsumexp(-1)


def _gradients(
    tensors: list[torch.Tensor],  # gradient, query, key, value and output [heads, tokens, head_dim]
    log_sums: torch.Tensor,
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> list[torch.Tensor]:
    """Return the gradients of query, key and value, as kernels compute them: from the output and the
    log-sum-exp that they get."""
    gradient, query, key, value, output = (tensor.float() for tensor in tensors)
    groups = len(query) // len(key)
    key, value = (part.repeat_interleave(groups, 0) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    shares = (_scores(query, key, lengths, scale, window) - log_sums[..., None]).exp()
    of_shares = gradient @ value.transpose(1, 2) - (gradient * output).sum(-1, keepdim=True)
    of_scores = shares * of_shares * scale
    of_keys = of_scores.transpose(1, 2) @ query
    of_values = shares.transpose(1, 2) @ gradient
    shared = [part.unflatten(0, (-1, groups)).sum(1) for part in (of_keys, of_values)]
    return [part.to(tensors[1].dtype) for part in (of_scores @ key, *shared)]


def _per_sample(
    tensors: list[torch.Tensor],  # query, key and value [1, heads, tokens, head_dim]
    lengths: list[int],
    scale: float | None,
    window: int | None,
    is_causal: bool = True,
) -> torch.Tensor:
    outputs = []
    for query, key, value in zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True):
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool)
        if is_causal:
            mask = mask.tril()
        if window is not None:
            mask = mask.triu(1 - window)
        shares_heads = query.shape[1] != key.shape[1]
        outputs.append(_attend(query, key, value, mask, False, scale, shares_heads))
    return torch.cat(outputs, dim=2)


def efficient_forward(
    query: torch.Tensor,  # [1, tokens, heads, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    offsets: torch.Tensor | None,
    *_: Any,
    scale: float | None = None,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    """aten._efficient_attention_forward: output, log-sum-exp, and what is not used."""
    RECORDER.launch("efficient attention")
    by_head = [unwrap(tensor)[0].transpose(0, 1) for tensor in (query, key, value)]
    lengths = _lengths(by_head[0], offsets)
    output, log_sums = _output_and_sums(by_head, lengths, scale, window_size)
    added = -len(log_sums[0]) % EFFICIENT_MULTIPLE if offsets is None else 0
    padded = functional.pad(log_sums, (0, added), value=float("inf"))
    result = output.transpose(0, 1).contiguous()
    return CudaTensor(result[None]), CudaTensor(padded[None]), None, None, None, None


def efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    output: torch.Tensor,
    offsets: torch.Tensor | None,
    *others: Any,
    scale: float | None = None,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    """aten._efficient_attention_backward: gradients of query, key and value, and none of a bias."""
    RECORDER.launch("efficient attention backward")
    tensors = (gradient, query, key, value, output)
    by_head = [unwrap(tensor)[0].transpose(0, 1) for tensor in tensors]
    lengths = _lengths(by_head[1], offsets)
    _, _, _, log_sums, *_ = others
    sums = unwrap(log_sums)[0][:, : by_head[1].shape[1]]
    gradients = _gradients(by_head, sums, lengths, scale, window_size)
    return *(CudaTensor(part.transpose(0, 1)[None].contiguous()) for part in gradients), None


def _lengths(by_head: torch.Tensor, offsets: torch.Tensor | None) -> list[int]:
    """Return the tokens of each sample of a tensor [heads, tokens, head_dim]."""
    return [by_head.shape[1]] if offsets is None else unwrap(offsets).diff().tolist()
