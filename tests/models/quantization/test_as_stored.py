"""Weights that stay as they are published are dequantized to what Transformers dequantizes them to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published.test_sources import (
    FP8_CASES,
    GPT_OSS,
    LLAMA,
    MXFP4_NOTE,
    SCALE,
    Tensors,
    broken,
    experts_in_mxfp4,
    fp8_note,
    in_blocks,
    publish,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, build_on_meta, choose_quantization, load_model_config
from llama_ft.models.adapters.names import index_names
from llama_ft.models.base.source import open_weights
from llama_ft.models.published.weight_format import StoredScheme
from llama_ft.models.quantization.choice import quantize_linears
from llama_ft.models.quantization.layers import QuantizedLinear, quantized_weights
from llama_ft.models.weights.conversion import open_model_weights
from llama_ft.models.weights.load_weights import account_for

AS_STORED = QuantizationConfig(mode="as_stored")
LINEARS = 7  # of a Llama's layer
WEIGHT = SCALE.removesuffix("_scale_inv")


def build(folder: Path, settings: QuantizationConfig = AS_STORED) -> tuple[BuiltModel, str]:
    """Build the model of a directory with its weights as stored, without values. Return it, and the
    log text."""
    config = load_model_config(folder, False)
    quantization = choose_quantization(settings, config, use_peft=True)
    assert quantization is not None
    built = build_on_meta(config, ModelConfig(model_name=str(folder)), folder=folder)
    return built, str(quantize_linears(built, quantization))


def dequantized(folder: Path, built: BuiltModel, parts: int = 37) -> Tensors:
    """Read the weights that stay as stored, a few rows at a time, and dequantize them as a layer
    does."""
    source = open_model_weights(folder, built).source
    keys = account_for(index_names(built.model), source.tensors, folder)
    files = open_weights(folder)
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    found = Tensors()
    for weight in quantized_weights(built.model):
        scheme = weight.scheme
        assert isinstance(scheme, StoredScheme)
        name = names[id(weight.weight)]
        header = source.tensors[keys[name]]
        count = weight.weight.shape[0]
        read = []
        for start in range(0, count, parts):
            stop = min(start + parts, count)
            read.append(scheme.read(files, header, start, stop))
        codes, scale = (torch.cat(tensors) for tensors in zip(*read, strict=True))
        for part, parameter in ((codes, weight.weight), (scale, weight.scale)):
            assert part.shape == parameter.shape and part.dtype == parameter.dtype
        if scheme.is_transposed:
            matrices = [
                scheme.dequantize(codes[expert], scale[expert], torch.bfloat16).T
                for expert in range(count)
            ]
            found[name] = torch.stack(matrices)
        else:
            found[name] = scheme.dequantize(codes, scale, torch.bfloat16)
    return found


def check(folder: Path, built: BuiltModel, expected: PreTrainedModel) -> Tensors:
    parameters = dict(expected.named_parameters())
    found = dequantized(folder, built)
    for name, value in found.items():
        assert torch.equal(value, parameters[name]), name
    return found


@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8_is_dequantized_as_transformers_does(tmp_path: Path, case: str) -> None:
    folder = publish(tmp_path, *FP8_CASES[case])
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    built, text = build(folder)
    found = check(folder, built, expected)
    assert "Kept in FP8, as stored:" in text
    linears = [
        name
        for name, parameter in expected.named_parameters()
        if "_proj" in name and name.endswith(".weight") and parameter.ndim == 2
    ]
    assert sorted(found) == sorted(linears)


def test_mxfp4_is_dequantized_as_transformers_does(tmp_path: Path) -> None:
    folder = publish(tmp_path, "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4)
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", quantization_config=Mxfp4Config(dequantize=True)
    )
    built, text = build(folder)
    found = check(folder, built, expected)
    assert "Kept in MXFP4, as stored: 0 linear layers and 4 stacks of experts" in text
    assert len(found) == 2 * GPT_OSS["num_hidden_layers"]
    for weight in quantized_weights(built.model):
        bits = 8 * (weight.weight.nbytes + weight.scale.nbytes)
        assert bits == 4.25 * torch.Size(weight.shape).numel()


def test_a_block_at_the_edge_may_be_smaller(tmp_path: Path) -> None:
    """576 rows and columns are 4.5 blocks, which Transformers does not dequantize."""
    shape = LLAMA | {"intermediate_size": 576}
    folder = publish(tmp_path, "llama", shape, fp8_note(), in_blocks)
    stored = load_file(folder / "model.safetensors")
    found = dequantized(folder, build(folder)[0])
    assert len(found) == LINEARS
    for name, value in found.items():
        expected = stored[name].float()
        scale = stored[f"{name}_scale_inv"]
        for row in range(0, expected.shape[0], 128):
            for column in range(0, expected.shape[1], 128):
                block = expected[row : row + 128, column : column + 128]
                block *= scale[row // 128, column // 128]
        assert torch.equal(value, expected.bfloat16()), name


def test_layers_that_config_json_or_the_user_excludes_are_read_in_16_bits(tmp_path: Path) -> None:
    def quantize(name: str, tensor: torch.Tensor) -> Tensors:
        return {name: tensor} if "q_proj" in name else in_blocks(name, tensor)

    note = fp8_note(modules_to_not_convert=["model.layers.0.self_attn.q_proj", "lm_head"])
    folder = publish(tmp_path, "llama", LLAMA, note, quantize)
    built, text = build(folder, QuantizationConfig(mode="as_stored", skip_modules=["down_proj"]))
    layer: Any = built.model.model.layers[0]
    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert type(layer.mlp.down_proj) is torch.nn.Linear
    assert type(layer.mlp.up_proj) is QuantizedLinear
    assert len(dequantized(folder, built)) == LINEARS - 2
    assert "5 linear layers" in text and "q_proj" in text.partition("not quantized: ")[2]


def test_a_layer_in_16_bits_that_config_json_does_not_exclude_is_named(tmp_path: Path) -> None:
    weight = torch.ones(384, 256, dtype=torch.bfloat16)

    def change(tensors: Tensors) -> None:
        del tensors[SCALE]
        tensors[WEIGHT] = weight

    folder = broken(tmp_path, change)
    built, _ = build(folder)
    source = open_model_weights(folder, built).source
    expected = rf"cannot keep {WEIGHT} is torch.bfloat16 and not quantized.\n.*--skip_modules"
    with pytest.raises(UserError, match=expected):
        account_for(index_names(built.model), source.tensors, folder)
    built, _ = build(folder, QuantizationConfig(mode="as_stored", skip_modules=["up_proj"]))
    assert account_for(index_names(built.model), source.tensors, folder)


def test_another_type_of_8_bits_is_named(tmp_path: Path) -> None:
    codes = torch.randn(384, 256).to(torch.float8_e5m2)
    folder = broken(tmp_path, lambda tensors: tensors.update({WEIGHT: codes}))
    built, _ = build(folder)
    source = open_model_weights(folder, built).source
    with pytest.raises(UserError, match=rf"cannot keep {WEIGHT} is not FP8 \(e4m3\)"):
        account_for(index_names(built.model), source.tensors, folder)


@pytest.mark.parametrize("part", ["scale", "codes"])
def test_values_that_are_not_finite_are_named_with_their_file(tmp_path: Path, part: str) -> None:
    name = SCALE if part == "scale" else WEIGHT

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[-1, -4:] = 0xFF  # NaN in both types

    folder = broken(tmp_path, change)
    built, _ = build(folder)
    with pytest.raises(UserError, match=rf"model.safetensors: {name} has values that are not fin"):
        dequantized(folder, built)


@pytest.mark.parametrize(
    ("note", "use_peft", "printed"),
    [
        (None, True, "as_stored: the checkpoint is not quantized; expected fp8 or mxfp4"),
        (
            {"quant_method": "awq", "bits": 4},
            True,
            "as_stored: the checkpoint is awq; expected fp8 or mxfp4",
        ),
        (fp8_note(modules_to_not_convert=3), True, "modules_to_not_convert is 3; expected a list"),
        (
            fp8_note(modules_to_not_convert=["*("]),
            True,
            r"modules_to_not_convert is \['\*\('\]; expected a list",
        ),
    ],
)
def test_what_cannot_stay_as_stored_is_rejected_at_the_start(
    note: dict[str, Any] | None, use_peft: bool, printed: str
) -> None:
    config = PretrainedConfig()
    if note is not None:
        config.quantization_config = note
    with pytest.raises(UserError, match=printed):
        choose_quantization(AS_STORED, config, use_peft)


def test_a_model_without_stacked_experts_is_rejected(tmp_path: Path) -> None:
    folder = publish(tmp_path, "llama", LLAMA, fp8_note(), in_blocks)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization_config"] = MXFP4_NOTE
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="LlamaForCausalLM has no stacked experts to keep"):
        build(folder)


def test_experts_in_fp8_under_one_name_each_are_read_in_16_bits(tmp_path: Path) -> None:
    """Transformers stacks them, and a stack has no scales of its own."""
    folder = publish(tmp_path, *FP8_CASES["experts"])
    built, text = build(folder)
    unchanged = text.partition("not quantized: ")[2]
    assert "mlp.experts.gate_up_proj" in unchanged and "mlp.experts.down_proj" in unchanged
    keys = account_for(
        index_names(built.model), open_model_weights(folder, built).source.tensors, folder
    )
    assert keys["model.layers.0.mlp.experts.down_proj"]


def test_stacked_codes_of_other_files_are_not_taken_for_the_same_weight(tmp_path: Path) -> None:
    """The experts of MXFP4 are named in the error if a file has them in 16 bits."""
    folder = publish(tmp_path, "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4)
    name = "model.layers.1.mlp.experts.down_proj"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    experts, rows, blocks, _ = tensors.pop(f"{name}_blocks").shape
    del tensors[f"{name}_scales"]
    tensors[name] = torch.zeros(experts, blocks * 32, rows, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    built, _ = build(folder)
    source = open_model_weights(folder, built).source
    with pytest.raises(UserError, match=rf"cannot keep {name} is torch.bfloat16 and not quantized"):
        account_for(index_names(built.model), source.tensors, folder)
