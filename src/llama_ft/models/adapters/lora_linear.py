"""PEFT's LoRA layer as one matmul: y = x W^T + bias + s d(x) A^T B^T, where d is dropout and s the
scaling.

PEFT's own layer makes five tensors of the size of its input or output, and keeps up to three of
them for backward. Here the matmul itself adds the low-rank part. Kept are x (shared by q, k and v),
u = d(x) A^T [tokens, r], and with dropout one byte per element:

    dB = s g^T u        t = s g B        dA = t^T d(x)        dx = g W + d'(t A)

The matmul is one operator, so selective activation checkpointing keeps only y and u. Random numbers
are the same as those of PEFT's dropout.
"""

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

from llama_ft.models.base.replaced import become
from llama_ft.models.quantization.layers import SCHEMES, QuantizedLinear, frozen_matmul
from llama_ft.operators import LIBRARY
from llama_ft.runtime.target import current_target

LIBRARY.define(
    "lora_linear(Tensor x, Tensor u, Tensor weight, Tensor? scale, Tensor? bias, Tensor b, float scaling, str scheme) "
    "-> Tensor"
)


def _lora_linear(
    x: Any,
    u: Any,
    weight: Any,
    scale: Any,
    bias: Any,
    b: Any,
    scaling: float,
    scheme: str,
) -> Any:
    """Compute y [n, out] from x [n, in] and u [n, r]. The schema above has one parameter for each
    operand: operators take tensors, numbers and strings, and no objects."""
    if scale is None and current_target().is_cuda:
        return _narrow_product(u, b.t(), scaling, bias).addmm_(x, weight.t())
    if scale is None:
        y = functional.linear(x, weight, bias)
    else:
        y = frozen_matmul(x, weight, scale, SCHEMES[scheme])
        y = y if bias is None else y.add_(bias)
    return y.addmm_(u, b.t(), alpha=scaling)


