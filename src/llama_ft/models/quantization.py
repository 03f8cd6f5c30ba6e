"""Which layers are quantized, and how: what the settings ask for, or what the checkpoint brings.

transformers saves a 4-bit layer as `weight` [out * in / 2, 1], `weight.absmax` and a few tensors about them. With
double quantization `weight.absmax` is itself in 8 bits, in blocks of 256 that cross rows; it is expanded to fp32, one
scale a block, which is exact.
"""

import json
import re
from collections.abc import Container
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from llama_ft.config import QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models.build import read_linears
from llama_ft.models.quantized import FourBit, Int8, QuantizedLinear, Scheme, total_weights
from llama_ft.models.source import WeightSource, listed
from llama_ft.models.transformers_private import private

# A tensor that says how another one is quantized.
PART = re.compile(r"(.*\.weight)\.((nested_)?(absmax|quant_map)|quant_state\..*)")


class Quantization(NamedTuple):
    """What is quantized and how."""

    scheme: Scheme
    # Names, ends of names or patterns of layers that stay as they are. In a quantized checkpoint these are all, as
    # transformers reads llm_int8_skip_modules; else the LM head stays too.
    skip: list[str] | None
    is_stored: bool  # the checkpoint is quantized already


def choose_quantization(
    settings: QuantizationConfig, model_config: PretrainedConfig, use_peft: bool
) -> Quantization | None:
    """The quantization asked for, or the one of the checkpoint, which is taken off `model_config`. A UserError if the
    checkpoint is quantized in another way than asked for, not by bitsandbytes, or would be trained in full."""
    dtype = None if settings.compute_dtype == "auto" else cast(torch.dtype, getattr(torch, settings.compute_dtype))
    stored = getattr(model_config, "quantization_config", None)
    if stored is None:
        if settings.mode == "none":
            return None
        four_bit = FourBit(settings.quant_type, settings.block_size, dtype)
        asked = four_bit if settings.mode == "4bit" else Int8(settings.int8_threshold)
        return Quantization(asked, settings.skip_modules, is_stored=False)
    note: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    if (method := note.get("quant_method", "bitsandbytes")) != "bitsandbytes" or not note.get("load_in_4bit"):
        raise UserError(f"--model_name: it is quantized with {method}, and not in 4 bits. Use the original model.")
    if settings.mode == "8bit" or not use_peft:
        raise UserError(
            "--model_name: it is quantized already, in 4 bits. Use --use_peft, and no other --quantization."
        )
    del model_config.quantization_config
    # transformers quantizes in blocks of 64 only, and does not write that down.
    scheme = FourBit(note.get("bnb_4bit_quant_type", "fp4"), 64, dtype)
    return Quantization(scheme, note.get("llm_int8_skip_modules"), is_stored=True)


def quantize_linears(model: PreTrainedModel, quantization: Quantization) -> str:
    """Replace linear layers of a skeleton by quantized ones. Returns what was quantized and what was not, for people; a
    UserError if no linear layer is left to quantize, or a name to skip is not in the model."""
    scheme, named, is_stored = quantization
    own = [] if is_stored and named is not None else get_keys_to_not_convert(model)
    skip = [*(named or ()), *(private(model, "_keep_in_fp32_modules") or ()), *own]
    read = read_linears(model)
    linears = {name: module for name, module in model.named_modules() if _is_linear(module) and module not in read}
    for pattern in () if is_stored else named or ():
        if all(should_convert_module(name, [pattern]) for name in linears):
            ends = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears))
            raise UserError(f"--skip_modules [{pattern}]: no linear layer's name ends in it. They end in: {ends}.")
    chosen = {name: module for name, module in linears.items() if should_convert_module(name, skip)}
    whole = {name: linear for name, linear in chosen.items() if linear.in_features % scheme.block_size == 0}
    if not whole or (is_stored and len(whole) < len(chosen)):
        raise UserError(
            f"--quantization: this model does not work in {scheme.name}: of {len(linears)} linear layers "
            f"{len(linears) - len(chosen)} are skipped, and {len(chosen) - len(whole)} have rows of broken blocks."
        )
    for name, linear in whole.items():
        model.set_submodule(name, QuantizedLinear(linear, scheme, is_stored))
    weights = sum(linear.weight.numel() for linear in whole.values())
    return (
        f"Quantized to {scheme.name}: {len(whole)} linear layers, {weights:,} of {total_weights(model):,} weights; "
        f"as they are: {listed([name for name in linears if name not in whole])}"
    )


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module computes what nn.Linear does: it is one, or of a class with a forward of its own (Falcon's) that
    gives the same with a small weight."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    small, inputs = copy(module), torch.tensor([[1.0, -2.0, 3.0]])
    weight, bias = torch.arange(6.0).view(2, 3), None if module.bias is None else torch.tensor([7.0, -8.0])
    small._parameters = {"weight": nn.Parameter(weight), "bias": bias if bias is None else nn.Parameter(bias)}
    with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError), torch.no_grad():
        return torch.equal(small(inputs), functional.linear(inputs, weight, bias))
    return False


def is_part(name: str, keys: Container[str]) -> bool:
    """Whether a stored tensor says how one of the weights called `keys` is quantized."""
    found = PART.fullmatch(name)
    return found is not None and found[1] in keys


def is_4bit(key: str, headers: Container[str]) -> bool:
    """Whether the checkpoint holds the weight called `key` in 4 bits."""
    return f"{key}.absmax" in headers


def read_4bit(
    source: WeightSource, key: str, in_features: int, scheme: FourBit, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, stop), which must be whole blocks: weight uint8 [n, in / 2] and scale, the bits of fp32
    [n, in / block size]."""
    itemsize = source.tensors[key].dtype.itemsize  # transformers can store the bytes as another dtype
    a_row = in_features // 2 // itemsize
    weight = source.read_rows(key, start * a_row, stop * a_row).contiguous().view(torch.uint8)
    note = next(name for name in source.tensors if name.startswith(f"{key}.quant_state."))
    state: dict[str, Any] = json.loads(bytes(source.read(note).tolist()))
    if (state["quant_type"], state["blocksize"]) != (scheme.quant_type, scheme.block_size):
        raise UserError(f"{source.tensors[key].file}: {key} is not stored in {scheme.name}, as config.json says.")
    blocks = in_features // scheme.block_size
    first, last = start * blocks, stop * blocks
    scale = source.read_rows(f"{key}.absmax", first, last)
    if "nested_blocksize" in state:
        outer = torch.arange(first, last) // state["nested_blocksize"]
        code, outer_scale = source.read(f"{key}.nested_quant_map"), source.read(f"{key}.nested_absmax")
        scale = code.float()[scale.long()] * outer_scale.float()[outer] + state["nested_offset"]
    return weight.view(stop - start, -1), scale.float().contiguous().view(torch.int32).view(stop - start, -1)
