"""Llama's RMSNorm on the CPU, in blocks of rows that stay in the processor's cache.

Transformers' own computes with whole tensors in fp32, and autograd keeps one of them, and one in 16
bits if the weight is trained. Here the input itself, which must not change before the backward pass,
and one number per row are kept:

    r = 1 / sqrt(mean(x^2) + eps)    n = r x                      y = w n
    d = w g                          dx = r (d - n mean(d n))     dw = g n, summed over rows

y is that of Transformers bit by bit. The gradient of w is summed in fp32. Models in fp32 compute as
Transformers does, so that their gradients are the same bits, too.
"""

from typing import Any, cast

import torch
from torch import nn

from llama_ft.operators import LIBRARY

LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
LIBRARY.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor r, bool for_weight) -> (Tensor, Tensor)"
)
# Numbers of a block: 1 MiB in fp32.
BLOCK = 2**18
DTYPES = (torch.bfloat16, torch.float16)


def rms_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a norm [..., width] of x [..., width], as the forward method of LlamaRMSNorm."""
    weight = cast(torch.Tensor, norm.weight)
    is_short = x.numel() <= BLOCK and not torch.is_grad_enabled()  # such as a generated token
    if x.dtype != weight.dtype or x.dtype not in DTYPES or is_short:
        return cast(torch.Tensor, type(norm).forward(norm, x))
    return cast(torch.Tensor, _RMSNorm.apply(x, weight, norm.variance_epsilon))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, r = torch.ops.llama_ft.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return cast(torch.Tensor, y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        for_weight = ctx.needs_input_grad[1]
        by_x, by_weight = torch.ops.llama_ft.rms_norm_backward(gradient, x, weight, r, for_weight)
        return by_x, by_weight if for_weight else None, None


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [..., width] and r [rows, 1]."""
    rows = x.reshape(-1, len(weight))
    y = torch.empty_like(rows)
    r = rows.new_empty(len(rows), 1, dtype=torch.float32)
    count = _rows_at_once(weight)
    blocks = zip(rows.split(count), y.split(count), r.split(count), strict=True)
    for x_rows, y_rows, r_rows in blocks:
        wide = x_rows.float()
        torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps, out=r_rows)
        torch.mul(weight, wide.mul_(r_rows).to(x.dtype), out=y_rows)
    # no view: Mixtral changes it in place
    return torch.ops.aten._unsafe_view(y, x.shape), r


def _gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    r: torch.Tensor,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight, which is empty unless `for_weight`."""
    rows = x.reshape(-1, len(weight))
    by_rows = gradient.reshape(rows.shape)
    by_x = torch.empty_like(rows)
    by_weight = r.new_zeros(len(weight) if for_weight else 0)
    count = _rows_at_once(weight)
    parts = [tensor.split(count) for tensor in (by_rows, rows, r, by_x)]
    for g_rows, x_rows, r_rows, by_x_rows in zip(*parts, strict=True):
        n = x_rows * r_rows  # fp32, as r
        if for_weight:
            by_weight += (g_rows * n).sum(0)
        d = (g_rows * weight).float()
        mean = (d * n).mean(-1, keepdim=True)
        by_x_rows.copy_(d.addcmul_(n, mean, value=-1).mul_(r_rows))
        del n, d  # before the next block
    return by_x.view(x.shape), by_weight.to(weight.dtype)


def _rows_at_once(weight: torch.Tensor) -> int:
    return max(1, BLOCK // len(weight))


LIBRARY.impl("rms_norm", _norm, "CPU")
LIBRARY.impl("rms_norm_backward", _gradients, "CPU")


@torch.library.register_fake("llama_ft::rms_norm", lib=LIBRARY)
def _fake_norm(
    x: torch.Tensor, weight: torch.Tensor, _: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r = x.new_empty(x.numel() // len(weight), 1, dtype=torch.float32)
    return x.new_empty(x.shape), r


@torch.library.register_fake("llama_ft::rms_norm_backward", lib=LIBRARY)
def _fake_gradients(
    _: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, __: torch.Tensor, for_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(len(weight) if for_weight else 0)


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Return the bytes that an operator above allocates and frees: up to three tensors of a block in
    fp32, and copies of tensors that are not contiguous, such as gradients of Qwen3's queries."""
    is_backward = len(arguments) > 3
    whole = arguments[:2] if is_backward else arguments[:1]
    x = whole[-1]
    weight = arguments[len(whole)]
    numbers = min(x.numel(), _rows_at_once(weight) * len(weight))
    copied = sum(tensor.nbytes for tensor in whole if not tensor.is_contiguous())
    return int(copied + numbers * torch.float32.itemsize * (3 if is_backward else 2))
