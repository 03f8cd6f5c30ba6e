"""A checkpoint that is published quantized is read as Transformers dequantizes it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    LlamaConfig,
    Mistral3Config,
    Mxfp4Config,
    PreTrainedModel,
)

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, build_on_meta, load_model_config
from llama_ft.models.adapters.names import index_names
from llama_ft.models.published.formats import published_format
from llama_ft.models.published.quantization_config import remove_quantization_config
from llama_ft.models.published.sources import describe_published, open_dequantized
from llama_ft.models.weights.conversion import open_model_weights
from llama_ft.models.weights.load_weights import account_for

Tensors = dict[str, torch.Tensor]
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
QWEN3_MOE = LLAMA | {"moe_intermediate_size": 128, "num_experts": 3, "head_dim": 64}

DEEPSEEK_V3 = LLAMA | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 301,
}
MXFP4_NOTE = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}


def publish(
    folder: Path,
    model_type: str,
    shape: dict[str, Any],
    note: dict[str, Any],
    quantize: Callable[[str, torch.Tensor], Tensors],
) -> Path:
    """Save a random model, with `quantize` of every projection of its decoder layers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = Tensors()
    for name, tensor in load_file(file).items():
        is_quantized = "_proj" in name and tensor.ndim > 1
        tensors |= quantize(name, tensor) if is_quantized else {name: tensor}
    save_file(tensors, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = note
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def random_fp8(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape) * 50).to(torch.float8_e4m3fn)


