"""A checkpoint of compressed-tensors is read as its own library decompresses it."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published.test_sources import LLAMA, Tensors, publish
from safetensors.torch import load_file, save_file

from llama_ft.config import QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import choose_quantization, load_model_config
from llama_ft.models.published.sources import open_dequantized

# requirements-dev.txt has it, so in CI a missing library is a failure
HAS_LIBRARY = "CI" in os.environ or importlib.util.find_spec("compressed_tensors") is not None
pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason="compressed-tensors is not installed")

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
NVFP4 = MXFP4 | {"strategy": "tensor_group", "group_size": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", INT4),
    "int4 with zero points": ("pack-quantized", INT4 | {"symmetric": False}),
    "int4 per channel": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
    "int4, groups in the order of activations": (
        "pack-quantized",
        INT4 | {"actorder": "weight"},
    ),
    "int8 packed": ("pack-quantized", INT8 | {"strategy": "group", "group_size": 64}),
    "int8": ("int-quantized", INT8),
    "int8 with zero points": ("int-quantized", INT8 | {"symmetric": False}),
    "int8 per tensor with a zero point": (
        "int-quantized",
        INT8 | {"symmetric": False, "strategy": "tensor"},
    ),
    "fp8 per channel": ("float-quantized", FP8),
    "fp8 per tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4),
    "fp8 in blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 64]}),
}
SHAPE = LLAMA | {"intermediate_size": 320}  # blocks of 128 rows are not whole at the edge


def grid_of(weights: dict[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    strategy = weights["strategy"]
    if strategy in ("group", "tensor_group"):
        return rows, columns // weights["group_size"]
    if strategy == "channel":
        return rows, 1
    if strategy == "block":
        return -(-rows // 128), -(-columns // 64)
    return (1,)


def note_of(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def publish_compressed(folder: Path, form: str, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a model that the library has compressed. Return what it decompresses that to."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)
    expected = Tensors()

    def compress(name: str, tensor: torch.Tensor) -> Tensors:
        rows, columns = tensor.shape
        grid = grid_of(weights, rows, columns)
        scale = torch.rand(grid) * 1e-2 + 1e-3
        if form == "mxfp4-pack-quantized":
            scale = torch.exp2(torch.randint(-8, 0, grid))
        state = {"weight": tensor, "weight_scale": scale.bfloat16()}
        if form == "nvfp4-pack-quantized":
            state["weight_scale"] = (scale * 4e4).bfloat16()  # stored in FP8
            state["weight_global_scale"] = torch.tensor([3e4])
        if not weights["symmetric"]:
            state["weight_zero_point"] = torch.randint(-8, 8, grid, dtype=torch.int8)
        stored = compressor.compress(state, scheme)
        expected[name] = compressor.decompress(stored, scheme)["weight"]
        prefix = name.removesuffix("weight")
        return {f"{prefix}{part}": value.contiguous() for part, value in stored.items()}

    publish(folder, "llama", SHAPE, note_of(form, weights), compress)
    return expected


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_library(tmp_path: Path, case: str) -> None:
    expected = publish_compressed(tmp_path, *CASES[case])
    source = open_dequantized(tmp_path)
    assert len(expected) == 7
    assert not any("scale" in name or "packed" in name for name in source.tensors)
    for name, tensor in expected.items():
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor.bfloat16()), name
        stop = min(135, tensor.shape[0])
        assert torch.equal(source.read_rows(name, 13, stop), tensor[13:stop].bfloat16()), name


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape", "weight_zero_point"])
def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path, part: str) -> None:
    publish_compressed(tmp_path, "pack-quantized", INT4 | {"symmetric": False})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.mlp.up_proj.{part}"
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: .*weight_packed .*{name} is missing"):
        open_dequantized(tmp_path)


@pytest.mark.parametrize("value", [torch.tensor(40), torch.tensor([256.0, 256.0])])
def test_a_shape_that_is_not_one_is_named(tmp_path: Path, value: torch.Tensor) -> None:
    publish_compressed(tmp_path, "pack-quantized", INT4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_shape"
    tensors[name] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: {name} is .*expected two whole"):
        open_dequantized(tmp_path)


@pytest.mark.parametrize("part", ["weight_scale", "weight_global_scale"])
def test_a_missing_scale_of_nvfp4_is_named_with_its_file(tmp_path: Path, part: str) -> None:
    publish_compressed(tmp_path, "nvfp4-pack-quantized", NVFP4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.mlp.up_proj.{part}"
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: .*weight_packed .*{name} is missing"):
        open_dequantized(tmp_path)


def test_zero_points_of_another_shape_are_named(tmp_path: Path) -> None:
    publish_compressed(tmp_path, "pack-quantized", INT4 | {"symmetric": False})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} has the shape \[39, 8\]; expected \[40, 8\]"):
        open_dequantized(tmp_path)


def test_a_weight_that_is_stored_twice_is_named(tmp_path: Path) -> None:
    publish_compressed(tmp_path, "pack-quantized", INT4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(320, 256)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"model.safetensors: {name} is stored twice: {name}_pack"):
        open_dequantized(tmp_path)


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({"type": "float"}, "floating-point numbers of 4 bits"),
        ({"actorder": "group"}, "actorder group"),
        ({"actorder": True}, "actorder True"),
        ({"actorder": "of tomorrow"}, "actorder of tomorrow"),
    ],
)
def test_other_formats_are_rejected_at_the_start(
    tmp_path: Path, change: dict[str, Any], printed: str
) -> None:
    publish_compressed(tmp_path, "pack-quantized", INT4)
    config = load_model_config(tmp_path, False)
    of_weights = {name: change[name] for name in ("type", "actorder") if name in change}
    weights = INT4 | of_weights
    note = note_of("pack-quantized", weights) | change
    if "format" in change:
        note["config_groups"]["group_0"]["format"] = change["format"]
    config.quantization_config = note
    with pytest.raises(UserError, match=rf"compressed-tensors \({printed}\).*not supported"):
        choose_quantization(QuantizationConfig(), config, use_peft=True)
