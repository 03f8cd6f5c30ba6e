"""How llama.cpp stores a model: names and values of its tensors, and its settings.

What differs from Transformers:

    Llama, Mistral    rows of Q and K pair neighbors for RoPE: row 2i+j of a head is row i+j*size/2
    Gemma 3           1 is added to the norms' weights, which Transformers adds when it computes
    Llama 3           RoPE's factors per frequency are a tensor of their own

Source: conversion/llama.py, qwen.py and gemma.py of ggml-org/llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llama_ft.errors import UserError, reason

# model_type of the text part -> llama.cpp's architecture
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}  # of the others: silu
GEMMA_PATTERN = 6  # llama.cpp expects full attention in each sixth layer
GEMMA_LOCAL_THETA = 10_000.0
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
SPARED = "llama.cpp's own convert_hf_to_gguf.py may convert it."


def import_gguf() -> Any:
    """Return the package gguf. Raises UserError if it is not installed."""
    try:
        import gguf  # optional
    except ImportError as error:
        raise UserError(
            f"--for llama.cpp and ollama need the package gguf ({reason(error)}): pip install gguf"
        ) from error
    return gguf


@dataclass(frozen=True)
class GgufModel:
    """A model that llama.cpp computes as Transformers does.

    Attributes:
        architecture: llama.cpp's name.
        config: the settings of the text part.
        names: Transformers' name without .weight -> llama.cpp's.
    """

    architecture: str
    config: Any
    names: Any

    @property
    def head_size(self) -> int:
        """The features of a head."""
        config = self.config
        size = getattr(config, "head_dim", None)
        return int(size or config.hidden_size // config.num_attention_heads)

    @property
    def rope(self) -> Mapping[str, Any]:
        """The settings of RoPE; of Gemma 3, in layers with full attention."""
        rope: Mapping[str, Any] = self.config.rope_parameters
        return rope.get("full_attention") or rope

    def name_of(self, key: str) -> str | None:
        """Return the name of a stored tensor; None if it is of another part than the text."""
        key = text_key(key)
        module, _, end = key.rpartition(".")
        name = self.names.get_name(module)
        return f"{name}.{end}" if name else None

    def converted(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor as llama.cpp stores them. Of LoRA's B, too, which has the
        same rows as the weight."""
        if self.architecture == "llama":
            if ".q_proj." in key:
                return self._paired(tensor, self.config.num_attention_heads)
            if ".k_proj." in key:
                return self._paired(tensor, self.config.num_key_value_heads)
        if self.architecture == "gemma3" and key.endswith("norm.weight"):
            return tensor.float() + 1
        return tensor

    @staticmethod
    def _paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        by_half = tensor.unflatten(0, (heads, 2, -1))
        return by_half.transpose(1, 2).flatten(0, 2)

    def rope_factors(self) -> torch.Tensor | None:
        """By how much Llama 3 slows each frequency of RoPE; None for others."""
        if self.rope["rope_type"] != "llama3":
            return None
        size = self.head_size
        steps = torch.arange(0, size, 2, dtype=torch.float32) / size
        plain = 1 / self.rope["rope_theta"] ** steps
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        return plain / scaled

    def write_settings(self, writer: Any) -> None:
        """Write the settings that llama.cpp reads."""
        gguf = import_gguf()
        config = self.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(self.rope["rope_theta"])
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_vocab_size(config.vocab_size)
        if self.architecture == "llama":
            writer.add_rope_dimension_count(self.head_size)
        if self.architecture == "gemma3":
            writer.add_sliding_window(config.sliding_window)
        if self.rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self.rope["factor"])


def text_key(key: str) -> str:
    """Return the name that a tensor has in a model of text alone."""
    for prefix in TEXT_PREFIXES:
        if key.startswith(prefix):
            return "model." + key.removeprefix(prefix)
    return key.removeprefix("language_model.") if key.startswith("language_model.lm") else key


def gguf_model(folder: Path) -> GgufModel:
    """Return how llama.cpp stores the model of a directory.

    Raises:
        UserError: it would not compute the same.
    """
    gguf = import_gguf()
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
    except (OSError, ValueError, KeyError) as error:  # such as a model that Transformers lacks
        raise UserError(f"{folder}: config.json cannot be read ({reason(error)}).") from error
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(dict.fromkeys(ARCHITECTURES))
        raise UserError(
            f"{folder}: {config.model_type} is not written as GGUF here; known are {known}. {SPARED}"
        )
    enum = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    model = GgufModel(architecture, config, names)
    different = list(_differences(model))
    if different:
        raise UserError(
            f"{folder}: llama.cpp computes {architecture} otherwise: {', '.join(different)}. {SPARED}"
        )
    return model


def _differences(model: GgufModel) -> list[str]:
    """Return the settings that llama.cpp's architecture does not have."""
    config = model.config
    differences = []
    kind = model.rope.get("rope_type", "default")
    scalings = (
        ("default", "linear", "llama3") if model.architecture == "llama" else ("default", "linear")
    )
    if kind not in scalings:
        differences.append(f"rope_type {kind}")
    if model.rope.get("partial_rotary_factor", 1.0) != 1.0:
        differences.append("partial_rotary_factor")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != ACTIVATIONS.get(model.architecture, "silu"):
        differences.append(f"hidden_act {activation}")
    if model.architecture != "gemma3":
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            differences.append(f"sliding_window {config.sliding_window}")
        return differences
    if config.final_logit_softcapping or config.attn_logit_softcapping:
        differences.append("softcapping")
    if config.query_pre_attn_scalar != model.head_size:
        differences.append(f"query_pre_attn_scalar {config.query_pre_attn_scalar}")
    if config.rope_parameters["sliding_attention"]["rope_theta"] != GEMMA_LOCAL_THETA:
        differences.append("rope_theta of local layers")
    full = [number for number, kind in enumerate(config.layer_types) if kind == "full_attention"]
    expected = range(GEMMA_PATTERN - 1, config.num_hidden_layers, GEMMA_PATTERN)
    if full != list(expected):
        differences.append("layer_types")
    return differences
