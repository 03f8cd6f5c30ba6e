"""peft's LoRA layer as one product: y = x W^T + bias + s d(x) A^T B^T, where d is dropout.

Of peft's own modules each layer makes five tensors of the input's or the output's size on the way and keeps up to three
of them for the backward pass: x, d(x) and on the CPU the mask in x's dtype. Here the low-rank part is added by the
product itself, and kept are x (which q, k and v share), u = d(x) A^T [tokens, r] and, with dropout, a byte an element:

    dB = s g^T u        t = s g B        dA = t^T d(x)        dx = g W + d'(t A)

The forward pass is one operator, so that selective checkpointing keeps y and u and nothing in between. Random numbers
are those that peft's dropout would draw.
"""

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from llama_ft.models.quantized import QuantizedLinear, frozen_product, scheme_of
from llama_ft.models.wide import is_wide, row_blocks

_LIBRARY = torch.library.Library("llama_ft", "DEF")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor? dropped, Tensor? mask, Tensor weight, Tensor? scale, Tensor? bias, Tensor a, "
    "Tensor b, float scaling, float keep, str scheme) -> (Tensor, Tensor)"
)


def _lora_linear(
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    mask: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    keep: float,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, in] -> y [n, out] and u [n, r]. What is kept of x is `keep` of it, as 1 / keep; d(x) is `dropped`, or x
    where `mask` is."""
    if not is_wide(x, a.shape[1] * b.shape[0]):
        if scale is None:
            y = functional.linear(x, weight, bias)
        else:
            y = frozen_product(x, weight, scale, scheme_of(scheme))
            y = y if bias is None else y.add_(bias)
        u = (x if dropped is None else dropped) @ a.t()
        return y.addmm_(u, b.t(), alpha=scaling), u
    y, u = x.new_empty(len(x), len(b)), x.new_empty(len(x), len(a))
    w, a, b = _dense(weight, scale, scheme, torch.float32).t(), a.float().t(), b.float().t()
    for rows in row_blocks(len(x), max(w.shape)):
        wide = x[rows].float()
        block = wide @ w if bias is None else torch.addmm(bias.float(), wide, w)
        low = (wide if mask is None else _drop(wide, mask[rows], keep)) @ a
        u[rows], y[rows] = low, block.addmm_(low, b, alpha=scaling)
    return y, u


def _dense(weight: torch.Tensor, scale: torch.Tensor | None, scheme: str, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if scale is None else scheme_of(scheme).dequantize(weight, scale, dtype)


def _drop(values: torch.Tensor, mask: torch.Tensor, keep: float) -> torch.Tensor:
    return torch.ops.aten.native_dropout_backward(values, mask, 1 / keep)


def _shapes(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = others[5:7]
    return x.new_empty(len(x), len(b)), x.new_empty(len(x), len(a))


_LIBRARY.impl("lora_linear", _lora_linear, "CompositeExplicitAutograd")
torch.library.register_fake("llama_ft::lora_linear", _shapes, lib=_LIBRARY)


@register_flop_formula(torch.ops.llama_ft.lora_linear)
def _flops(x: torch.Size, *others: Any, **_: Any) -> int:
    a, b = others[5:7]
    return 2 * x[0] * (a[1] * b[0] + a.numel() + b.numel())


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Bytes that the operator allocates and frees."""
    x, weight, scale, a, b = (arguments[place] for place in (0, 3, 4, 6, 7))
    weights = a.shape[1] * b.shape[0]
    if is_wide(x, weights):
        block = next(row_blocks(len(x), max(a.shape[1], b.shape[0])))
        return 4 * (weights + min(block.stop, len(x)) * (a.shape[1] + b.shape[0]))
    return 0 if scale is None else weights * x.dtype.itemsize


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        dropout: float,
        scheme: str,
    ) -> torch.Tensor:
        ctx.scaling, ctx.keep, ctx.scheme = scaling, 1 - dropout, scheme
        flat, dropped, mask = x.reshape(-1, x.shape[-1]), None, None
        if dropout > 0:
            if is_wide(x, a.shape[1] * b.shape[0]):
                mask = torch.empty_like(flat, dtype=torch.bool).bernoulli_(1 - dropout)
            else:
                dropped, mask = torch.native_dropout(flat, dropout, True)
        y, u = torch.ops.llama_ft.lora_linear(
            flat, dropped, mask, weight, scale, bias, a, b, scaling, 1 - dropout, scheme
        )
        ctx.save_for_backward(x, mask, u, weight, scale, a, b)
        return cast(torch.Tensor, y.view(*x.shape[:-1], -1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, mask, u, weight, scale, a, b = ctx.saved_tensors
        g, flat = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        wide = is_wide(x, a.shape[1] * b.shape[0])
        dtype = torch.float32 if wide else x.dtype
        w = _dense(weight, scale, ctx.scheme, dtype) if ctx.needs_input_grad[0] else None
        dx: torch.Tensor | None
        if wide:
            dx, da, db = torch.empty_like(flat), torch.zeros_like(a, dtype=dtype), torch.zeros_like(b, dtype=dtype)
            a, b = a.float(), b.float()
            for rows in row_blocks(len(flat), max(a.shape[1], len(b))):
                part = g[rows].float(), flat[rows].float(), None if mask is None else mask[rows], u[rows].float()
                of_x, of_a, of_b = _gradients(*part, w, a, b, ctx.scaling, ctx.keep)
                da, db = da.add_(of_a), db.add_(of_b)
                if of_x is not None:
                    dx[rows] = of_x
            da, db = da.to(x.dtype), db.to(x.dtype)
        else:
            dx, da, db = _gradients(g, flat, mask, u, w, a, b, ctx.scaling, ctx.keep)
        return None if w is None else dx.view(x.shape), None, None, None, da, db, None, None, None


def _gradients(
    g: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    u: torch.Tensor,
    w: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    keep: float,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Those of x (unless w is None), A and B, from that of y, g [n, out]."""
    t = g @ b
    da = t.t() @ (x if mask is None else _drop(x, mask, keep))
    db = g.t() @ u
    if w is None:
        dx = None
    elif mask is None:
        dx = (g @ w).addmm_(t, a, alpha=scaling)
    else:
        dx = (g @ w).add_(_drop(t @ a, mask, keep), alpha=scaling)
    return dx, da.mul_(scaling), db.mul_(scaling)


class FusedLora(LoraLinear):
    """peft's layer with the forward pass above where that is the same, and peft's own elsewhere."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.disable_adapters or self.merged or len(names) != 1 or not self._is_plain(names[0], x):
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))
        name, base, dropout = names[0], self.base_layer, self.lora_dropout[names[0]]
        scale, scheme = (base.scale, base.scheme.code) if isinstance(base, QuantizedLinear) else (None, "")
        p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return cast(torch.Tensor, _Lora.apply(x, base.weight, scale, base.bias, a, b, self.scaling[name], p, scheme))

    def _is_plain(self, name: str, x: torch.Tensor) -> bool:
        """Whether an adapter is a plain LoRA that is trained beside a frozen linear layer, all of one dtype, with no
        module that is gathered by itself (fully_shard gives those classes of their own)."""
        base, a, b, dropout = self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        if name in self.lora_variant or type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
            return False
        if type(base) not in (nn.Linear, QuantizedLinear) or type(dropout) not in (nn.Identity, nn.Dropout):
            return False
        is_trained = a.weight.requires_grad and b.weight.requires_grad
        is_frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
        floats = [x, a.weight, b.weight, *([] if isinstance(base, QuantizedLinear) else [base.weight])]
        return (
            (is_trained or not torch.is_grad_enabled())
            and is_frozen
            and len({tensor.dtype for tensor in floats}) == 1
            and not torch.is_autocast_enabled(x.device.type)
        )


def use_fused_lora(model: nn.Module) -> None:
    """Give peft's LoRA layers the forward pass above."""
    for module in model.modules():
        if type(module) is LoraLinear:
            module.__class__ = FusedLora
