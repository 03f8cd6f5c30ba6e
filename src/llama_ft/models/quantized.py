"""Frozen linear layers in 8 or 4 bits that shard like any other parameter.

bitsandbytes' int8 has one scale a row, and its 4-bit blocks lie within a row when in_features is a multiple of the
block size. So a quantized layer is two ordinary frozen parameters, sharded by rows together:

    8bit    weight int8  [out, in]      scale [out]                  value = weight * scale / 127
    4bit    weight uint8 [out, in / 2]  scale [out, in / block]      value = code[nibble] * scale

`scale` is fp32, kept as its bits in int32: fully_shard casts floating parameters to the compute dtype when it gathers
them, which would round it, and leaves integers alone. Each rank's rows are those of the unsharded quantization, and
what travels between ranks is int8 or uint8.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import bitsandbytes  # noqa: F401  # registers torch.ops.bitsandbytes
import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from llama_ft.config import QuantizationConfig
from llama_ft.config.fields import SETTINGS
from llama_ft.errors import UserError

OPS = torch.ops.bitsandbytes
NAMED_AT_MOST = 6


@dataclass(frozen=True)
class Int8:
    """LLM.int8 (https://arxiv.org/abs/2208.07339): absmax of each row.

    Attributes:
        threshold: on CUDA, input columns with a larger value are multiplied in 16 bits; 0: none are.
    """

    threshold: float
    weights_per_byte = 1
    weight_dtype = torch.int8

    @property
    def name(self) -> str:
        """For people."""
        return "8bit"

    def is_whole(self, in_features: int) -> bool:
        """Whether rows can be quantized one by one."""
        return True

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features,)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float rows [n, in] -> weight and scale; through fp16, as bitsandbytes does."""
        weight, scale, _ = OPS.int8_vectorwise_quant(rows.to(torch.float16).contiguous())
        return weight, scale.view(torch.int32)

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weight and scale -> rows [n, in] of `dtype`."""
        return weight.to(dtype).mul_(scale.view(torch.float32).unsqueeze(1).mul(1 / 127))

    def matmul(self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] of the inputs' dtype. On CUDA the inputs are quantized too; on the
        CPU, where bitsandbytes has no fast int8 product, the weight is dequantized."""
        if inputs.device.type != "cuda":
            return functional.linear(inputs, self.dequantize(weight, scale, inputs.dtype))
        flat, scale = inputs.reshape(-1, inputs.shape[-1]), scale.view(torch.float32)
        halves = flat.to(torch.float16).contiguous()  # the CUDA kernel reads them as if they were
        quantized, input_scale, outliers = OPS.int8_vectorwise_quant(halves, threshold=self.threshold)
        if self.threshold > 0:
            output, _ = OPS.int8_mixed_scaled_mm(flat, quantized, weight, input_scale, scale, outliers)
        else:
            output = OPS.int8_scaled_mm(quantized, weight, input_scale, scale, dtype=inputs.dtype)
        return cast(torch.Tensor, output).view(*inputs.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class FourBit:
    """NF4 or FP4 (https://arxiv.org/abs/2305.14314): absmax of each block of a row.

    Attributes:
        quant_type: the sixteen values.
        block_size: weights that share a scale.
        compute_dtype: of the product; None: the inputs' own.
    """

    quant_type: Literal["nf4", "fp4"]
    block_size: int
    compute_dtype: torch.dtype | None
    weights_per_byte = 2
    weight_dtype = torch.uint8

    @property
    def name(self) -> str:
        """For people."""
        return f"4bit ({self.quant_type}, blocks of {self.block_size})"

    def is_whole(self, in_features: int) -> bool:
        """Whether rows can be quantized one by one."""
        return in_features % self.block_size == 0

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features // self.block_size)

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float rows [n, in] -> weight and scale."""
        packed, absmax = OPS.quantize_4bit(rows.contiguous(), self.block_size, self.quant_type, torch.uint8)
        return packed.view(len(rows), -1), absmax.view(torch.int32).view(len(rows), -1)

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weight and scale -> rows [n, in] of `dtype`."""
        shape = (weight.shape[0], weight.shape[1] * 2)
        absmax = scale.view(torch.float32).view(-1)
        return cast(
            torch.Tensor,
            OPS.dequantize_4bit(weight.view(-1, 1), absmax, self.block_size, self.quant_type, shape, dtype),
        )

    def matmul(self, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """inputs [..., in] x weight -> [..., out] of the inputs' dtype."""
        shape = (weight.shape[0], weight.shape[1] * 2)
        output = OPS.gemm_4bit(
            inputs.to(self.compute_dtype or inputs.dtype),
            weight.view(-1, 1),
            shape,
            scale.view(torch.float32).view(-1),
            self.block_size,
            self.quant_type,
        )
        return cast(torch.Tensor, output).to(inputs.dtype)


Scheme = Int8 | FourBit


class _FrozenMatmul(torch.autograd.Function):
    """inputs x weight, with a gradient for the inputs only.

    bitsandbytes' own functions keep the inputs alive on their context, past activation checkpointing, for a weight
    gradient that a frozen layer does not have. This one keeps nothing but the parameters.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> Any:
        ctx.save_for_backward(weight, scale)
        ctx.scheme = scheme
        if inputs.numel() == 0:  # an expert without tokens; the CUDA kernels refuse it
            return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
        return scheme.matmul(inputs, weight, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return gradient @ ctx.scheme.dequantize(weight, scale, gradient.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with its weight in 8 or 4 bits; on the meta device, without values.

    An nn.Linear, so that peft puts adapters beside it as beside any other.

    Args:
        linear: the layer it replaces, whose bias it takes over.
        scheme: how the weight is quantized.
        is_stored: the checkpoint holds it quantized already.
    """

    def __init__(self, linear: nn.Linear, scheme: Scheme, is_stored: bool = False) -> None:
        nn.Module.__init__(self)
        self.is_stored = is_stored
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        packed = (self.out_features, self.in_features // scheme.weights_per_byte)
        weight = torch.empty(packed, dtype=scheme.weight_dtype, device="meta")
        scale = torch.empty(scheme.scale_shape(self.out_features, self.in_features), dtype=torch.int32, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]."""
        output = cast(torch.Tensor, _FrozenMatmul.apply(input, self.weight, self.scale, self.scheme))
        return output if self.bias is None else output + self.bias


@dataclass(frozen=True)
class Quantization:
    """What is quantized and how.

    Attributes:
        scheme: of the quantized layers.
        skip: names, ends of names or patterns of layers that stay as they are. Where the checkpoint is quantized these
            are all, as transformers reads llm_int8_skip_modules; else the output head stays too.
        is_stored: the checkpoint is quantized already.
    """

    scheme: Scheme
    skip: list[str] | None
    is_stored: bool


def choose_quantization(
    settings: QuantizationConfig, model_config: PretrainedConfig, use_peft: bool
) -> Quantization | None:
    """The quantization asked for, or the one the checkpoint brings; its note is taken off `model_config`.

    Raises:
        UserError: the checkpoint is quantized in another way than asked for, by something else than bitsandbytes, or
            would be trained in full.
    """
    stored = getattr(model_config, "quantization_config", None)
    if stored is None:
        return _asked_for(settings)
    note: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    method = note.get("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        raise UserError(
            f"--model_name: this checkpoint is quantized with {method}, which is not read here.\nUse the original "
            "model, with --quantization 8bit or 4bit if it is to be smaller, or one quantized by bitsandbytes."
        )
    if note.get("bnb_4bit_quant_type", "nf4") not in ("nf4", "fp4"):
        raise UserError(
            f"--model_name: bnb_4bit_quant_type in its config.json is {note['bnb_4bit_quant_type']}; it can be nf4 or "
            "fp4.\nMend config.json, or use the original model."
        )
    mode: Literal["8bit", "4bit"] = "8bit" if note.get("load_in_8bit") else "4bit"
    if settings.mode not in ("none", mode):
        raise UserError(
            f"--quantization {settings.mode}: this checkpoint is quantized to {mode} already.\nLeave it out, or use "
            "the original model."
        )
    if not use_peft:
        raise UserError(
            f"--model_name: this checkpoint is quantized ({mode}), and quantized weights cannot be trained.\n"
            "--use_peft trains adapters beside them; to train the weights themselves, use the original model."
        )
    del model_config.quantization_config
    return Quantization(_stored_scheme(mode, note, settings), note.get("llm_int8_skip_modules"), is_stored=True)


def _asked_for(settings: QuantizationConfig) -> Quantization | None:
    if settings.mode == "none":
        return None
    scheme: Scheme = Int8(settings.int8_threshold)
    if settings.mode == "4bit":
        scheme = FourBit(settings.quant_type, settings.block_size, _compute_dtype(settings.compute_dtype))
    return Quantization(scheme, settings.skip_modules, is_stored=False)


def _stored_scheme(mode: str, note: dict[str, Any], settings: QuantizationConfig) -> Scheme:
    """transformers quantizes in blocks of 64 only, and does not write that down."""
    quant_type = note.get("bnb_4bit_quant_type", "fp4")
    threshold = float(note.get("llm_int8_threshold", 6.0))
    fixed = {"quant_type": quant_type, "block_size": 64, "skip_modules": "its own", "int8_threshold": threshold}
    for name, stored in fixed.items():
        asked = getattr(settings, name)
        if asked not in (stored, SETTINGS[name].default):
            raise UserError(f"--{name} {asked}: this checkpoint is quantized already, with {stored}. Leave it out.")
    if mode == "8bit":
        return Int8(threshold)
    return FourBit(quant_type, 64, _compute_dtype(settings.compute_dtype))


def _compute_dtype(name: str) -> torch.dtype | None:
    return None if name == "auto" else cast(torch.dtype, getattr(torch, name))


def quantize_linears(model: PreTrainedModel, quantization: Quantization) -> str:
    """Put (meta) quantized layers in the place of linear ones.

    Args:
        model: skeleton on the meta device.
        quantization: what and how.

    Returns:
        What was quantized and what was not, for people.

    Raises:
        UserError: no linear layer is left to quantize, or a name to skip is not in the model.
    """
    scheme = quantization.scheme
    own = quantization.skip is not None and quantization.is_stored
    skip = [*(quantization.skip or ()), *(model._keep_in_fp32_modules or ())]
    skip += [] if own else get_keys_to_not_convert(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if not quantization.is_stored:
        _check_skipped(quantization.skip or [], linears)
    chosen = {name: module for name, module in linears.items() if should_convert_module(name, skip)}
    broken = [name for name, linear in chosen.items() if not scheme.is_whole(linear.in_features)]
    quantized = [name for name in chosen if name not in broken]
    if not quantized:
        raise _nothing_to_quantize(model, quantization, len(linears), len(chosen))
    before = sum(linears[name].weight.numel() for name in quantized)
    for name in quantized:
        model.set_submodule(name, QuantizedLinear(linears[name], scheme, quantization.is_stored))
    return _summary(scheme, model, before, [name for name in linears if name not in chosen], broken)


def _nothing_to_quantize(model: nn.Module, quantization: Quantization, linears: int, chosen: int) -> UserError:
    kinds = {type(m).__name__ for m in model.modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2}
    flag, way_out = "--quantization", "Leave --quantization out, or skip fewer."
    if quantization.is_stored:
        flag, way_out = "--model_name", "Use the original model."
    return UserError(
        f"{flag}: nothing in this model can be quantized to {quantization.scheme.name}.\nOf its {linears} linear "
        f"layers {linears - chosen} are skipped, and the rows of {chosen} are not whole blocks; it has layers of type "
        f"{', '.join(sorted(kinds))}.\n{way_out}"
    )


def _check_skipped(patterns: list[str], linears: dict[str, nn.Linear]) -> None:
    for pattern in patterns:
        if all(should_convert_module(name, [pattern]) for name in linears):
            ends = dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears)
            raise UserError(
                f"--skip_modules [{pattern}]: no linear layer of this model has this name or ends in it.\n"
                f"It has: {', '.join(ends)}."
            )


def _summary(scheme: Scheme, model: PreTrainedModel, weights: int, skipped: list[str], broken: list[str]) -> str:
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    held = sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers)
    others = sum(p.numel() for p in model.parameters()) - sum(
        layer.weight.numel() + layer.scale.numel() for layer in layers
    )
    lines = [
        f"Quantized to {scheme.name}: {len(layers)} linear layers, {weights:,} weights in {held / 2**20:,.1f} MiB; "
        f"{others:,} weights stay as they are."
    ]
    if skipped:
        lines.append(f"  Linear layers left out: {_named(skipped)}")
    if broken:
        lines.append(f"  Left out because their rows are not whole blocks: {_named(broken)}")
    return "\n".join(lines)


def _named(names: list[str]) -> str:
    more = f", ... and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def weight_counts(model: nn.Module) -> dict[int, int]:
    """id of each parameter of quantized layers -> how many weights of the model it stands for (a scale: none)."""
    counts: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            counts[id(module.weight)] = module.out_features * module.in_features
            counts[id(module.scale)] = 0
    return counts


def total_weights(model: nn.Module) -> int:
    """Weights of a model, whatever they are packed into."""
    counts = weight_counts(model)
    return sum(counts.get(id(parameter), parameter.numel()) for parameter in model.parameters())
