"""Quantized layers compute what bitsandbytes' own do, keep no activations, and say what they leave
out."""

import copy
import weakref
from pathlib import Path
from typing import Any, Literal

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import (
    BuiltModel,
    build_on_meta,
    choose_quantization,
    quantize_linears,
    total_weights,
)
from llama_ft.models.quantization.choice import Quantization
from llama_ft.models.quantization.layers import (
    FourBit,
    Int8,
    QuantizedLinear,
    QuantizedStacks,
    Scheme,
    quantized_weights,
)

DOUBLE = FourBit("nf4", 64, None, double_quant=True)
SCHEMES: dict[str, Scheme] = {
    "8bit": Int8(6.0),
    "nf4": FourBit("nf4", 64, None),
    "fp4": FourBit("fp4", 64, None),
    "nf4 in blocks of 128": FourBit("nf4", 128, None),
}


def layer_of(
    scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> QuantizedLinear:
    with torch.device("meta"):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer = QuantizedLinear(linear, scheme)
    packed, scale = scheme.quantize(weight)
    assert packed.shape == layer.weight.shape and packed.dtype == layer.weight.dtype
    assert scale.shape == layer.scale.shape and scale.dtype == layer.scale.dtype
    layer.weight, layer.scale = (
        torch.nn.Parameter(tensor, requires_grad=False) for tensor in (packed, scale)
    )
    layer.bias = None if bias is None else torch.nn.Parameter(bias)
    return layer


def bitsandbytes_layer(scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
    rows, columns = weight.shape
    if isinstance(scheme, Int8):
        layer = bitsandbytes.nn.Linear8bitLt(
            columns, rows, has_fp16_weights=False, threshold=scheme.threshold
        )
        layer.weight = bitsandbytes.nn.Int8Params(
            weight.clone(), requires_grad=False, has_fp16_weights=False
        )
    else:
        layer = bitsandbytes.nn.Linear4bit(
            columns, rows, compute_dtype=weight.dtype, quant_type=scheme.quant_type
        )
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
def test_quantized_layers_have_the_values_and_gradients_of_bitsandbytes(
    name: str, dtype: torch.dtype
) -> None:
    """Their forward pass multiplies by the weight, their backward pass by the weight they
    dequantize."""
    torch.manual_seed(0)
    weight = torch.randn(40, 256, dtype=dtype)
    bias = torch.randn(40, dtype=dtype)
    inputs = torch.randn(2, 5, 256, dtype=dtype)
    seen = []
    for layer in (
        layer_of(SCHEMES[name], weight, bias.clone()),
        bitsandbytes_layer(SCHEMES[name], weight, bias),
    ):
        own = inputs.clone().requires_grad_()
        output = layer(own)
        output.square().sum().backward()
        assert own.grad is not None and layer.bias.grad is not None
        seen.append((output.detach(), own.grad, layer.bias.grad))
    # bf16: the bias is added before rounding there
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(*seen, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    exact = torch.nn.functional.linear(inputs, weight, bias)
    assert 1e-3 < (seen[0][0] - exact).norm() / exact.norm() < 0.2, "it is quantized, and right"


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocks", [1, 2, 6, 40, 256, 300])
def test_each_row_is_double_quantized_as_bitsandbytes_quantizes_it_alone(
    quant_type: Literal["nf4", "fp4"], blocks: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 64 * blocks) * torch.rand(7, 1)
    scheme = FourBit(quant_type, 64, None, double_quant=True)
    layer = layer_of(scheme, weight)
    ours = scheme.dequantize(layer.weight, layer.scale, torch.float32)
    for row, values in zip(weight, ours, strict=True):
        packed, state = functional.quantize_4bit(
            row.unsqueeze(0), blocksize=64, quant_type=quant_type, compress_statistics=True
        )
        assert torch.equal(functional.dequantize_4bit(packed, state).squeeze(0), values)
    some = layer_of(scheme, weight[2:5])
    assert torch.equal(some.scale, layer.scale[2:5])


def test_a_double_quantized_layer_multiplies_by_its_dequantized_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 256)
    layer = layer_of(DOUBLE, weight)
    dequantized = DOUBLE.dequantize(layer.weight, layer.scale, torch.float32)
    exact = SCHEMES["nf4"].dequantize(*SCHEMES["nf4"].quantize(weight), torch.float32)
    assert 0 < (dequantized - exact).norm() < 0.01 * exact.norm()
    inputs = torch.randn(5, 256, requires_grad=True)
    output = layer(inputs)
    output.sum().backward()
    torch.testing.assert_close(output.detach(), inputs.detach() @ dequantized.T)
    torch.testing.assert_close(inputs.grad, torch.ones(5, 40) @ dequantized)


@pytest.mark.parametrize("name", SCHEMES)
def test_only_parameters_are_kept_for_the_backward_pass(name: str) -> None:
    layer = layer_of(SCHEMES[name], torch.randn(40, 256))
    kept = []
    inputs = torch.randn(3, 256, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        output = layer(inputs)
    assert {tensor.data_ptr() for tensor in kept} == {
        layer.weight.data_ptr(),
        layer.scale.data_ptr(),
    }
    attributes = [
        value for value in vars(output.grad_fn).values() if isinstance(value, torch.Tensor)
    ]
    assert not attributes, "nothing hides on the context, as bitsandbytes' inputs do"


def skeleton_of(folder: Path) -> tuple[PretrainedConfig, PreTrainedModel]:
    config = AutoConfig.from_pretrained(folder)
    return config, build_on_meta(config, ModelConfig(model_name=str(folder)))


def test_layers_that_are_not_quantized_are_listed(tiny_model: Path) -> None:
    config, built = skeleton_of(tiny_model)
    model = built.model
    weights = model.num_parameters()
    settings = QuantizationConfig(
        mode="4bit", block_size=32, skip_modules=["layers.0.self_attn.q_proj"]
    )
    quantization = choose_quantization(settings, config, use_peft=True)
    assert quantization is not None
    summary = str(quantize_linears(built, quantization))
    assert "Quantized to 4bit (nf4, blocks of 32): 11 linear layers" in summary
    # the latter have no whole blocks
    left_out = ["0.self_attn.q_proj", "0.mlp.down_proj", "1.mlp.down_proj"]
    assert summary.endswith(
        f"not quantized: {', '.join(f'model.layers.{name}' for name in left_out)}, lm_head"
    )
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[1].self_attn.q_proj, QuantizedLinear)
    assert total_weights(model) == weights


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 5, "sliding_window": 16},  # [experts, in, out], with biases
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
    },
}