def _narrow_product(
    left: torch.Tensor, right: torch.Tensor, scaling: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute scaling x left [n, r] x right [r, m] + bias [m].

    A GPU waits for the bytes of this product, and for the FLOPs of the wide one. So this one comes
    first and only writes [n, m], to which the wide one adds in its last step. In the other order this
    one would also read [n, m]."""
    if bias is not None:
        return torch.addmm(bias, left, right, alpha=scaling)
    product = left.new_empty(len(left), right.shape[1])
    return product.addmm_(left, right, beta=0, alpha=scaling)


LIBRARY.impl("lora_linear", _lora_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("llama_ft::lora_linear", lib=LIBRARY)
def _output(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(len(x), len(others[4]))


# torch counts `addmm` only
flop_registry.setdefault(torch.ops.aten.addmm_, flop_registry[torch.ops.aten.addmm])


@register_flop_formula(torch.ops.llama_ft.lora_linear)
def _flops(x: torch.Size, *others: Any, **_: Any) -> int:
    b: torch.Size = others[4]
    return 2 * x[0] * b[0] * (x[1] + b[1])


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Return the bytes that the operator allocates and frees."""
    x = arguments[0]
    scale = arguments[3]
    b = arguments[5]
    return 0 if scale is None else x.shape[1] * len(b) * x.dtype.itemsize


def moved_bytes(arguments: tuple[Any, ...], y: torch.Tensor) -> int:
    """Return the bytes that the operator reads and writes in addition to its matmul with the weight: it
    computes the low-rank part, and adds it and the bias to y, and dequantizes the weight."""
    _, u, weight, scale, bias, *_ = arguments
    moved = u.nbytes + y.nbytes
    if scale is not None or not current_target().is_cuda:
        moved += y.nbytes
    if scale is not None:
        moved += weight.nbytes + scale.nbytes + workspace_bytes(arguments)
        moved += 0 if bias is None else 2 * y.nbytes
    return int(moved)


class _LowRank(torch.autograd.Function):
    """The backward pass and its inputs; `_Matmul` computes y. All tensors are kept before the
    matmul runs. So a checkpointed layer, which recomputes until all kept tensors exist, skips its
    last matmul: down_proj, a quarter of a Llama layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        scale: Any,
        a: Any,
        b: Any,
        scaling: float,
        dropout: float,
        scheme: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., in] -> a placeholder [..., out] of one unset number, which passes on the gradient
        of y; and u [n, r]."""
        ctx.factors = (scaling, 1 - dropout)
        ctx.scheme = scheme
        flat = x.reshape(-1, x.shape[-1])
        mask = None
        small = a.to(x.dtype)
        if dropout == 0 or x.numel() == 0:
            u = flat @ small.t()
        elif current_target().is_cuda:
            dropped, mask = torch.native_dropout(flat, dropout, True)
            u = dropped @ small.t()
            mask = mask.view(torch.uint8)
        else:  # there, multiplying by bool takes three times as long
            mask = torch.empty_like(flat, dtype=torch.uint8).bernoulli_(1 - dropout)
            u = (flat * mask) @ small.t() * (1 / (1 - dropout))
        ctx.save_for_backward(x, mask, u, weight, scale, a, b)
        ctx.mark_non_differentiable(u)
        output_shape = (*x.shape[:-1], len(b))
        placeholder = x.new_empty(()).expand(output_shape)  # nothing reads it
        return placeholder, u

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        x, mask, u, weight, scale, a, b = ctx.saved_tensors
        scaling, keep = ctx.factors
        trained = a.dtype
        # cast again: kept casts would be a copy of every adapter
        a = a.to(x.dtype)
        b = b.to(x.dtype)
        # [n, out], [n, in]
        g = gradient.reshape(-1, gradient.shape[-1])
        flat = x.reshape(-1, x.shape[-1])
        t = g @ b
        dx = None
        da = t.t() @ (flat if mask is None else flat * mask)
        if ctx.needs_input_grad[0]:
            w = weight
            if scale is not None:
                w = SCHEMES[ctx.scheme].dequantize(weight, scale, x.dtype)
            if mask is not None:
                dx = (g @ w).addcmul_(t @ a, mask, value=scaling / keep)
            elif current_target().is_cuda:
                dx = _narrow_product(t, a, scaling).addmm_(g, w)
            else:
                dx = (g @ w).addmm_(t, a, alpha=scaling)
            dx = dx.view(x.shape)
        da = da.mul_(scaling / keep)
        db = (g.t() @ u).mul_(scaling)
        da = da.to(trained)
        db = db.to(trained)
        # none for weight, scale, scaling, dropout and scheme
        return dx, None, None, da, db, None, None, None


class _Matmul(torch.autograd.Function):
    """Computes y. Its gradient is passed on to `placeholder`."""

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: torch.Tensor,
        x: torch.Tensor,
        *others: Any,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = torch.ops.llama_ft.lora_linear(flat, *others)
        # no view: Llama 4 adds to it in place
        whole: torch.Tensor = torch.ops.aten._unsafe_view(y, placeholder.shape)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *[None] * 8


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    scheme: str = "",
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute y [..., out] from x [..., in], a frozen weight [out, in] and bias, A [r, in] and B
    [out, r]. A quantized weight has a scale and a scheme."""
    if dropout == 0 and not torch.is_grad_enabled():
        # The same numbers without autograd, whose work per call is longer than one token's matmul.
        flat = x.reshape(-1, x.shape[-1])
        u = flat @ a.to(x.dtype).t()
        y = torch.ops.llama_ft.lora_linear(
            flat, u, weight, scale, bias, b.to(x.dtype), scaling, scheme
        )
        return cast(torch.Tensor, y.view(*x.shape[:-1], len(b)))
    placeholder, u = _LowRank.apply(x, weight, scale, a, b, scaling, dropout, scheme)
    # Detached: _LowRank has the backward pass of x and b, and `placeholder` leads to it.
    b = b.detach().to(x.dtype)
    x = x.detach()
    y = _Matmul.apply(placeholder, x, u, weight, scale, bias, b, scaling, scheme)
    return cast(torch.Tensor, y)


class FusedLora(LoraLinear):
    """PEFT's layer with the fused forward pass above if it is equivalent, otherwise with PEFT's
    own."""

    def forward(
        self,
        x: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute [..., out] from x [..., in]."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        is_changed = args or kwargs or self.disable_adapters or self.merged
        if is_changed or len(names) != 1 or not self._is_plain(names[0], x):
            return super().forward(x, *args, **kwargs)
        name = names[0]
        base: Any = self.base_layer
        dropout = self.lora_dropout[name]
        scale = None
        scheme = ""
        if isinstance(base, QuantizedLinear):
            scale = base.scale
            scheme = base.scheme_name
        p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        a = cast(Any, self.lora_A[name]).weight
        b = cast(Any, self.lora_B[name]).weight
        scaling = self.scaling[name]
        return lora_linear(x, base.weight, a, b, scaling, base.bias, scale, scheme, p)

    def _is_plain(self, name: str, x: torch.Tensor) -> bool:
        """Return whether the fused forward pass is equivalent to PEFT's."""
        a = self.lora_A[name].weight
        b = self.lora_B[name].weight
        base = cast(Any, self.base_layer)
        if not self.has_plain_form(name):
            return False
        if a.dtype != b.dtype or a.dtype not in (x.dtype, torch.float32):
            return False
        is_trained = a.requires_grad and b.requires_grad or not torch.is_grad_enabled()
        # autocast does not support meta
        has_autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if not is_trained or has_autocast:
            return False
        return isinstance(base, QuantizedLinear) or base.weight.dtype == x.dtype

    def has_plain_form(self, name: str) -> bool:
        """Return whether an adapter is a plain LoRA on a frozen linear layer without an FSDP unit
        inside, whose class fully_shard would change. Its weights may be fp32: they are cast to the
        input's dtype."""
        base: Any = self.base_layer
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        dropout: Any = self.lora_dropout[name]
        if name in self.lora_variant or self.lora_bias[name]:
            return False
        if type(a) is not nn.Linear or type(b) is not nn.Linear:
            return False
        if type(base) not in (nn.Linear, QuantizedLinear):
            return False
        if type(dropout) not in (nn.Identity, nn.Dropout):
            return False
        return not any(parameter.requires_grad for parameter in base.parameters())


def cast_where_used(model: nn.Module) -> set[nn.Parameter]:
    """Return the adapter weights that `FusedLora` casts to its compute dtype, so that fully_shard
    need not."""
    weights = set[nn.Parameter]()
    for module in model.modules():
        if not isinstance(module, FusedLora):
            continue
        for name in module.lora_A:
            if module.has_plain_form(name):
                weights.add(cast(Any, module.lora_A[name]).weight)
                weights.add(cast(Any, module.lora_B[name]).weight)
    return weights


def use_fused_lora(model: nn.Module) -> None:
    """Use the fused forward pass in PEFT's LoRA layers."""
    for module in model.modules():
        if type(module) is LoraLinear:
            become(module, FusedLora)
