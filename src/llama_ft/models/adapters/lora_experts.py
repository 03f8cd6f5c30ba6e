"""LoRA on stacked experts as small matmuls: x W + s (x L) R, with L R the product of two factors.

PEFT replaces the weight of a stack by the sum W + s L R during each pass: a copy of all experts,
which autograd keeps, and whose gradient has the size of all experts, too. Here an experts' module
reads a `LowRankSum` as its weight, which takes part in torch's functions by the protocol of
`__torch_function__`. Products with it are computed in parts. All other functions get the sum, so
none can miss the adapter.

Of a grouped matmul, x [tokens, in] sorted by experts and u = x L [tokens, r] are kept:

    dR = s u^T g    t = s g R^T    dL = x^T t    dx = g W^T + t L^T    (for each expert)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from llama_ft.libraries.evidence import EXPERTS_IMPLEMENTATIONS, is_experts
from llama_ft.libraries.transformers_private import private
from llama_ft.models.adapters.lora_linear import lora_linear
from llama_ft.models.base.grouped_matmul import multiplied, multiplies_by_group, placed
from llama_ft.models.base.replaced import become, reads_as
from llama_ft.models.quantization.layers import QuantizedStacks
from llama_ft.operators import LIBRARY
from llama_ft.runtime.target import current_target

OPS = torch.ops.llama_ft
LIBRARY.define(
    "lora_experts(Tensor x, Tensor u, Tensor weight, Tensor right, Tensor ends, float scaling) -> Tensor"
)
# torch's grouped matmul wants rows that start at multiples of these bytes.
ALIGNMENT = 16
# What a weight tells without its values. Everything else is read of the sum.
FACTS = ("shape", "dtype", "device", "ndim", "is_cuda", "size", "dim")


def _lora_experts(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Compute y [tokens, out] from x [tokens, in] and u [tokens, r], sorted by experts. Those of
    expert e end before ends[e]; see `placed`."""
    if multiplies_by_group(x.dtype):
        return multiplied(x, weight, ends, (u, _with_unit_stride(right), scaling))
    y = functional.grouped_mm(x, weight, offs=ends)
    return y.add_(_small_product(u, _ready(right, 1), ends), alpha=scaling)


LIBRARY.impl("lora_experts", _lora_experts, "CompositeExplicitAutograd")


