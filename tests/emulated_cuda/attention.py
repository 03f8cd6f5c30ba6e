"""Attention kernels of CUDA by their formula. Each is one launch forward and one backward."""

from collections.abc import Callable
from typing import Any

import torch
from emulated_cuda.device import CudaTensor, unwrap
from emulated_cuda.recorder import RECORDER
from torch.nn import functional

ATEN = torch.ops.aten
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
    **___: Any,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn for samples of a packed sequence, each causal, or for
    images."""
    lengths = unwrap(offsets).diff().tolist()
    assert max(lengths) == longest
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    is_causal = window_size[1] == 0

    def formula(*tensors: torch.Tensor) -> torch.Tensor:
        by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]
        output = _per_sample(by_head, lengths, scale, window, is_causal)[0]
        return output.transpose(0, 1).contiguous()

    return _AttentionKernel.apply("varlen attention", formula, query, key, value)


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
    """aten._efficient_attention_forward: output, sums, and what is not used."""
    RECORDER.launch("efficient attention")
    formula = _efficient_formula(offsets, scale, window_size)
    output = formula(unwrap(query), unwrap(key), unwrap(value))
    sums = torch.zeros(1, query.shape[2], query.shape[1])
    return CudaTensor(output), CudaTensor(sums), None, None, None, None


def efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: None,
    output: torch.Tensor,
    offsets: torch.Tensor | None,
    *_: Any,
    scale: float | None = None,
    window_size: int | None = None,
) -> tuple[Any, ...]:
    """aten._efficient_attention_backward: gradients of query, key and value, and none of a bias."""
    RECORDER.launch("efficient attention backward")
    formula = _efficient_formula(offsets, scale, window_size)
    inputs = [unwrap(query), unwrap(key), unwrap(value)]
    return *map(CudaTensor, gradients_of(formula, inputs, unwrap(gradient))), None


def _efficient_formula(
    offsets: torch.Tensor | None, scale: float | None, window: int | None
) -> Formula:
    def formula(*tensors: torch.Tensor) -> torch.Tensor:
        tokens = tensors[0].shape[1]
        lengths = [tokens] if offsets is None else unwrap(offsets).diff().tolist()
        by_head = [tensor.transpose(1, 2) for tensor in tensors]
        return _per_sample(by_head, lengths, scale, window).transpose(1, 2)

    return formula
