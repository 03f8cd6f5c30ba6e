"""Which layers are quantized, and how: what the settings ask for, or what the checkpoint brings."""

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from llama_ft.config import QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models.quantized import FourBit, Int8, QuantizedLinear, Scheme, total_weights
from llama_ft.models.source import listed


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
    method = note.get("quant_method", "bitsandbytes")
    quant_type = note.get("bnb_4bit_quant_type", "fp4")
    if method != "bitsandbytes" or quant_type not in ("nf4", "fp4"):
        raise UserError(f"--model_name: it is quantized with {method} ({quant_type}). Use the original model.")
    mode: Literal["8bit", "4bit"] = "8bit" if note.get("load_in_8bit") else "4bit"
    threshold = float(note.get("llm_int8_threshold", 6.0))
    if settings.mode not in ("none", mode):
        raise UserError(f"--quantization {settings.mode}: this checkpoint is quantized already, with {mode}.")
    if not use_peft:
        raise UserError(f"--model_name: quantized weights ({mode}) cannot be trained. Use --use_peft.")
    del model_config.quantization_config
    # transformers quantizes in blocks of 64 only, and does not write that down.
    scheme = Int8(threshold) if mode == "8bit" else FourBit(quant_type, 64, dtype)
    return Quantization(scheme, note.get("llm_int8_skip_modules"), is_stored=True)


def quantize_linears(model: PreTrainedModel, quantization: Quantization) -> str:
    """Replace linear layers of a skeleton by quantized ones. Returns what was quantized and what was not, for people; a
    UserError if no linear layer is left to quantize, or a name to skip is not in the model."""
    scheme = quantization.scheme
    own = quantization.skip is not None and quantization.is_stored
    skip = [*(quantization.skip or ()), *(model._keep_in_fp32_modules or ())]
    skip += [] if own else get_keys_to_not_convert(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for pattern in () if quantization.is_stored else quantization.skip or ():
        if all(should_convert_module(name, [pattern]) for name in linears):
            ends = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears))
            raise UserError(f"--skip_modules [{pattern}]: no linear layer's name ends in it. They end in: {ends}.")
    chosen = {name: module for name, module in linears.items() if should_convert_module(name, skip)}
    broken = [name for name, linear in chosen.items() if linear.in_features % scheme.block_size]
    quantized = [name for name in chosen if name not in broken]
    if not quantized or (broken and quantization.is_stored):
        raise UserError(
            f"--quantization: this model does not work in {scheme.name}: of its {len(linears)} linear layers "
            f"{len(linears) - len(chosen)} are skipped, and the rows of {len(broken)} are not whole blocks."
        )
    layers = {name: QuantizedLinear(linears[name], scheme, quantization.is_stored) for name in quantized}
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    before = sum(linears[name].weight.numel() for name in layers)
    held = sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers.values())
    summary = (
        f"Quantized to {scheme.name}: {len(layers)} linear layers, {before:,} weights in {held / 2**20:,.1f} MiB; "
    )
    summary += f"{total_weights(model) - before:,} weights stay as they are."
    skipped = [name for name in linears if name not in chosen]
    for why, names in {"Linear layers left out": skipped, "Their rows are not whole blocks": broken}.items():
        summary += f"\n  {why}: {listed(names)}" if names else ""
    return summary