@torch.library.register_fake("llama_ft::lora_experts", lib=LIBRARY)
def _output(x: torch.Tensor, u: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(len(x), weight.shape[2])


@register_flop_formula(torch.ops.llama_ft.lora_experts)
def _flops(x: torch.Size, u: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[2] * (x[1] + u[1])


def workspace_bytes(arguments: tuple[Any, ...]) -> int:
    """Return the bytes that the operator allocates and frees: the low-rank part of y, and R; see
    `_small_product`. Experts one after another need less, but a plan is for any GPU."""
    x, u, weight, right, *_ = arguments
    itemsize = x.dtype.itemsize
    part = len(x) * weight.shape[2]
    rank = u.shape[1]  # filled up with zeros
    factor = right.numel() // right.shape[1] * rank
    is_copied = rank != right.shape[1] or 1 not in right.stride()[-2:]
    copied = factor * itemsize if is_copied else 0
    if _is_as_stored(x):
        return int(copied + part * itemsize)
    wide = torch.float32.itemsize
    multiplied = (u.numel() + factor + part) * wide
    rounded = part * (wide + itemsize)
    return int(copied + max(multiplied, rounded))


def _ready(factor: torch.Tensor, rank_dimension: int) -> torch.Tensor:
    """Return the factors of all experts as a grouped matmul needs them: r filled up with zeros, and
    rows or columns contiguous. PEFT's B of all experts is one matrix with the experts innermost."""
    lacking = -factor.shape[rank_dimension] % (ALIGNMENT // factor.dtype.itemsize)
    if lacking:
        factor = functional.pad(factor, (0, lacking) if rank_dimension == 2 else (0, 0, 0, lacking))
    return _with_unit_stride(factor)


def _with_unit_stride(factor: torch.Tensor) -> torch.Tensor:
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()


def _small_product(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return a grouped matmul with r columns, rows or terms. In 16 bits, oneDNN on the CPU compiles a
    kernel for each new number of tokens. For products as small as these, that took eight times as long
    as to compute them in fp32."""
    if _is_as_stored(first):
        return functional.grouped_mm(first, second, offs=ends)
    return functional.grouped_mm(first.float(), second.float(), offs=ends).to(first.dtype)


def _is_as_stored(factor: torch.Tensor) -> bool:
    return factor.dtype == torch.float32 or current_target().is_cuda


class _LowRankExperts(torch.autograd.Function):
    """The backward pass and its inputs; `_ExpertsMatmul` computes y. See lora_linear.py for the reason."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        ends: torch.Tensor,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, in] -> a placeholder [tokens, out] without storage, which passes on the gradient of
        y; and u [tokens, r]."""
        ctx.scaling = scaling
        if multiplies_by_group(x.dtype):
            u = OPS.grouped_matmul(x, _with_unit_stride(left), ends)
        else:
            u = _small_product(x, _ready(left, 2), ends)
        ctx.save_for_backward(x, u, weight, left, right, ends)
        ctx.mark_non_differentiable(u)
        placeholder = x.new_empty(()).expand(len(x), weight.shape[2])  # nothing reads it
        return placeholder, u

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        x, u, weight, left, right, ends = ctx.saved_tensors
        g = gradient.contiguous()
        if multiplies_by_group(x.dtype):
            t = OPS.grouped_matmul(g, _with_unit_stride(right).transpose(-2, -1), ends)
            d_right = OPS.grouped_weight_gradient(u, g, ends).mul_(ctx.scaling)
            d_left = OPS.grouped_weight_gradient(x, t, ends).mul_(ctx.scaling)
            dx = None
            if ctx.needs_input_grad[0]:
                transposed = (weight.transpose(-2, -1), left.transpose(-2, -1))
                dx = OPS.lora_experts(g, t, *transposed, ends, ctx.scaling)
            return dx, None, d_left, d_right, None, None
        rank = left.shape[2]
        t = _small_product(g, _ready(right, 1).transpose(-2, -1), ends)
        t = t.mul_(ctx.scaling)
        scaled_u = u * ctx.scaling
        d_right = _small_product(scaled_u.t(), g, ends)[:, :rank]
        d_left = _small_product(x.t(), t, ends)[:, :, :rank]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = functional.grouped_mm(g, weight.transpose(-2, -1), offs=ends)
            low = _small_product(t, _ready(left, 2).transpose(-2, -1), ends)
            dx = dx.add_(low)
        # none for weight, ends and scaling
        return dx, None, d_left, d_right, None, None


class _ExpertsMatmul(torch.autograd.Function):
    """Computes y. Its gradient is passed on to the placeholder."""

    @staticmethod
    def forward(ctx: Any, placeholder: torch.Tensor, *others: Any) -> torch.Tensor:
        y: torch.Tensor = torch.ops.llama_ft.lora_experts(*others)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *[None] * 6


class LowRankSum:
    """W + s L R of all experts, or of one, which is read as a weight.

    Args:
        read: returns W, [..., rows, columns], which is frozen; a quantized stack dequantizes then.
        left: L, [..., rows, r].
        right: R, [..., r, columns].
        scaling: s.
    """

    def __init__(
        self,
        read: Callable[[], torch.Tensor],
        left: torch.Tensor,
        right: torch.Tensor,
        scaling: float,
    ) -> None:
        self.read = read
        self.left = left
        self.right = right
        self.scaling = scaling

    def merged(self) -> torch.Tensor:
        """Return W + s L R as a tensor."""
        add = torch.baddbmm if self.left.dim() == 3 else torch.addmm
        return add(self.read(), self.left, self.right, alpha=self.scaling)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read() if name in FACTS else self.merged(), name)

    def transpose(self, first: int, second: int) -> Any:
        """As torch's."""
        dimensions = self.left.dim()
        if {first % dimensions, second % dimensions} != {dimensions - 2, dimensions - 1}:
            return self.merged().transpose(first, second)
        return LowRankSum(
            lambda: self.read().transpose(-2, -1),
            self.right.transpose(-2, -1),
            self.left.transpose(-2, -1),
            self.scaling,
        )

    @cached_property
    def _factors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Split at once: the gradient of each selected matrix would have the size of all experts.
        return list(zip(self.left.unbind(0), self.right.unbind(0), strict=True))

    def __getitem__(self, index: Any) -> Any:
        if self.left.dim() != 3:
            return self.merged()[index]
        if isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64):
            if index.dim() == 1:  # an expert for each token
                left = self.left[index]
                right = self.right[index]
                return LowRankSum(lambda: self.read()[index], left, right, self.scaling)
            index = int(index) if index.dim() == 0 else index
        if not isinstance(index, int):
            return self.merged()[index]
        return LowRankSum(lambda: self.read()[index], *self._factors[index], self.scaling)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        product = PRODUCTS.get(func)
        result = None if product is None else product(*args, **kwargs)
        if result is not None:
            return result
        args, kwargs = tree_map(_as_tensor, (args, kwargs))
        return func(*args, **kwargs)


def _as_tensor(value: Any) -> Any:
    return value.merged() if isinstance(value, LowRankSum) else value


# The products in parts, with the arguments of torch's functions; None: not for these arguments.


def _linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if not isinstance(x, torch.Tensor) or not isinstance(weight, LowRankSum) or weight.ndim != 2:
        return None
    y = lora_linear(x, weight.read(), weight.right, weight.left, weight.scaling)
    return y if bias is None else y + bias


def _bmm(first: Any, second: Any) -> torch.Tensor | None:
    if isinstance(first, torch.Tensor):
        low = torch.bmm(first, second.left)
        y = torch.bmm(first, second.read())
        return torch.baddbmm(y, low, second.right, alpha=second.scaling)
    if isinstance(second, torch.Tensor):
        low = torch.bmm(first.right, second)
        y = torch.bmm(first.read(), second)
        return torch.baddbmm(y, first.left, low, alpha=first.scaling)
    return None


def _matmul(first: Any, second: Any) -> torch.Tensor | None:
    if not isinstance(first, torch.Tensor):
        return None
    if second.ndim == 2:
        return _linear(first, second.transpose(-2, -1))
    return _bmm(first, second) if first.dim() == 3 else None


def _grouped_mm(x: Any, weight: Any, offs: Any = None, **others: Any) -> torch.Tensor | None:
    is_usual = isinstance(weight, LowRankSum) and isinstance(x, torch.Tensor) and x.dim() == 2
    if not is_usual or offs is None or any(value is not None for value in others.values()):
        return None
    base = weight.read()
    left = weight.left
    right = weight.right
    ends = placed(offs, x, base.shape) if multiplies_by_group(x.dtype) else offs
    placeholder, u = _LowRankExperts.apply(x, base, left, right, ends, weight.scaling)
    # Detached: _LowRankExperts has the backward pass of x and R, and the placeholder leads to it.
    return cast(
        torch.Tensor,
        _ExpertsMatmul.apply(
            placeholder, x.detach(), u, base, right.detach(), ends, weight.scaling
        ),
    )


PRODUCTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.linear: _linear,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch._grouped_mm: _grouped_mm,
    functional.grouped_mm: _grouped_mm,
}


class StackLora(ParamWrapper):
    """PEFT's adapter of a stacked weight, computed in parts if the experts multiply with torch's
    functions. PEFT's own way would temporarily replace the parameter by the sum."""

    def get_param(self) -> torch.Tensor:
        """Return the weight; of a quantized one a tensor with its shape and dtype, without
        dequantizing it."""
        stacks = self.get_base_layer()
        if (
            not isinstance(stacks, QuantizedStacks)
            or self.parameter_name not in stacks.stack_shapes
        ):
            return cast(torch.Tensor, super().get_param())
        return torch.empty(
            stacks.stack_shapes[self.parameter_name], dtype=stacks.dtype, device="meta"
        )

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts: Any = self.get_base_layer()
        part = self.parameter_name
        names = [name for name in active_adapters if name in self.lora_A]
        is_quantized = isinstance(experts, QuantizedStacks) and part in experts.stack_shapes
        if len(names) == 1 and self._is_in_parts(experts):
            read = partial(type(experts).__getattr__, experts, part)
            weight = LowRankSum(read, *self.get_delta_factors(names[0]))
            with reads_as(experts, part, weight):
                yield
        elif is_quantized:
            for name in names:  # there is only one
                experts.additions[part] = self.get_delta_factors(name)
            try:
                yield
            finally:
                experts.additions.pop(part, None)
        else:
            with super()._activate_lora(active_adapters):
                yield

    def _is_in_parts(self, experts: Any) -> bool:
        """Return whether the experts' forward pass is Transformers' own, which multiplies with
        torch's functions. Kernels, such as Liger's, take the address of a weight."""
        weight = experts._parameters[self.parameter_name]
        if weight.requires_grad or self.num_experts == 1 or weight.dim() != 3:
            return False
        kinds = (kind for kind in type(experts).__mro__ if kind is not QuantizedStacks)
        forward = next(vars(kind)["forward"] for kind in kinds if "forward" in vars(kind))
        if "forward" in vars(experts) or not forward.__module__.startswith("transformers.models."):
            return False
        # Autocast would choose other dtypes for each of the parts.
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return False
        config = getattr(experts, "config", None)
        chosen = private(config, "_experts_implementation") or "eager"
        return chosen in EXPERTS_IMPLEMENTATIONS


def use_split_experts(model: nn.Module) -> None:
    """Use `StackLora` for PEFT's adapters of stacked experts."""
    for module in model.modules():
        if type(module) is not ParamWrapper:
            continue
        experts = module.get_base_layer()
        if isinstance(experts, QuantizedStacks) or is_experts(experts):
            become(module, StackLora)
