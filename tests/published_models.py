"""Tiny checkpoints of every published format with all that belongs to a model's directory, and the
same checkpoints in 16 bits, dequantized by somebody else: Transformers, compressed-tensors, or a
loop over the blocks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models.published.test_compressed_tensors import (
    HAS_LIBRARY,
    INT4,
    NVFP4,
    note_of,
    publish_compressed,
)
from models.published.test_gptq import AWQ, GPTQ, publish_columns
from models.published.test_sources import (
    DEEPSEEK_V3,
    GPT_OSS,
    LLAMA,
    MXFP4_NOTE,
    Tensors,
    experts_in_mxfp4,
    fp8_note,
    in_blocks,
    per_tensor,
    publish,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

# 576 rows are 4.5 blocks of 128, which Transformers does not dequantize
EDGE = LLAMA | {"intermediate_size": 576}
PER_TENSOR = fp8_note(weight_block_size=None, activation_scheme="static")
KIMI_K2 = DEEPSEEK_V3 | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
KIMI_IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
KIMI_IGNORED += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
KIMI_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}

# Ends of the names of packed tensors
PACKED = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".bias",
    ".weight_scale_inv",
    ".weight_packed",
)
PACKED += (".weight_scale", ".weight_shape", ".weight_global_scale")

# Write a published checkpoint into the first directory, and its weights in 16 bits into the second.
Writer = Callable[[Path, Path], None]


def change_settings(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a setting."""
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    remaining = {name: value for name, value in settings.items() if value is not None}
    file.write_text(json.dumps(remaining))


def by_transformers(dequantize: Any, *published: Any) -> Writer:
    """Let Transformers load the published checkpoint dequantized, and save it."""

    def write(folder: Path, plain: Path) -> None:
        publish(folder, *published)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", quantization_config=dequantize
        )
        weights = model.state_dict()
        config = model.config
        vars(config).pop("quantization_config", None)
        same = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        same.load_state_dict(weights)
        same.save_pretrained(plain)

    return write


def save_plain(folder: Path, plain: Path, dequantized: Tensors) -> None:
    """Save what a published checkpoint has, with these tensors in place of packed ones."""
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(PACKED)}
    dtype = stored["model.norm.weight"].dtype
    tensors |= {name: tensor.to(dtype) for name, tensor in dequantized.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
    change_settings(plain, quantization_config=None)


def write_fp8_with_edges(folder: Path, plain: Path) -> None:
    publish(folder, "llama", EDGE, fp8_note(), in_blocks)
    stored = load_file(folder / "model.safetensors")
    dequantized = Tensors()
    for name, codes in stored.items():
        if codes.dtype != torch.float8_e4m3fn:
            continue
        scale = stored[f"{name}_scale_inv"]
        values = codes.float()
        for row in range(0, values.shape[0], 128):
            for column in range(0, values.shape[1], 128):
                block = values[row : row + 128, column : column + 128]
                block *= scale[row // 128, column // 128]
        dequantized[name] = values
    save_plain(folder, plain, dequantized)


def by_the_library(form: str, weights: dict[str, Any]) -> Writer:
    """Let compressed-tensors compress a Llama and decompress it."""

    def write(folder: Path, plain: Path) -> None:
        save_plain(folder, plain, publish_compressed(folder, form, weights))

    return write


def by_hand(note: dict[str, Any], bias: float | None = None) -> Writer:
    """Pack a Llama for GPTQ or AWQ."""

    def write(folder: Path, plain: Path) -> None:
        save_plain(folder, plain, publish_columns(folder, note, bias))

    return write


def write_kimi_k2(folder: Path, plain: Path) -> None:
    """DeepSeek V3 with the experts in INT4, under the names and with the config of Kimi K2 Thinking:
    a model_type of its own, code for older Transformers, and shapes in int32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**INT4))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    dequantized = Tensors()

    def compress(name: str, tensor: torch.Tensor) -> Tensors:
        if ".mlp.experts." not in name:
            return {name: tensor}
        rows, columns = tensor.shape
        scale = (torch.rand(rows, columns // 32) * 1e-2 + 1e-3).bfloat16()
        stored = compressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        dequantized[name] = compressor.decompress(stored, scheme)["weight"]
        stored["weight_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
        prefix = name.removesuffix("weight")
        return {f"{prefix}{part}": value.contiguous() for part, value in stored.items()}

    note = note_of("pack-quantized", INT4) | {"ignore": KIMI_IGNORED}
    publish(folder, "deepseek_v3", KIMI_K2, note, compress)
    save_plain(folder, plain, dequantized)
    change_settings(folder, model_type="kimi_k2", auto_map=KIMI_CODE)


# name -> how it is written, and linear layers for LoRA
PUBLISHED: dict[str, tuple[Writer, str]] = {
    "fp8": (
        by_transformers(
            FineGrainedFP8Config(dequantize=True), "llama", LLAMA, fp8_note(), in_blocks
        ),
        "q_proj,o_proj",
    ),
    "fp8-edge": (write_fp8_with_edges, "q_proj,down_proj"),
    "fp8-tensor": (
        by_transformers(
            FineGrainedFP8Config(dequantize=True), "llama", LLAMA, PER_TENSOR, per_tensor
        ),
        "q_proj,o_proj",
    ),
    "mxfp4": (
        by_transformers(
            Mxfp4Config(dequantize=True), "gpt_oss", GPT_OSS, MXFP4_NOTE, experts_in_mxfp4
        ),
        "q_proj,o_proj",
    ),
}
PUBLISHED["gptq"] = (by_hand(GPTQ | {"desc_act": True}, bias=0.0), "q_proj,o_proj")
PUBLISHED["awq"] = (by_hand(AWQ), "q_proj,o_proj")
if HAS_LIBRARY:
    PUBLISHED["int4"] = (by_the_library("pack-quantized", INT4), "q_proj,o_proj")
    PUBLISHED["nvfp4"] = (by_the_library("nvfp4-pack-quantized", NVFP4), "q_proj,o_proj")
    PUBLISHED["kimi-k2"] = (write_kimi_k2, "q_b_proj,o_proj")