def in_blocks(name: str, tensor: torch.Tensor) -> Tensors:
    """Random codes, and scales per block of 128 x 128."""
    *stack, rows, columns = tensor.shape
    grid = (*stack, -(-rows // 128), -(-columns // 128))
    scale = torch.rand(grid) * 1e-3 + 1e-4
    return {name: random_fp8(tuple(tensor.shape)), f"{name}_scale_inv": scale}


def per_tensor(name: str, tensor: torch.Tensor) -> Tensors:
    """Random codes and one scale, with the scale of the inputs, as Ministral 3 is published."""
    scale = torch.rand(()) * 1e-3 + 1e-4
    prefix = name.removesuffix(".weight")
    return {
        name: random_fp8(tuple(tensor.shape)),
        f"{prefix}.weight_scale_inv": scale.to(torch.bfloat16),
        f"{prefix}.activation_scale": torch.ones((), dtype=torch.bfloat16),
    }


def with_exponents(name: str, tensor: torch.Tensor) -> Tensors:
    """Scales that are powers of 2, in one byte each."""
    tensors = in_blocks(name, tensor)
    scale = f"{name}_scale_inv"
    tensors[scale] = tensors[scale].to(torch.float8_e8m0fnu)
    return tensors


def experts_in_mxfp4(name: str, tensor: torch.Tensor) -> Tensors:
    """Random codes and exponents of stacked experts [experts, in, out]. Biases stay."""
    if not name.endswith("_proj"):
        return {name: tensor}
    experts, columns, rows = tensor.shape
    blocks = columns // 32
    return {
        f"{name}_blocks": torch.randint(256, (experts, rows, blocks, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(115, 124, (experts, rows, blocks), dtype=torch.uint8),
    }


def fp8_note(**settings: Any) -> dict[str, Any]:
    note = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return note | settings


FP8_CASES = {
    "blocks": ("llama", LLAMA, fp8_note(), in_blocks),
    "exponents": ("llama", LLAMA, fp8_note(scale_fmt="ue8m0"), with_exponents),
    "tensor": (
        "llama",
        LLAMA,
        fp8_note(weight_block_size=None, activation_scheme="static"),
        per_tensor,
    ),
    "experts": ("qwen3_moe", QWEN3_MOE, fp8_note(), in_blocks),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3, fp8_note(), in_blocks),
}


def skeleton(folder: Path) -> BuiltModel:
    config = load_model_config(folder, False)
    del config.quantization_config
    return build_on_meta(config, ModelConfig(model_name=str(folder)), folder=folder)


def check(folder: Path, expected: PreTrainedModel) -> None:
    """Compare every parameter with Transformers', whole and in uneven blocks of rows."""
    built = skeleton(folder)
    source = open_model_weights(folder, built).source
    keys = account_for(index_names(built.model), source.tensors, folder)
    parameters = dict(expected.named_parameters())
    assert keys.keys() == parameters.keys()
    for name, parameter in parameters.items():
        key = keys[name]
        rows = parameter.shape[0]
        assert source.tensors[key].shape == tuple(parameter.shape)
        # from 5.24 on, Transformers keeps routers of DeepSeek V3 in fp32, as it saved them
        assert source.tensors[key].dtype in (torch.bfloat16, parameter.dtype)
        assert torch.equal(source.read(key).to(parameter.dtype), parameter), name
        parts = [
            source.read_rows(key, start, min(start + 37, rows)) for start in range(0, rows, 37)
        ]
        assert torch.equal(torch.cat(parts).to(parameter.dtype), parameter), name


@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8_is_read_as_transformers_dequantizes_it(tmp_path: Path, case: str) -> None:
    folder = publish(tmp_path, *FP8_CASES[case])
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    check(folder, expected)


def test_mxfp4_is_read_as_transformers_dequantizes_it(tmp_path: Path) -> None:
    folder = publish(tmp_path, "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4)
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", quantization_config=Mxfp4Config(dequantize=True)
    )
    check(folder, expected)


@pytest.mark.parametrize("trusted", [True, False])
def test_kimi_k2_is_built_as_deepseek_v3(tmp_path: Path, trusted: bool) -> None:
    """Its own code is for older versions of Transformers."""
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    settings = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    settings |= DEEPSEEK_V3 | {"auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load_model_config(tmp_path, trusted)
    model = ModelConfig(model_name=str(tmp_path), trust_remote_code=trusted)
    built = build_on_meta(config, model, folder=tmp_path)
    assert type(built.model).__name__ == "DeepseekV3ForCausalLM"
    assert type(built.model).__module__.startswith("transformers.")
    assert config.name_or_path == str(tmp_path)
    written = config.to_dict()
    assert written["model_type"] == "deepseek_v3" and "auto_map" not in written


def test_a_block_at_the_edge_may_be_smaller(tmp_path: Path) -> None:
    """Transformers rejects it: 576 rows are 4.5 blocks."""
    shape = LLAMA | {"intermediate_size": 576}
    folder = publish(tmp_path, "llama", shape, fp8_note(), in_blocks)
    stored = load_file(folder / "model.safetensors")
    source = open_dequantized(folder)
    for part in ("up_proj", "down_proj"):
        name = f"model.layers.0.mlp.{part}.weight"
        codes = stored[name].float()
        scale = stored[f"{name}_scale_inv"]
        expected = torch.empty_like(codes)
        for row in range(codes.shape[0]):
            for column in range(0, codes.shape[1], 64):
                values = codes[row, column : column + 64] * scale[row // 128, column // 128]
                expected[row, column : column + 64] = values
        assert torch.equal(source.read(name), expected.bfloat16())
        assert torch.equal(source.read_rows(name, 120, 135), expected[120:135].bfloat16())


def test_stacked_experts_in_fp8_have_a_grid_of_scales_each(tmp_path: Path) -> None:
    name = "experts.gate_up_proj"
    codes = random_fp8((3, 200, 130))
    scale = torch.rand(3, 2, 2)
    save_file({name: codes, f"{name}_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fp8_note()}))
    expanded = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :130]
    expected = (codes.float() * expanded).bfloat16()
    source = open_dequantized(tmp_path)
    assert torch.equal(source.read(name), expected)
    assert torch.equal(source.read_rows(name, 1, 3), expected[1:])


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_checkpoints_of_modelopt_are_read(tmp_path: Path, algorithm: str) -> None:
    """By hand, as NVFP4QTensor and FP8QTensor of ModelOpt compute them."""
    expected = Tensors()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def quantize(name: str, tensor: torch.Tensor) -> Tensors:
        rows, columns = tensor.shape
        prefix = name.removesuffix("weight")
        scale_of_inputs = {f"{prefix}input_scale": torch.rand(())}
        if algorithm == "FP8":
            codes = random_fp8((rows, columns))
            scale = torch.rand(()) * 1e-3
            expected[name] = (codes.float() * scale).bfloat16()
            return {name: codes, f"{name}_scale": scale} | scale_of_inputs
        low = torch.randint(16, (rows, columns // 2))
        high = torch.randint(16, (rows, columns // 2))
        scale = (torch.rand(rows, columns // 16) * 400).to(torch.float8_e4m3fn)
        second = torch.rand(()) * 1e-5
        stored = {name: (low + 16 * high).to(torch.uint8), f"{name}_scale": scale}
        by_block = scale.float() * second
        by_weight = by_block.repeat_interleave(16, 1)
        codes = torch.stack([low, high], dim=-1).flatten(1)
        expected[name] = (values[codes] * by_weight).bfloat16()
        return stored | {f"{name}_scale_2": second} | scale_of_inputs

    note = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    publish(tmp_path, "llama", LLAMA, note, quantize)
    text = describe_published(tmp_path, load_model_config(tmp_path, False))
    assert text is not None and f"quantized: {algorithm} of ModelOpt" in text
    source = open_dequantized(tmp_path)
    assert len(expected) == 7
    assert not any("scale" in name for name in source.tensors)
    for name, tensor in expected.items():
        assert torch.equal(source.read(name), tensor), name
        assert torch.equal(source.read_rows(name, 5, 70), tensor[5:70]), name


def test_experts_in_fp4_have_two_codes_per_byte(tmp_path: Path) -> None:
    """As DeepSeek V4's: int8 with blocks of 32 columns, beside layers in FP8."""
    name = "model.layers.0.mlp.up_proj.weight"

    def quantize(stored: str, tensor: torch.Tensor) -> Tensors:
        if stored != name:
            return in_blocks(stored, tensor)
        codes = torch.randint(-128, 128, (384, 128), dtype=torch.int8)
        scale = torch.randint(110, 130, (384, 8), dtype=torch.uint8)
        return {name: codes, name.replace("weight", "scale"): scale}

    folder = publish(tmp_path, "llama", LLAMA, fp8_note(expert_dtype="fp4"), quantize)
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = load_file(folder / "model.safetensors")
    scale = stored[name.replace("weight", "scale")]
    expected = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.bfloat16)
    assert torch.equal(open_dequantized(folder).read(name), expected)


def broken(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Publish in FP8 and change the tensors."""
    publish(folder, "llama", LLAMA, fp8_note(), in_blocks)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}},
    "format": "pack-quantized",
}


@pytest.mark.parametrize("note", [None, {"quant_method": "mxfp4"}])
def test_scales_without_their_quantization_config_are_named(
    tmp_path: Path, note: dict[str, Any] | None
) -> None:
    """For example after somebody has removed it from config.json to make a tool read the model."""
    publish(tmp_path, "llama", LLAMA, fp8_note(), in_blocks)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"quantization_config": note}))
    config = load_model_config(tmp_path, False)
    remove_quantization_config(config)
    built = build_on_meta(config, ModelConfig(model_name=str(tmp_path)), folder=tmp_path)
    source = open_model_weights(tmp_path, built).source
    expected = r"(?s)not part of the model: .*_scale_inv.*quantization_config.*Download"
    with pytest.raises(UserError, match=expected):
        account_for(index_names(built.model), source.tensors, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_other_types_of_8_bits_are_scaled_too(tmp_path: Path, dtype: torch.dtype) -> None:
    name = SCALE.removesuffix("_scale_inv")
    codes = (torch.randn(384, 256) * 10).to(dtype)
    folder = broken(tmp_path, lambda tensors: tensors.update({name: codes}))
    scale = load_file(folder / "model.safetensors")[SCALE]
    expanded = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (codes.float() * expanded).bfloat16()
    assert torch.equal(open_dequantized(folder).read(name), expected)


def test_a_missing_scale_is_named_with_its_file(tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.pop(SCALE))
    with pytest.raises(UserError, match=rf"model.safetensors: .*up_proj.weight .*{SCALE}.*missing"):
        open_dequantized(folder)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_a_wrong_tensor_of_experts_in_mxfp4_is_named_with_its_file(
    tmp_path: Path, part: str
) -> None:
    publish(tmp_path, "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    tensors[name] = tensors[name][:, 1:].float()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: {name} is torch.float32"):
        open_dequantized(tmp_path)
    if part == "scales":
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(UserError, match=f"model.safetensors: .*{name} is missing"):
            open_dequantized(tmp_path)


def test_an_expert_that_is_missing_is_named_with_its_file(tmp_path: Path) -> None:
    folder = publish(tmp_path, *FP8_CASES["experts"])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part in ("weight", "weight_scale_inv"):
        del tensors[f"model.layers.0.mlp.experts.1.up_proj.{part}"]
    save_file(tensors, file, {"format": "pt"})
    expected = (
        r"model.safetensors: the tensors for .*gate_up_proj.* 3 of .*gate_proj.*, 2 of .*up_p"
    )
    with pytest.raises(UserError, match=expected):
        open_model_weights(folder, skeleton(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_named_with_its_file(tmp_path: Path, value: float) -> None:
    def change(tensors: Tensors) -> None:
        tensors[SCALE][1, 0] = value

    source = open_dequantized(broken(tmp_path, change))
    name = SCALE.removesuffix("_scale_inv")
    assert source.read_rows(name, 0, 128).isfinite().all()
    with pytest.raises(UserError, match=rf"model.safetensors: {SCALE} has values .*not finite"):
        source.read(name)


def test_a_code_that_is_not_finite_is_named_with_its_file(tmp_path: Path) -> None:
    name = SCALE.removesuffix("_scale_inv")

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[130, 7] = 0x7F  # NaN in E4M3

    source = open_dequantized(broken(tmp_path, change))
    with pytest.raises(UserError, match=rf"model.safetensors: {name} has values .*not finite"):
        source.read(name)


def test_an_exponent_that_is_not_a_number_is_named_with_its_file(tmp_path: Path) -> None:
    publish(tmp_path, "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[f"{name}_scales"][2, 5, 1] = 255
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model.safetensors: {name}_scales has values .*not fin"):
        open_dequantized(tmp_path).read_rows(name, 2, 3)


def test_a_quantization_config_over_plain_weights_is_reported(tmp_path: Path) -> None:
    """A checkpoint that was dequantized by a script that left config.json as it was."""
    publish(tmp_path, "llama", LLAMA, fp8_note(), lambda name, tensor: {name: tensor})
    config = load_model_config(tmp_path, False)
    text = describe_published(tmp_path, config)
    assert text is not None and "quantized (FP8 in blocks of 128 x 128), but no tensor is" in text
    quantized = tmp_path / "quantized"
    publish(quantized, "llama", LLAMA, fp8_note(), in_blocks)
    text = describe_published(quantized, load_model_config(quantized, False))
    assert text is not None and "The checkpoint is quantized: FP8 in blocks" in text


def test_the_quantization_config_of_a_text_part_is_found(tmp_path: Path) -> None:
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    save_file(in_blocks(name, torch.empty(256, 128)), tmp_path / "model.safetensors")
    config = Mistral3Config(
        text_config={"model_type": "mistral", "quantization_config": fp8_note()}
    )
    config.save_pretrained(tmp_path)
    assert open_dequantized(tmp_path).tensors[name].dtype == torch.bfloat16
    loaded = load_model_config(tmp_path, False)
    weight_format = published_format(loaded.to_dict())
    assert weight_format is not None and weight_format.quantization_config == fp8_note()
    assert remove_quantization_config(loaded) == fp8_note()
    assert published_format(loaded.to_dict()) is None
    assert '"quantization_config"' not in json.dumps(loaded.to_dict())


def test_a_scale_of_another_shape_is_named_with_its_file(tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.update({SCALE: torch.ones(3, 1)}))
    with pytest.raises(UserError, match=rf"{SCALE} has the shape \[3, 1\]; expected \[3, 2\]"):
        open_dequantized(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_scale_of_another_type_is_named_with_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.update({SCALE: tensors[SCALE].to(dtype)}))
    with pytest.raises(UserError, match=rf"model.safetensors: {SCALE} is {dtype}; expected"):
        open_dequantized(folder)


def test_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    """safetensors knows it, but has no torch type for it."""
    header = json.dumps({"some.weight": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}})
    length = len(header).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(length + header.encode() + bytes(8))
    with pytest.raises(UserError, match=r"model.safetensors: some.weight has the type F4.*torch"):
        open_dequantized(tmp_path)


@pytest.mark.parametrize(
    ("note", "problem"),
    [
        ({"quant_method": "fp8", "weight_block_size": "x"}, "weight_block_size is x;"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None;"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups is"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
            "expected a group with weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 0}}},
            },
            "group_size is 0;",
        ),
        ({"quant_method": ["fp8"]}, "quant_method is ['fp8'];"),
        (COMPRESSED | {"sparsity_config": [1]}, "sparsity_config is [1];"),
        (COMPRESSED | {"transform_config": "x"}, "transform_config is x;"),
    ],
)
def test_a_malformed_quantization_config_is_named(note: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match="quantization_config") as error:
        published_format(LlamaConfig(quantization_config=note).to_dict())
    assert problem in str(error.value)


def test_other_algorithms_of_modelopt_are_rejected() -> None:
    config = LlamaConfig(quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(UserError, match=r"modelopt \(W4A8_AWQ\).*not supported.*FP8, NVFP4"):
        published_format(config.to_dict())


@pytest.mark.parametrize("note", ["fp8", ["fp8"], 7])
def test_a_quantization_config_that_is_not_a_mapping_is_named(tmp_path: Path, note: Any) -> None:
    publish(tmp_path, "llama", LLAMA, note, in_blocks)
    expected = "config.json: quantization_config is .*; expected settings by name"
    with pytest.raises(UserError, match=expected):
        load_model_config(tmp_path, False)
    with pytest.raises(UserError, match=expected):
        open_dequantized(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "manual_seed", None])
def test_weights_are_read_in_bf16_unless_the_config_names_another_type(
    tmp_path: Path, dtype: str | None
) -> None:
    """A config that names the type of the codes must not round the weights to it."""
    publish(tmp_path, "llama", LLAMA, fp8_note(), in_blocks)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"dtype": dtype}))
    name = SCALE.removesuffix("_scale_inv")
    stored = load_file(tmp_path / "model.safetensors")
    scale = stored[SCALE].repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (stored[name].float() * scale).bfloat16()
    assert torch.equal(open_dequantized(tmp_path).read(name), expected)
