"""Choose which layers are quantized and how: by the settings, or as stored in the checkpoint."""

from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from llama_ft.config import QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.libraries.transformers_private import private
from llama_ft.models.base.layers import SCORE, read_linears
from llama_ft.models.base.source import listed
from llama_ft.models.built import BuiltModel
from llama_ft.models.published.formats import (
    FORMATS,
    methods_kept_as_stored,
    published_format,
)
from llama_ft.models.published.quantization_config import remove_quantization_config
from llama_ft.models.published.sources import dequantized_dtype
from llama_ft.models.published.weight_format import StoredScheme, WeightFormat
from llama_ft.models.quantization.layers import (
    FourBit,
    Int8,
    QuantizedLinear,
    Scheme,
    quantize_stacks,
    total_weights,
)


class Quantization(NamedTuple):
    """The scheme of a quantization, and the layers that it excludes."""

    scheme: Scheme
    # Layers that are not quantized: names, ends of names or patterns. For a quantized checkpoint
    # the list is complete, as Transformers reads llm_int8_skip_modules. Otherwise the LM head is
    # excluded, too.
    skip: list[str] | None
    is_prequantized: bool  # the checkpoint is in bitsandbytes' 4 bits
    # Stacked experts are quantized, too. Transformers does not do that, so a quantized checkpoint
    # has them in 16 bits.
    stacks: bool = True
    linears: bool = True
    # Modules that a published checkpoint has in 16 bits.
    not_converted: Iterable[str] = ()


def choose_quantization(
    settings: QuantizationConfig, model_config: PretrainedConfig, use_peft: bool
) -> Quantization | None:
    """Return the requested quantization, or that of a checkpoint of bitsandbytes. The checkpoint's is
    removed from `model_config`; the formats in models/published count as 16 bits. Raises UserError if
    the checkpoint's differs from the request, is not supported, or full fine-tuning would train it."""
    dtype = (
        None
        if settings.compute_dtype == "auto"
        else cast(torch.dtype, getattr(torch, settings.compute_dtype))
    )
    weight_format = published_format(model_config.to_dict())
    quantization_config = remove_quantization_config(model_config)
    if quantization_config is not None and weight_format is None:
        return _prequantized(settings, quantization_config, dtype, use_peft)
    if settings.mode == "none":
        return None
    if settings.mode == "as_stored":
        return _as_stored(settings, weight_format, dequantized_dtype(model_config.to_dict()))
    four_bit = FourBit(settings.quant_type, settings.block_size, dtype, settings.double_quant)
    scheme = four_bit if settings.mode == "4bit" else Int8(settings.int8_threshold)
    return Quantization(scheme, settings.skip_modules, is_prequantized=False)


def _prequantized(
    settings: QuantizationConfig,
    quantization_config: dict[str, Any],
    dtype: torch.dtype | None,
    use_peft: bool,
) -> Quantization:
    """Return the quantization of a checkpoint of bitsandbytes. Raises UserError for another
    checkpoint, and if the settings ask for something else. `dtype`: of matmuls."""
    method = quantization_config.get("quant_method")
    if method is None and "load_in_8bit" in quantization_config:
        method = "bitsandbytes"  # whose older versions do not write it
    is_4bit = quantization_config.get("load_in_4bit")
    if method not in (None, "bitsandbytes") or not is_4bit:
        method_text = f"of {method}" if method else "without quant_method"
        raise UserError(
            f"--model_name: config.json has a quantization_config {method_text} that is not supported. Supported are: "
            f"bitsandbytes in 4 bits, {', '.join(FORMATS)}.\nUse a version in 16 bits or in bitsandbytes' 4 bits."
        )
    if settings.mode == "8bit" or settings.double_quant or not use_peft:
        raise UserError(
            "--model_name: already quantized in 4 bits. Use --use_peft, and no other --quantization or --double_quant."
        )
    # Transformers always uses blocks of 64, and does not store this number.
    scheme = FourBit(quantization_config.get("bnb_4bit_quant_type", "fp4"), 64, dtype)
    skip = quantization_config.get("llm_int8_skip_modules")
    return Quantization(scheme, skip, is_prequantized=True, stacks=settings.mode == "4bit")


