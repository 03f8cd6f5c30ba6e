"""Checkpoints of GPTQ and AWQ, packed by hand from their libraries' layouts, are read as the numbers
that were packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.published.test_sources import LLAMA, Tensors, publish
from safetensors.torch import load_file, save_file

from llama_ft.config import ModelConfig, QuantizationConfig
from llama_ft.errors import UserError
from llama_ft.models import build_on_meta, choose_quantization, load_model_config
from llama_ft.models.adapters.names import index_names
from llama_ft.models.published.quantization_config import remove_quantization_config
from llama_ft.models.published.sources import describe_published, open_dequantized
from llama_ft.models.weights.conversion import open_model_weights
from llama_ft.models.weights.load_weights import account_for

GROUP = 32
# AWQ: the output, of 8 in a word, at each place from the lowest bits on
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
CASES: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq, groups in the order of activations": GPTQ | {"desc_act": True},
    "gptq of the second version": GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
    "gptq in 8 bits": GPTQ | {"bits": 8},
    "gptq per channel": GPTQ | {"group_size": -1},
    "gptq without g_idx": GPTQ | {"without_index": True},
    "awq": AWQ,
    "awq per channel": AWQ | {"group_size": -1},
}
NAME = "model.layers.0.mlp.up_proj"


def packed(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack rows of codes into words, from the lowest bits on."""
    per_word = 32 // bits
    places = codes.long().unflatten(1, (-1, per_word))
    if order is not None:
        places = places[..., order]
    words = torch.zeros(places.shape[:2], dtype=torch.int64)
    for place in range(per_word):
        words += places[..., place] << (bits * place)
    return words.to(torch.int32)  # the highest bit becomes the sign


