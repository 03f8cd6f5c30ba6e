"""Which layers are quantized, and how: what the settings ask for, or what the checkpoint brings."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from llama_ft.config import QuantizationConfig
from llama_ft.config.fields import SETTINGS
from llama_ft.errors import UserError
from llama_ft.models.quantized import FourBit, Int8, QuantizedLinear, Scheme

NAMED_AT_MOST = 6


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