def moe_models(model_type: str, scheme: Scheme, experts_implementation: str) -> tuple[Any, Any]:
    """A model whose weights bitsandbytes' own functions have rounded matrix by matrix, and ours
    with the same ones quantized; of both the embedding is trained."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(model_type, **shape, **EXPERTS[model_type])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation=experts_implementation
    )
    ours = copy.deepcopy(plain)
    quantize_linears(BuiltModel(ours), Quantization(scheme, None, is_prequantized=False))
    four_bit = isinstance(scheme, FourBit)
    found = {id(quantized.weight): quantized for quantized in quantized_weights(ours)}
    for name, parameter in list(ours.named_parameters()):
        if (quantized := found.get(id(parameter))) is None:
            continue
        weight = plain.get_parameter(name).data
        packed = []
        scales = []
        for matrix in weight if weight.dim() == 3 else [weight]:
            if four_bit:
                data, state = functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
                rounded = functional.dequantize_4bit(data, state)
                scale = state.absmax
            else:
                data, scale, _ = functional.int8_vectorwise_quant(matrix.half())
                rounded = functional.int8_vectorwise_dequant(data, scale)
            matrix.copy_(rounded)
            packed.append(data)
            scales.append(scale)
        module = ours.get_submodule(name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        scale_name = "scale" if isinstance(module, QuantizedLinear) else f"{last}_scale"
        for part, values, like in (
            (last, packed, parameter),
            (scale_name, scales, quantized.scale),
        ):
            values = torch.stack(values).view(like.shape)
            values = values if values.dtype == like.dtype else values.view(like.dtype)
            module._parameters[part] = torch.nn.Parameter(values, requires_grad=False)
    for model in (plain, ours):
        model.requires_grad_(False).train().get_input_embeddings().requires_grad_(True)
    return plain, ours


# Each pair of two of the three.
@pytest.mark.parametrize(
    ("name", "experts_implementation", "is_checkpointed"),
    [
        ("nf4", "grouped_mm", False),
        ("nf4", "eager", True),
        ("8bit", "grouped_mm", True),
        ("8bit", "eager", False),
    ],
)
@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_compute_with_the_weights_that_bitsandbytes_dequantizes(
    model_type: str, name: str, experts_implementation: str, is_checkpointed: bool
) -> None:
    seen = []
    ids = torch.arange(40)[None]
    for model in moe_models(model_type, SCHEMES[name], experts_implementation):
        if is_checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seen.append((loss.detach(), model.get_input_embeddings().weight.grad))
    for expected, ours in zip(*seen, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("experts_implementation", ["grouped_mm", "eager"])
def test_dequantized_experts_are_released_after_each_layer(
    experts_implementation: str, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by what autograd keeps until the backward pass."""
    plain, ours = moe_models("mixtral", SCHEMES["nf4"], experts_implementation)
    weights = sum(weight.numel() for weight in plain.model.layers[0].mlp.experts.parameters())
    held_bytes = sum(weight.nbytes for weight in ours.model.layers[0].mlp.experts.parameters())
    assert held_bytes == weights // 2 + weights // 64 * 4
    if is_checkpointed:
        ours.activation_checkpointing_enable({"use_reentrant": False})
    dequantized = []
    read = QuantizedStacks._dequantized

    def noting(*given: Any) -> torch.Tensor:
        value = read(*given)
        dequantized.append(weakref.ref(value.untyped_storage()))
        return value

    monkeypatch.setattr(QuantizedStacks, "_dequantized", noting)
    ids = torch.arange(40)[None]
    loss = ours(input_ids=ids, labels=ids, use_cache=False).loss
    assert len(dequantized) == 2 * 2 and not any(storage() for storage in dequantized)
    loss.backward()
    assert len(dequantized) > 2 * 2 and not any(storage() for storage in dequantized)