def _as_stored(
    settings: QuantizationConfig, weight_format: WeightFormat | None, dtype: torch.dtype
) -> Quantization:
    """Return the quantization of a published checkpoint whose weights stay as they are stored: linear
    layers, or stacked experts. `dtype`: of dequantized weights."""
    if weight_format is None or weight_format.scheme is None:
        stored_form = "not quantized" if weight_format is None else weight_format.method
        expected = " or ".join(methods_kept_as_stored())
        raise UserError(
            f"--quantization as_stored: the checkpoint is {stored_form}; expected {expected}. Leave it out, or use "
            f"--quantization 4bit."
        )
    scheme = weight_format.scheme.of(weight_format.quantization_config, dtype)
    return Quantization(
        scheme,
        settings.skip_modules,
        is_prequantized=False,
        stacks=scheme.is_of_experts,
        linears=not scheme.is_of_experts,
        not_converted=weight_format.modules_in_16_bits(),
    )


@dataclass(frozen=True)
class QuantizedWeights:
    """What `quantize_linears` has quantized. As a text, it is a line of the log.

    Attributes:
        scheme: how the weights are stored.
        linears: names of the quantized linear layers.
        stacks: names of the quantized stacks of experts; None for a model without stacks.
        unchanged: names of the linear layers and stacks that stay as they are.
        count: the number of quantized weights.
        total: the number of all weights of the model.
    """

    scheme: Scheme
    linears: list[str]
    stacks: list[str] | None
    unchanged: list[str]
    count: int
    total: int

    def __str__(self) -> str:
        verb = "Kept in" if isinstance(self.scheme, StoredScheme) else "Quantized to"
        experts = "" if self.stacks is None else f" and {len(self.stacks)} stacks of experts"
        return (
            f"{verb} {self.scheme.name}: {len(self.linears)} linear layers{experts}, {self.count:,} of {self.total:,} "
            f"weights; not quantized: {listed(self.unchanged)}"
        )


def quantize_linears(built: BuiltModel, quantization: Quantization) -> QuantizedWeights:
    """Replace linear layers and stacked experts of a model on the meta device by quantized ones.
    Raises UserError if no linear layer remains to be quantized, or a name to
    skip does not exist in the model."""
    model = built.model
    scheme = quantization.scheme
    is_prequantized = quantization.is_prequantized
    skip = _skipped_patterns(built, quantization)
    uncalled = read_linears(model)  # not called, so a quantized layer could not replace them
    linears = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and module not in uncalled
    }
    stacks = _stacked_weights(model)
    names = [*linears, *stacks]
    if not is_prequantized:
        _check_skipped(quantization.skip or (), names)
    chosen = dict[str, nn.Linear]()
    if quantization.linears:
        chosen = _not_skipped(linears, skip, set() if is_prequantized else _gates(model))
    whole = {
        name: linear
        for name, linear in chosen.items()
        if linear.in_features % scheme.block_size == 0
    }
    if not whole and any(isinstance(module, Conv1D) for module in model.modules()):
        raise UserError(
            f"--quantization: {type(model).__name__} has Transformers' Conv1D in place of linear layers, and "
            f"Conv1D cannot be quantized. Leave --quantization out."
        )
    stacked = {}
    if quantization.stacks:
        stacked = _choose_stacks(stacks, scheme, skip)
    if not quantization.linears and not stacked:
        raise UserError(
            f"--quantization as_stored: {type(model).__name__} has no stacked experts to keep in {scheme.name}.\n"
            f"Leave --quantization out, or use 4bit."
        )
    is_empty = quantization.linears and not whole
    if is_empty or (is_prequantized and len(whole) < len(chosen)):
        raise UserError(
            f"--quantization: {scheme.name} does not support this model: of {len(linears)} linear layers, "
            f"{len(linears) - len(chosen)} are skipped and {len(chosen) - len(whole)} have a width that is not a "
            f"multiple of {scheme.block_size}."
        )
    for name, linear in whole.items():
        model.set_submodule(name, QuantizedLinear(linear, scheme, is_prequantized))
    _quantize_stacks(model, stacked, scheme)
    weights = sum(linear.weight.numel() for linear in whole.values())
    weights += sum(stacked.values())
    unchanged = [name for name in names if name not in whole | stacked]
    return QuantizedWeights(
        scheme=scheme,
        linears=list(whole),
        stacks=list(stacked) if stacks else None,
        unchanged=unchanged,
        count=weights,
        total=total_weights(model),
    )