def pack(note: dict[str, Any], weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return random tensors of a matrix of this shape, and the values that they stand for: computed
    in fp16, as GPTQModel and AutoAWQ do."""
    outputs, inputs = weight.shape
    bits = note["bits"]
    is_awq = note["quant_method"] == "awq"
    size = inputs if note["group_size"] == -1 else note["group_size"]
    group = torch.arange(inputs) // size
    if note.get("desc_act"):
        group = group[torch.randperm(inputs)]
    groups = inputs // size
    codes = torch.randint(2**bits, (inputs, outputs))
    # the first version of GPTQ stores 1 less, and cannot have 0
    zero_point = torch.randint(1, 2**bits, (groups, outputs))
    scale = (torch.rand(groups, outputs) * 1e-2 + 1e-3).half()
    if is_awq:
        stored = {
            "qweight": packed(codes, bits, AWQ_OUTPUTS),
            "qzeros": packed(zero_point, bits, AWQ_OUTPUTS),
        }
    else:
        offset = 0 if note.get("checkpoint_format") == "gptq_v2" else 1
        stored = {
            "qweight": packed(codes.T, bits).T.contiguous(),
            "qzeros": packed(zero_point - offset, bits),
        }
        if not note.get("without_index"):
            stored["g_idx"] = group.int()
    stored["scales"] = scale
    values = scale[group] * (codes - zero_point[group]).half()
    return stored, values.T.contiguous()


def publish_columns(folder: Path, note: dict[str, Any], bias: float | None = None) -> Tensors:
    """Save a Llama in fp16 with packed projections, and maybe biases that its layers do not have.
    Return what the packed projections stand for."""
    expected = Tensors()

    def quantize(name: str, tensor: torch.Tensor) -> Tensors:
        stored, expected[name] = pack(note, tensor)
        if bias is not None:
            stored["bias"] = torch.full((len(tensor),), bias)
        prefix = name.removesuffix("weight")
        return {f"{prefix}{part}": value for part, value in stored.items()}

    publish(folder, "llama", LLAMA, note, quantize)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    in_fp16 = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(in_fp16, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    return expected


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_numbers_that_were_packed(tmp_path: Path, case: str) -> None:
    expected = publish_columns(tmp_path, CASES[case])
    source = open_dequantized(tmp_path)
    assert len(expected) == 7
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    assert not any(name.endswith(parts) for name in source.tensors)
    for name, tensor in expected.items():
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert source.tensors[name].dtype == torch.float16
        assert torch.equal(source.read(name), tensor), name
        for start, stop in ((0, 1), (13, 100), (121, 128)):
            assert torch.equal(source.read_rows(name, start, stop), tensor[start:stop]), name


def test_biases_of_zeros_that_the_layers_lack_are_left_out(tmp_path: Path) -> None:
    """As AutoGPTQ saves a Llama. A bias with values is not one of them."""
    for name, value in (("zeros", 0.0), ("ones", 1.0)):
        folder = tmp_path / name
        publish_columns(folder, GPTQ, bias=value)
        config = load_model_config(folder, False)
        remove_quantization_config(config)
        built = build_on_meta(config, ModelConfig(model_name=str(folder)), folder=folder)
        source = open_model_weights(folder, built).source
        biases = [name for name in source.tensors if name.endswith(".bias")]
        if value == 0.0:
            assert not biases
            assert account_for(index_names(built.model), source.tensors, folder)
            continue
        assert len(biases) == 7
        with pytest.raises(UserError, match=r"not part of the model: .*\.bias"):
            account_for(index_names(built.model), source.tensors, folder)


def test_the_start_says_what_was_found(tmp_path: Path) -> None:
    publish_columns(tmp_path, AWQ)
    text = describe_published(tmp_path, load_model_config(tmp_path, False))
    assert text is not None and "The checkpoint is quantized: AWQ in 4 bits" in text


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("scales", None, r"up_proj.qweight is quantized .*up_proj.scales is missing"),
        ("qzeros", None, r"up_proj.qweight is quantized .*up_proj.qzeros is missing"),
        ("scales", lambda tensor: tensor[1:], r"up_proj.scales is .*\[7, 384\]; expected .*\[8, 3"),
        ("scales", lambda tensor: tensor.int(), r"up_proj.scales is torch.int32 .*torch.float16"),
        ("qzeros", lambda tensor: tensor[:, 1:], r"qzeros is .*\[8, 47\]; expected .*\[8, 48\]"),
        (
            "qweight",
            lambda tensor: tensor.long(),
            r"qweight is torch.int64 .*matrix of torch.int32",
        ),
    ],
)
@pytest.mark.parametrize("note", [GPTQ | {"without_index": True}, AWQ])
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    tmp_path: Path, note: dict[str, Any], part: str, change: Any, expected: str
) -> None:
    publish_columns(tmp_path, note)
    change_tensor(tmp_path, part, change)
    with pytest.raises(UserError, match=f"model.safetensors: .*{expected}"):
        open_dequantized(tmp_path)


def change_tensor(folder: Path, part: str, change: Any) -> None:
    """Change a tensor of one matrix, or remove it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensor = tensors.pop(f"{NAME}.{part}")
    if change is not None:
        tensors[f"{NAME}.{part}"] = change(tensor).contiguous()
    save_file(tensors, file, {"format": "pt"})


def test_a_group_that_does_not_exist_is_named_with_its_file(tmp_path: Path) -> None:
    publish_columns(tmp_path, GPTQ)
    change_tensor(tmp_path, "g_idx", lambda index: index + 1)
    source = open_dequantized(tmp_path)
    expected = r"model.safetensors: .*up_proj.g_idx has values outside of 0 to 7, .*up_proj.scales"
    with pytest.raises(UserError, match=expected):
        source.read(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"bits": 3}, r"gptq \(3 bits\).*gptq, gptq_v2 in 4 or 8 bits"),
        ({"checkpoint_format": "marlin"}, r"gptq \(layout marlin\)"),
        ({"is_marlin_format": True}, r"gptq \(layout marlin\)"),
        ({"quant_method": "awq", "version": "gemv"}, r"awq \(layout gemv\).*gemm in 4 bits"),
        ({"quant_method": "awq", "bits": 8}, r"awq \(8 bits\)"),
        ({"bits": None}, r"quantization_config.bits is None"),
        ({"group_size": 0}, r"quantization_config.group_size is 0"),
    ],
)
def test_other_layouts_are_rejected_at_the_start(
    tmp_path: Path, change: dict[str, Any], printed: str
) -> None:
    publish_columns(tmp_path, GPTQ)
    config = load_model_config(tmp_path, False)
    config.quantization_config = GPTQ | change
    with pytest.raises(UserError, match=printed):
        choose_quantization(QuantizationConfig(), config, use_peft=True)
