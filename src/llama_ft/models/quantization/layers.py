"""Frozen linear layers and stacked experts in 8 or 4 bits, which are sharded like any other
parameter.

bitsandbytes' int8 has one scale per row, and its 4-bit blocks stay within a row if in_features is a
multiple of the block size. So a quantized layer is two ordinary frozen parameters, sharded by rows
together:

    8bit    weight int8  [out, in]      scale [out]                  value = weight * scale / 127
    4bit    weight uint8 [out, in / 2]  scale [out, in / block]      value = code[nibble] * scale

Transformers stacks the weights of experts: [experts, out, in] or, transposed, [experts, in, out].
The rows of each expert's stored matrix are quantized, and the experts are sharded.

With double_quant, the scales are in 8 bits, too (double_quantization.py).

`scale` is fp32, stored as int32 with the same bits. fully_shard casts floating parameters to the
compute dtype when it all-gathers them, which would round the scale; integers stay unchanged. Each
rank's rows equal those of the unsharded quantization, and the ranks exchange int8 or uint8.
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

from llama_ft.runtime.allocator import request_expandable_segments

request_expandable_segments()  # bitsandbytes asks for the GPU's capability, which initializes CUDA
# Import bitsandbytes without torch's compiler, which would take 2 s and 40 MiB per rank and is not
# used. This must happen before PEFT imports it. The import also warns about a CPU kernel that is
# not needed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
_is_ours = "TORCHDYNAMO_DISABLE" not in os.environ
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
import bitsandbytes  # noqa: E402, F401  # registers torch.ops.bitsandbytes

if _is_ours:
    del os.environ["TORCHDYNAMO_DISABLE"]

from llama_ft.cpu.one_kernel import OneKernel  # noqa: E402
from llama_ft.models.base.replaced import become  # noqa: E402
from llama_ft.models.published.weight_format import StoredScheme  # noqa: E402
from llama_ft.models.quantization.double_quantization import (  # noqa: E402
    dequantize_scales,
    quantize_scales,
    words_per_row,
)
from llama_ft.runtime.target import current_target  # noqa: E402

OPS = torch.ops.bitsandbytes


def _rows_times_factors(
    weight: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return weight.to(dtype).mul_(factor)


_ROWS_TIMES_FACTORS = OneKernel(_rows_times_factors, dynamic=False)


@dataclass(frozen=True)
class Int8:
    """LLM.int8 (https://arxiv.org/abs/2208.07339): one absmax scale per row."""

    threshold: float  # on CUDA, 0 also rounds the inputs to int8 and multiplies in int8
    weights_per_byte = 1
    weight_dtype = torch.int8
    scale_dtype = torch.int32
    is_transposed = False

    name = "8bit"  # for messages
    block_size = 1

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the scale of a weight [out, in]."""
        return (out_features,)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize float rows [n, in] to weight and scale, through fp16 as in bitsandbytes."""
        weight, scale, _ = OPS.int8_vectorwise_quant(rows.to(torch.float16).contiguous())
        return weight, scale.view(torch.int32)

    def dequantize(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows [n, in] in `dtype` from weight and scale."""
        factor = scale.view(torch.float32).unsqueeze(1).mul(1 / 127)
        if current_target().is_cuda:
            return cast(torch.Tensor, _ROWS_TIMES_FACTORS(weight.detach(), factor, dtype))
        # the same bits 6 times as fast: torch vectorizes no mixed product
        return weight.float().mul_(factor).to(dtype)

    def matmul(
        self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] in the inputs' dtype. The weight is dequantized.
        bitsandbytes' method, with only inputs above the threshold in 16 bits, is slower and
        synchronizes with the host twice."""
        if self.threshold > 0 or not current_target().is_cuda:
            return functional.linear(inputs, self.dequantize(weight, scale, inputs.dtype))
        flat = inputs.reshape(-1, inputs.shape[-1])
        scale = scale.view(torch.float32)
        halves = flat.to(torch.float16).contiguous()  # the CUDA kernel assumes fp16
        quantized, input_scale, _ = OPS.int8_vectorwise_quant(halves)
        output = OPS.int8_scaled_mm(quantized, weight, input_scale, scale, dtype=inputs.dtype)
        output_shape = (*inputs.shape[:-1], weight.shape[0])
        return cast(torch.Tensor, output).view(output_shape)


@dataclass(frozen=True)
class FourBit:
    """NF4 or FP4 (https://arxiv.org/abs/2305.14314): one absmax scale per block of a row."""

    quant_type: Literal["nf4", "fp4"]  # the data type, sixteen values
    block_size: int  # number of weights that share a scale
    compute_dtype: torch.dtype | None  # of the matmul; None: the inputs' dtype
    double_quant: bool = False  # the scales are in 8 bits
    weights_per_byte = 2
    weight_dtype = torch.uint8
    scale_dtype = torch.int32
    is_transposed = False

    @property
    def name(self) -> str:
        """Name for messages."""
        double = ", double quantization" if self.double_quant else ""
        return f"4bit ({self.quant_type}, blocks of {self.block_size}{double})"

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, in]."""
        blocks = in_features // self.block_size
        return (out_features, words_per_row(blocks) if self.double_quant else blocks)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize float rows [n, in] to weight and scale."""
        packed, absmax = OPS.quantize_4bit(
            rows.contiguous(), self.block_size, self.quant_type, torch.uint8
        )
        weight = packed.view(len(rows), -1)
        scale = absmax.view(len(rows), -1)
        return weight, quantize_scales(scale) if self.double_quant else scale.view(torch.int32)

    def dequantize(
        self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows [n, in] in `dtype` from weight and scale."""
        shape = (weight.shape[0], weight.shape[1] * 2)
        absmax = self._absmax(weight, scale)
        packed = weight.view(-1, 1)
        return cast(
            torch.Tensor,
            OPS.dequantize_4bit(packed, absmax, self.block_size, self.quant_type, shape, dtype),
        )

    def matmul(
        self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] in the inputs' dtype."""
        shape = (weight.shape[0], weight.shape[1] * 2)
        absmax = self._absmax(weight, scale)
        wide = inputs.to(self.compute_dtype or inputs.dtype)
        output = OPS.gemm_4bit(
            wide, weight.view(-1, 1), shape, absmax, self.block_size, self.quant_type
        )
        return cast(torch.Tensor, output).to(inputs.dtype)

    def _absmax(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the fp32 scale of each block, flat."""
        if not self.double_quant:
            return scale.view(torch.float32).view(-1)
        blocks = weight.shape[1] * 2 // self.block_size
        return dequantize_scales(scale, blocks).view(-1)


Scheme = Int8 | FourBit | StoredScheme


SCHEMES: dict[str, Scheme] = {}  # by name, because operators cannot take objects


def frozen_matmul(
    inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """inputs [..., in] x a quantized weight -> [..., out]."""
    if inputs.numel() == 0:  # an expert without tokens; the CUDA kernels reject empty inputs
        return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
    return scheme.matmul(inputs, weight, scale)


class _FrozenMatmul(torch.autograd.Function):
    """inputs x weight, with a gradient for the inputs only. It keeps only the parameters.
    bitsandbytes' own functions keep the inputs for a weight gradient, in spite of activation
    checkpointing."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        scheme: Scheme,
    ) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.scheme = scheme
        return frozen_matmul(inputs, weight, scale, scheme)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return gradient @ ctx.scheme.dequantize(weight, scale, gradient.dtype), None, None, None


class QuantizedWeight(NamedTuple):
    """A quantized weight: its two parameters, and the shape of the original."""

    weight: nn.Parameter
    scale: nn.Parameter
    # number of weights: [out, in] of a layer, [experts, rows, columns] of a stack
    shape: tuple[int, ...]
    scheme: Scheme
    is_prequantized: bool  # the checkpoint holds it in 4 bits


def empty_codes_and_scales(
    shape: tuple[int, ...], scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a weight of `shape`, without values."""
    *stacked, rows, columns = shape
    if scheme.is_transposed:
        rows, columns = columns, rows
    codes_shape = (*stacked, rows, columns // scheme.weights_per_byte)
    scale_shape = (*stacked, *scheme.scale_shape(rows, columns))
    codes = torch.empty(codes_shape, dtype=scheme.weight_dtype)
    return codes, torch.empty(scale_shape, dtype=scheme.scale_dtype)


def _frozen_parameters(
    shape: tuple[int, ...],
    scheme: Scheme,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weight and scale, on the meta device, for a weight of `shape`."""
    with torch.device("meta"):
        weight, scale = empty_codes_and_scales(shape, scheme)
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scale, requires_grad=False)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer on the meta device with a weight in 8 or 4 bits, which replaces
    `linear`. As an nn.Linear it can get an adapter of PEFT. `is_prequantized`: the checkpoint holds
    it in 4 bits."""

    def __init__(self, linear: nn.Linear, scheme: Scheme, is_prequantized: bool = False) -> None:
        nn.Module.__init__(self)
        self.is_prequantized = is_prequantized
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.scheme = scheme
        self.scheme_name = repr(scheme)
        SCHEMES[self.scheme_name] = scheme
        self.weight, self.scale = _frozen_parameters((self.out_features, self.in_features), scheme)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]."""
        output = cast(
            torch.Tensor, _FrozenMatmul.apply(input, self.weight, self.scale, self.scheme)
        )
        return output if self.bias is None else output + self.bias


DEQUANTIZED_AT_ONCE = 2**30  # weights; bitsandbytes' kernels count with 32 bits
# left [experts, rows, r], right [experts, r, columns], scaling
Factors = tuple[torch.Tensor, torch.Tensor, float]


class QuantizedStacks(nn.Module):
    """A mixin for modules that own stacked weights and read them as attributes. The weights become
    quantized parameters `<name>` and `<name>_scale`, and reading `<name>` dequantizes.

    During `forward` each weight is dequantized once. Autograd would keep it until the backward
    pass, in four times the bytes. Instead the backward pass dequantizes again, and only the experts
    that a matmul used.
    """

    scheme: Scheme
    is_prequantized: bool
    dtype: torch.dtype  # dtype of dequantized weights
    stack_shapes: dict[str, tuple[int, ...]]  # name -> [experts, rows, columns]
    additions: dict[str, Factors]  # name -> LoRA factors to add while the weight is read
    _held: dict[str, torch.Tensor] | None  # during forward: the dequantized weights

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # fully_shard reads its shards by the same names, but does not compute with them.
        if name not in self.__dict__.get("stack_shapes", ()) or isinstance(value, DTensor):
            return value
        held = {} if self._held is None else self._held
        if name not in held:
            held[name] = self._dequantized(
                name, 0, self.stack_shapes[name][0], self.additions.get(name)
            )
        return held[name]

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Run the module's own forward, with its arguments and result."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **keywords)
        with self._holding_weights():
            return super().forward(*args, **keywords)

    def _dequantized(
        self, name: str, first: int, last: int, addition: Factors | None
    ) -> torch.Tensor:
        """Return experts [first, last) of a stack, [last - first, rows, columns] in `dtype`."""
        _, rows, columns = self.stack_shapes[name]
        step = max(1, DEQUANTIZED_AT_ONCE // (rows * columns))
        if isinstance(self.scheme, StoredScheme):  # which write into one tensor themselves
            step = last - first
        blocks = []
        for start in range(first, last, step):
            blocks.append(self._read_experts(name, start, min(start + step, last)))
        value = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        if self.scheme.is_transposed:
            value = value.transpose(1, 2)
        if addition is None:
            return value
        left, right, scaling = addition
        left = left[first:last].to(value)
        right = right[first:last].to(value)
        # in place: autograd needs only the factors
        return value.baddbmm_(left, right, alpha=scaling)

    def _read_experts(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return experts [first, last) of a stack as their rows are stored."""
        weight = self._parameters[name]
        scale = self._parameters[f"{name}_scale"]
        assert weight is not None and scale is not None
        codes = weight[first:last].flatten(0, 1)
        scales = scale[first:last].flatten(0, 1)
        rows = self.scheme.dequantize(codes, scales, self.dtype)
        return rows.view(last - first, -1, rows.shape[-1])

    @contextmanager
    def _holding_weights(self) -> Iterator[None]:
        """In the block, keep dequantized weights. Autograd stores which part of a weight it needs
        instead of the weight. Hooks do not nest, so for all other tensors the outer hooks
        (activation checkpointing's) are called."""
        held: dict[str, torch.Tensor] = {}
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_other, unpack_other = around or (_same, _same)

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()._cdata
            names = (
                name for name, value in held.items() if value.untyped_storage()._cdata == storage
            )
            name = next(names, None)
            if name is None:
                return pack_other(tensor)
            addition = self.additions.get(name)
            if addition is not None:
                left, right, scaling = addition
                addition = (left.detach(), right.detach(), scaling)
            offset = int(tensor.storage_offset())
            return _StackView(name, addition, tensor.size(), tensor.stride(), offset)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, _StackView):
                return self._read_again(packed)
            return unpack_other(packed)

        self._held = held
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._held = None
            # autograd keeps `pack`, and with it this dict, as long as its saved tensors
            held.clear()

    @torch.no_grad()
    def _read_again(self, view: "_StackView") -> torch.Tensor:
        _, rows, columns = self.stack_shapes[view.name]
        steps = zip(view.size, view.stride, strict=True)
        furthest = view.offset + sum((size - 1) * stride for size, stride in steps)
        first = view.offset // (rows * columns)
        last = furthest // (rows * columns)
        value = self._dequantized(view.name, first, last + 1, view.addition)
        return value.as_strided(view.size, view.stride, view.offset - first * rows * columns)


class _StackView(NamedTuple):
    """Replaces a view of a weight among autograd's saved tensors."""

    name: str
    addition: Factors | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _same(value: Any) -> Any:
    return value


def quantize_stacks(module: nn.Module, names: list[str], scheme: Scheme) -> None:
    """Quantize stacked weights of a module on the meta device; see `QuantizedStacks`."""
    shapes = {name: tuple(module.get_parameter(name).shape) for name in names}
    kind = type(module)
    become(module, type(f"Quantized{kind.__name__}", (QuantizedStacks, kind), {}))
    assert isinstance(module, QuantizedStacks)
    module.scheme = scheme
    module.is_prequantized = False
    module.dtype = torch.get_default_dtype()
    module.stack_shapes = shapes
    module.additions = {}
    module._held = None
    for name, shape in shapes.items():
        weight, scale = _frozen_parameters(shape, scheme)
        module._parameters[name] = weight
        module._parameters[f"{name}_scale"] = scale


def quantized_weights(model: nn.Module) -> list[QuantizedWeight]:
    """Return all quantized weights of a model."""
    weights = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            shape = (module.out_features, module.in_features)
            scale: Any = module.scale
            weights.append(
                QuantizedWeight(
                    cast(Any, module.weight), scale, shape, module.scheme, module.is_prequantized
                )
            )
        elif isinstance(module, QuantizedStacks):
            own = cast(dict[str, nn.Parameter], module._parameters)
            weights += [
                QuantizedWeight(
                    own[name], own[f"{name}_scale"], shape, module.scheme, module.is_prequantized
                )
                for name, shape in module.stack_shapes.items()
            ]
    return weights


def weight_counts(model: nn.Module) -> dict[int, int]:
    """Return id of each quantized parameter -> the number of weights that it holds (a scale: 0)."""
    counts = {}
    for weight in quantized_weights(model):
        counts[id(weight.weight)] = torch.Size(weight.shape).numel()
        counts[id(weight.scale)] = 0
    return counts


def quantization_name(model: nn.Module) -> str:
    """Return the name of a model's quantization, such as 4bit; "" if it is not quantized."""
    return next((weight.scheme.name for weight in quantized_weights(model)), "")


def total_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, where a quantized weight counts as the original."""
    counts = weight_counts(model)
    parameters = model.parameters()
    return sum(counts.get(id(parameter), parameter.numel()) for parameter in parameters)


def describe_trained(model: nn.Module) -> str:
    """Return how many parameters are trainable, for the log."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{trained:,} of {total_weights(model):,} parameters are trainable"