@pytest.mark.parametrize(
    ("model_type", "settings", "gate"),
    [
        ("afmoe", {"num_experts": 4, "num_dense_layers": 1}, "router.gate"),
        ("longcat_flash", {"n_routed_experts": 4, "zero_expert_num": 2}, "router.classifier"),
        ("qwen2_moe", {"num_experts": 4}, "shared_expert_gate"),
    ],
)
def test_routers_and_gates_are_not_quantized(
    model_type: str, settings: dict[str, Any], gate: str
) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_layers": 2, "vocab_size": 320}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **shape, **settings)
        )
    quantize_linears(BuiltModel(model), Quantization(SCHEMES["8bit"], None, is_prequantized=False))
    linears = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    others = {name for name in linears if not name.endswith((gate, "lm_head"))}
    assert not others and any(name.endswith(gate) for name in linears)
    for name, weight in model.named_parameters():
        if ".experts." in name and weight.dim() == 3:
            assert not weight.is_floating_point(), name


@pytest.mark.parametrize(
    ("settings", "use_peft", "stored", "message"),
    [
        ({"mode": "8bit", "skip_modules": ["q_prj"]}, True, None, "q_prj"),
        (
            {},
            True,
            {"load_in_8bit": True},
            "quantization_config of bitsandbytes that is not supported",
        ),
        (
            {},
            True,
            {"quant_method": "quark"},
            "quantization_config of quark that is not supported",
        ),
        ({}, False, {"load_in_4bit": True}, "--use_peft"),
    ],
)
def test_models_that_cannot_be_quantized_are_rejected_with_a_way_out(
    tiny_model: Path,
    settings: dict[str, Any],
    use_peft: bool,
    stored: dict[str, Any] | None,
    message: str,
) -> None:
    config, built = skeleton_of(tiny_model)
    if stored is not None:
        config.quantization_config = stored
    with pytest.raises(UserError, match=message):
        quantization = choose_quantization(QuantizationConfig(**settings), config, use_peft)
        assert quantization is not None
        quantize_linears(built, quantization)


def test_transformers_conv1d_cannot_be_quantized() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", n_embd=64, n_head=4, n_layer=1)
        )
    with pytest.raises(UserError, match="GPT2LMHeadModel has Transformers' Conv1D"):
        quantize_linears(
            BuiltModel(model), Quantization(SCHEMES["8bit"], None, is_prequantized=False)
        )


def test_layers_that_transformers_keeps_in_fp32_are_not_quantized() -> None:
    """HY 4's indexer casts its input to the dtype of such a weight."""
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    more = {"q_lora_rank": 64, "kv_lora_rank": 64, "n_routed_experts": 4, "indexer_types": ["full"]}
    kinds = {"mlp_layer_types": ["dense"], "layer_types": ["indexed_attention"]}
    with torch.device("meta"):
        config = AutoConfig.for_model("hy_v4", **shape, **more, **kinds, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config)
    quantize_linears(BuiltModel(model), Quantization(SCHEMES["8bit"], None, is_prequantized=False))
    indexer = model.model.layers[0].self_attn.indexer
    assert type(indexer.weights_proj) is torch.nn.Linear
    assert type(indexer.wk) is not torch.nn.Linear
