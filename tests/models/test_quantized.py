"""Quantized layers compute what bitsandbytes' own do, keep no activations, and say what they leave out."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, choose_quantization, quantize_linears, total_weights
from llama_ft.models.quantized import FourBit, Int8, QuantizedLinear, Scheme

SCHEMES: dict[str, Scheme] = {
    "8bit": Int8(6.0),
    "nf4": FourBit("nf4", 64, None),
    "fp4": FourBit("fp4", 64, None),
    "nf4 in blocks of 128": FourBit("nf4", 128, None),
}


def layer_of(scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedLinear:
    with torch.device("meta"):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer = QuantizedLinear(linear, scheme)
    packed, scale = scheme.quantize(weight)
    assert packed.shape == layer.weight.shape and packed.dtype == layer.weight.dtype
    assert scale.shape == layer.scale.shape and scale.dtype == layer.scale.dtype
    layer.weight, layer.scale = (torch.nn.Parameter(tensor, requires_grad=False) for tensor in (packed, scale))
    layer.bias = None if bias is None else torch.nn.Parameter(bias)
    return layer


def bitsandbytes_layer(scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
    rows, columns = weight.shape
    if isinstance(scheme, Int8):
        layer = bitsandbytes.nn.Linear8bitLt(columns, rows, has_fp16_weights=False, threshold=scheme.threshold)
        layer.weight = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(columns, rows, compute_dtype=weight.dtype, quant_type=scheme.quant_type)
        layer.weight = bitsandbytes.nn.Params4bit(
            weight.clone(),
            requires_grad=False,
            quant_type=scheme.quant_type,
            blocksize=scheme.block_size,
            compress_statistics=False,
        )
    layer.bias = torch.nn.Parameter(bias.clone())
    return layer.to("cpu").train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_values_and_gradients_are_those_of_bitsandbytes_layers(name: str, dtype: torch.dtype) -> None:
    """Their forward pass multiplies by the weight, their backward pass by the weight they dequantize."""
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 256, dtype=dtype), torch.randn(40, dtype=dtype)
    inputs = torch.randn(2, 5, 256, dtype=dtype)
    seen = []
    for layer in (layer_of(SCHEMES[name], weight, bias.clone()), bitsandbytes_layer(SCHEMES[name], weight, bias)):
        own = inputs.clone().requires_grad_()
        output = layer(own)
        output.square().sum().backward()
        assert own.grad is not None and layer.bias.grad is not None
        seen.append((output.detach(), own.grad, layer.bias.grad))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # bf16: the bias is added before rounding there
    for ours, theirs in zip(*seen, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    exact = torch.nn.functional.linear(inputs, weight, bias)
    assert 1e-3 < (seen[0][0] - exact).norm() / exact.norm() < 0.2, "it is quantized, and right"


@pytest.mark.parametrize("name", SCHEMES)
def test_only_parameters_are_kept_for_the_backward_pass(name: str) -> None:
    layer, kept = layer_of(SCHEMES[name], torch.randn(40, 256)), []
    inputs = torch.randn(3, 256, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = layer(inputs)
    assert {tensor.data_ptr() for tensor in kept} == {layer.weight.data_ptr(), layer.scale.data_ptr()}
    attributes = [value for value in vars(output.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert not attributes, "nothing hides on the context, as bitsandbytes' inputs do"


def skeleton_of(folder: Path) -> tuple[PretrainedConfig, PreTrainedModel]:
    config = AutoConfig.from_pretrained(folder)
    return config, build_on_meta(config, ModelConfig(model_name=str(folder)))


def test_what_is_left_out_is_listed(tiny_model: Path) -> None:
    config, model = skeleton_of(tiny_model)
    weights = model.num_parameters()
    settings = QuantizationConfig(mode="4bit", block_size=32, skip_modules=["layers.0.self_attn.q_proj"])
    quantization = choose_quantization(settings, config, use_peft=True)
    assert quantization is not None
    summary = quantize_linears(model, quantization)
    assert "Quantized to 4bit (nf4, blocks of 32): 11 linear layers" in summary
    left_out = ["0.self_attn.q_proj", "0.mlp.down_proj", "1.mlp.down_proj"]  # the latter have no whole blocks
    assert summary.endswith(f"as they are: {', '.join(f'model.layers.{name}' for name in left_out)}, lm_head")
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[1].self_attn.q_proj, QuantizedLinear)
    assert total_weights(model) == weights


@pytest.mark.parametrize(
    ("settings", "use_peft", "stored", "told"),
    [
        ({"mode": "8bit", "skip_modules": ["q_prj"]}, True, None, "q_prj"),
        ({}, True, {"load_in_8bit": True}, "quantized with bitsandbytes, and not in 4 bits"),
        ({}, True, {"quant_method": "gptq", "bits": 4}, "quantized with gptq"),
        ({}, False, {"load_in_4bit": True}, "--use_peft"),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_the_way_out(
    tiny_model: Path, settings: dict[str, Any], use_peft: bool, stored: dict[str, Any] | None, told: str
) -> None:
    config, model = skeleton_of(tiny_model)
    if stored is not None:
        config.quantization_config = stored
    with pytest.raises(UserError, match=told):
        quantization = choose_quantization(QuantizationConfig(**settings), config, use_peft)
        assert quantization is not None
        quantize_linears(model, quantization)
