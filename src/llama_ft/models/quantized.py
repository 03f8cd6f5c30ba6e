"""Frozen linear layers and stacks of experts in 8 or 4 bits that shard like any other parameter.

bitsandbytes' int8 has one scale a row, and its 4-bit blocks lie within a row when in_features is a multiple of the
block size. So a quantized layer is two ordinary frozen parameters, sharded by rows together:

    8bit    weight int8  [out, in]      scale [out]                  value = weight * scale / 127
    4bit    weight uint8 [out, in / 2]  scale [out, in / block]      value = code[nibble] * scale

Transformers stacks the weights of experts: [experts, out, in] or, transposed, [experts, in, out]. Quantized are the
rows of each expert's matrix as it lies there, sharded are the experts.

`scale` is fp32, kept as its bits in int32: fully_shard casts floating parameters to the compute dtype when it gathers
them, which would round it, and leaves integers alone. Each rank's rows are those of the unsharded quantization, and
what travels between ranks is int8 or uint8.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

# Without torch's compiler, which would cost 2 s and 40 MiB per rank for functions that nothing here calls; so before
# peft, which imports bitsandbytes too. It also warns of a CPU kernel that nothing here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
_is_ours = "TORCHDYNAMO_DISABLE" not in os.environ
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
import bitsandbytes  # noqa: E402, F401  # registers torch.ops.bitsandbytes

if _is_ours:
    del os.environ["TORCHDYNAMO_DISABLE"]

from llama_ft.runtime.one_kernel import OneKernel  # noqa: E402

OPS = torch.ops.bitsandbytes


def _on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda  # a plan of a GPU made on a CPU replaces this


def _rows_times_factors(weight: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).mul_(factor)


_ROWS_TIMES_FACTORS = OneKernel(_rows_times_factors, dynamic=False)


@dataclass(frozen=True)
class Int8:
    """LLM.int8 (https://arxiv.org/abs/2208.07339): absmax of each row."""

    threshold: float  # on CUDA, 0 rounds the inputs to int8 too and multiplies in int8
    weights_per_byte = 1
    weight_dtype = torch.int8

    name = "8bit"  # for people
    block_size = 1

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Of the scale of a weight [out, in]."""
        return (out_features,)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float rows [n, in] -> weight and scale; through fp16, as bitsandbytes does."""
        weight, scale, _ = OPS.int8_vectorwise_quant(rows.to(torch.float16).contiguous())
        return weight, scale.view(torch.int32)

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weight and scale -> rows [n, in] of `dtype`."""
        factor = scale.view(torch.float32).unsqueeze(1).mul(1 / 127)
        if _on_cuda(weight):
            return cast(torch.Tensor, _ROWS_TIMES_FACTORS(weight.detach(), factor, dtype))
        return weight.float().mul_(factor).to(dtype)  # the same bits 6 times as fast: torch vectorizes no mixed product

    def matmul(self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] of the inputs' dtype. The weight is dequantized: bitsandbytes' way,
        with only the inputs beyond the threshold in 16 bits, is slower and makes the host wait twice."""
        if self.threshold > 0 or not _on_cuda(inputs):
            return functional.linear(inputs, self.dequantize(weight, scale, inputs.dtype))
        flat, scale = inputs.reshape(-1, inputs.shape[-1]), scale.view(torch.float32)
        halves = flat.to(torch.float16).contiguous()  # the CUDA kernel reads them as if they were
        quantized, input_scale, _ = OPS.int8_vectorwise_quant(halves)
        output = OPS.int8_scaled_mm(quantized, weight, input_scale, scale, dtype=inputs.dtype)
        return cast(torch.Tensor, output).view(*inputs.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class FourBit:
    """NF4 or FP4 (https://arxiv.org/abs/2305.14314): absmax of each block of a row."""

    quant_type: Literal["nf4", "fp4"]  # the sixteen values
    block_size: int  # weights that share a scale
    compute_dtype: torch.dtype | None  # of the product; None: the inputs' own
    weights_per_byte = 2
    weight_dtype = torch.uint8

    @property
    def name(self) -> str:
        """For people."""
        return f"4bit ({self.quant_type}, blocks of {self.block_size})"

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Of the scales of a weight [out, in]."""
        return (out_features, in_features // self.block_size)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float rows [n, in] -> weight and scale."""
        packed, absmax = OPS.quantize_4bit(rows.contiguous(), self.block_size, self.quant_type, torch.uint8)
        return packed.view(len(rows), -1), absmax.view(torch.int32).view(len(rows), -1)

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weight and scale -> rows [n, in] of `dtype`."""
        shape = (weight.shape[0], weight.shape[1] * 2)
        absmax = scale.view(torch.float32).view(-1)
        packed = weight.view(-1, 1)
        return cast(torch.Tensor, OPS.dequantize_4bit(packed, absmax, self.block_size, self.quant_type, shape, dtype))

    def matmul(self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] of the inputs' dtype."""
        shape, absmax = (weight.shape[0], weight.shape[1] * 2), scale.view(torch.float32).view(-1)
        wide = inputs.to(self.compute_dtype or inputs.dtype)
        output = OPS.gemm_4bit(wide, weight.view(-1, 1), shape, absmax, self.block_size, self.quant_type)
        return cast(torch.Tensor, output).to(inputs.dtype)


Scheme = Int8 | FourBit


SCHEMES: dict[str, Scheme] = {}  # of this process's layers, by the name that operators know: they take no objects


def frozen_product(inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """inputs [..., in] x a quantized weight -> [..., out]."""
    if inputs.numel() == 0:  # an expert without tokens; the CUDA kernels refuse it
        return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
    return scheme.matmul(inputs, weight, scale)


class _FrozenMatmul(torch.autograd.Function):
    """inputs x weight, with a gradient for the inputs only; keeps only the parameters. bitsandbytes' own functions
    keep the inputs on their context, past activation checkpointing, for a weight gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.scheme = scheme
        return frozen_product(inputs, weight, scale, scheme)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return gradient @ ctx.scheme.dequantize(weight, scale, gradient.dtype), None, None, None


class QuantizedWeight(NamedTuple):
    """A quantized weight: its two parameters, and what they stand for."""

    weight: nn.Parameter
    scale: nn.Parameter
    shape: tuple[int, ...]  # in weights: [out, in] of a layer, [experts, rows, columns] of a stack
    scheme: Scheme
    is_stored: bool  # the checkpoint has it quantized already


def _frozen_parameters(shape: tuple[int, ...], scheme: Scheme) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and scale, on the meta device, of weights of `shape`."""
    *stacked, rows, columns = shape
    weight = torch.empty((*stacked, rows, columns // scheme.weights_per_byte), dtype=scheme.weight_dtype, device="meta")
    scale = torch.empty((*stacked, *scheme.scale_shape(rows, columns)), dtype=torch.int32, device="meta")
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scale, requires_grad=False)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with its weight in 8 or 4 bits, on the meta device, in place of `linear`. An nn.Linear, so
    that peft adds adapters to it as to any other. `is_stored`: the checkpoint has it quantized already."""

    def __init__(self, linear: nn.Linear, scheme: Scheme, is_stored: bool = False) -> None:
        nn.Module.__init__(self)
        self.is_stored = is_stored
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        self.scheme_name = repr(scheme)
        SCHEMES[self.scheme_name] = scheme
        self.weight, self.scale = _frozen_parameters((self.out_features, self.in_features), scheme)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]."""
        output = cast(torch.Tensor, _FrozenMatmul.apply(input, self.weight, self.scale, self.scheme))
        return output if self.bias is None else output + self.bias


DEQUANTIZED_AT_ONCE = 2**30  # weights; bitsandbytes' kernels count them in 32 bits
Factors = tuple[torch.Tensor, torch.Tensor, float]  # left [experts, rows, r], right [experts, r, columns], scaling


class QuantizedStacks(nn.Module):
    """Mixed into the class of a module that owns stacked weights and reads them as attributes: they are quantized
    parameters `<name>` and `<name>_scale`, and to read `<name>` dequantizes it.

    During `forward` each is dequantized once. Of a product autograd would keep the dequantized weight until the
    backward pass, four times the bytes: it is dequantized again instead, and only the experts that the product had.
    """

    scheme: Scheme
    is_stored: bool
    dtype: torch.dtype  # what reading dequantizes to
    stack_shapes: dict[str, tuple[int, ...]]  # name -> [experts, rows, columns]
    additions: dict[str, Factors]  # name -> what is added to a weight while it is read: LoRA
    _held: dict[str, torch.Tensor] | None  # during forward: what has been read

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # fully_shard reads its shards by the same names; nothing is computed with those.
        if name not in self.__dict__.get("stack_shapes", ()) or isinstance(value, DTensor):
            return value
        if self._held is None:
            return self._dequantized(name, 0, self.stack_shapes[name][0], self.additions.get(name))
        if name not in self._held:
            self._held[name] = self._dequantized(name, 0, self.stack_shapes[name][0], self.additions.get(name))
        return self._held[name]

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """The module's own, as is what it takes and returns."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **keywords)
        with self._holding_weights():
            return super().forward(*args, **keywords)

    def _dequantized(self, name: str, first: int, last: int, addition: Factors | None) -> torch.Tensor:
        """Experts [first, last) of a stack [last - first, rows, columns] in `dtype`."""
        weight, scale = (self._parameters[part] for part in (name, f"{name}_scale"))
        assert weight is not None and scale is not None
        _, rows, columns = self.stack_shapes[name]
        step, parts = max(1, DEQUANTIZED_AT_ONCE // (rows * columns)), []
        for start in range(first, last, step):
            part = slice(start, min(start + step, last))
            flat = self.scheme.dequantize(weight[part].flatten(0, 1), scale[part].flatten(0, 1), self.dtype)
            parts.append(flat.view(-1, rows, columns))
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
        if addition is None:
            return value
        left, right, scaling = addition
        return torch.baddbmm(value, left[first:last].to(value), right[first:last].to(value), alpha=scaling)

    @contextmanager
    def _holding_weights(self) -> Iterator[None]:
        """Keep what is read until the end, and have autograd note which part of which weight it is instead of keeping
        it. Hooks do not nest, so those around (activation checkpointing's) are called for all other tensors."""
        held: dict[str, torch.Tensor] = {}
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_other, unpack_other = around or (_same, _same)

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()._cdata
            name = next((name for name, value in held.items() if value.untyped_storage()._cdata == storage), None)
            if name is None:
                return pack_other(tensor)
            addition = self.additions.get(name)
            parts = addition and (addition[0].detach(), addition[1].detach(), addition[2])
            return _PartOfStack(name, parts, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(packed: Any) -> torch.Tensor:
            return self._read_again(packed) if isinstance(packed, _PartOfStack) else unpack_other(packed)

        self._held = held
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._held = None
            held.clear()  # autograd keeps `pack`, and this with it, as long as it keeps what has been packed

    @torch.no_grad()
    def _read_again(self, part: "_PartOfStack") -> torch.Tensor:
        _, rows, columns = self.stack_shapes[part.name]
        furthest = part.offset + sum((size - 1) * step for size, step in zip(part.size, part.stride, strict=True))
        first, last = part.offset // (rows * columns), furthest // (rows * columns)
        value = self._dequantized(part.name, first, last + 1, part.addition)
        return value.as_strided(part.size, part.stride, part.offset - first * rows * columns)


class _PartOfStack(NamedTuple):
    """A view of a weight, instead of it."""

    name: str
    addition: Factors | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _same(value: Any) -> Any:
    return value


def quantize_stacks(module: nn.Module, names: list[str], scheme: Scheme) -> None:
    """Make stacked weights (on the meta device) of a module quantized ones; see `QuantizedStacks`."""
    shapes = {name: tuple(module.get_parameter(name).shape) for name in names}
    kind = type(module)
    module.__class__ = type(f"Quantized{kind.__name__}", (QuantizedStacks, kind), {})
    assert isinstance(module, QuantizedStacks)
    module.scheme, module.is_stored, module.dtype = scheme, False, torch.get_default_dtype()
    module.stack_shapes, module.additions, module._held = shapes, {}, None
    for name, shape in shapes.items():
        module._parameters[name], module._parameters[f"{name}_scale"] = _frozen_parameters(shape, scheme)


def quantized_weights(model: nn.Module) -> list[QuantizedWeight]:
    """Every quantized weight of a model."""
    found = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            shape = (module.out_features, module.in_features)
            scale: Any = module.scale
            found.append(QuantizedWeight(cast(Any, module.weight), scale, shape, module.scheme, module.is_stored))
        elif isinstance(module, QuantizedStacks):
            own = cast(dict[str, nn.Parameter], module._parameters)
            found += [
                QuantizedWeight(own[name], own[f"{name}_scale"], shape, module.scheme, module.is_stored)
                for name, shape in module.stack_shapes.items()
            ]
    return found


def weight_counts(model: nn.Module) -> dict[int, int]:
    """id of each parameter of quantized weights -> how many weights of the model it stands for (a scale: none)."""
    weights = quantized_weights(model)
    return {id(it.weight): torch.Size(it.shape).numel() for it in weights} | {id(it.scale): 0 for it in weights}


def total_weights(model: nn.Module) -> int:
    """Weights of a model, whatever they are packed into."""
    counts = weight_counts(model)
    return sum(counts.get(id(parameter), parameter.numel()) for parameter in model.parameters())