def _not_skipped(
    linears: dict[str, nn.Linear], skip: list[str], gates: set[nn.Module]
) -> dict[str, nn.Linear]:
    chosen = dict[str, nn.Linear]()
    for name, linear in linears.items():
        is_skipped = not should_convert_module(name, skip)
        is_skipped |= not should_convert_module(f"{name}.weight", skip)
        if not is_skipped and linear not in gates:
            chosen[name] = linear
    return chosen


def _skipped_patterns(built: BuiltModel, quantization: Quantization) -> list[str]:
    """Return names, ends of names or patterns of layers that are not quantized, as
    should_convert_module takes them."""
    model = built.model
    skip = [*(quantization.skip or ()), *quantization.not_converted]
    skip += private(model, "_keep_in_fp32_modules") or ()
    if not quantization.is_prequantized or quantization.skip is None:
        skip += get_keys_to_not_convert(model)
    if not quantization.is_prequantized:
        # HY 4's indexer casts its input to the dtype of this weight, which would be that of bytes.
        skip += private(model, "_keep_in_fp32_modules_strict") or ()
    if built.has_score:
        skip.append(SCORE)
    skip += built.towers  # names of towers and projector: all names that begin with them
    return skip


def _check_skipped(patterns: Iterable[str], names: list[str]) -> None:
    """Raise a UserError for a pattern of --skip_modules that none of the names matches."""
    for pattern in patterns:
        if all(should_convert_module(name, [pattern]) for name in names):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise UserError(
                f"--skip_modules [{pattern}]: no linear layer's name ends in it. They end in: {', '.join(ends)}."
            )


def _choose_stacks(
    stacks: dict[str, nn.Parameter], scheme: Scheme, skip: list[str]
) -> dict[str, int]:
    """Return the names of the stacked weights that are not skipped, and their numbers of weights."""
    stacked = dict[str, int]()
    for name, weight in stacks.items():
        module_name = name.rpartition(".")[0]
        # by its own name or its module's
        is_chosen = should_convert_module(name, skip) and should_convert_module(module_name, skip)
        if is_chosen and weight.shape[-1] % scheme.block_size == 0:
            stacked[name] = weight.numel()
    return stacked


def _quantize_stacks(model: nn.Module, names: Iterable[str], scheme: Scheme) -> None:
    by_module = dict[str, list[str]]()  # name of the module -> its stacked weights
    for name in names:
        module_name, _, weight_name = name.rpartition(".")
        by_module.setdefault(module_name, []).append(weight_name)
    for module_name, weight_names in by_module.items():
        quantize_stacks(model.get_submodule(module_name), weight_names, scheme)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes the same as nn.Linear: it is one, or its own forward
    (Falcon's) gives the same result with a small weight."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    small = copy(module)
    inputs = torch.tensor([[1.0, -2.0, 3.0]])
    weight = torch.arange(6.0).view(2, 3)
    bias = None if module.bias is None else torch.tensor([7.0, -8.0])
    small._parameters = {
        "weight": nn.Parameter(weight),
        "bias": bias if bias is None else nn.Parameter(bias),
    }
    with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError), torch.no_grad():
        return torch.equal(small(inputs), functional.linear(inputs, weight, bias))
    return False


def _stacked_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return stacked weights [experts, rows, columns], which their module reads itself, by name."""
    weights = dict[str, nn.Parameter]()
    for prefix, module in model.named_modules():
        if isinstance(module, _ConvNd):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and min(parameter.shape) > 1:
                weights[f"{prefix}.{name}"] = parameter
    return weights


def _gates(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers that choose or weight experts: they are small and important. Routers
    are modules whose logits Transformers can record, unless these modules contain experts."""
    kinds = set[Any]()
    for module in model.modules():
        recorded = (private(module, "_can_record_outputs") or {}).get("router_logits", ())
        for each in recorded if isinstance(recorded, list | tuple) else [recorded]:
            kinds.add(getattr(each, "target_class", each))
    routers = [module for module in model.modules() if type(module) in kinds]
    gates = set[nn.Module]()
    for router in routers:
        linears = [linear for linear in router.modules() if type(linear) is nn.Linear]
        if len(linears) == 1:
            gates.update(linears)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == 1:
            gates.add(module)
    return gates
