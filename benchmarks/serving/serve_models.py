"""Small random models of the families of serve.py, of the classes in which they are published."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<image_end>", "<row>")
FP8_BLOCK = 128
VOCABULARY = 320  # 256 bytes, the special tokens, and rows without a token
CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# head_dim: vLLM's attention on a CPU knows 32, 64, 128 and others
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 4,
    "pad_token_id": 2,
    "initializer_range": 0.08,
}
SIGLIP = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
# as in the published models: vLLM on a CPU has a kernel for heads of 128
LINEAR_ATTENTION = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**TEXT, tie_word_embeddings=False)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**TEXT, tie_word_embeddings=True)


def _qwen3_5() -> PretrainedConfig:
    text = {**TEXT, **LINEAR_ATTENTION, "layer_types": ["linear_attention", "full_attention"]}
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
    }  # fmt: skip
    return transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=5, video_token_id=6,
        vision_start_token_id=7, vision_end_token_id=6, tie_word_embeddings=False,
    )  # fmt: skip


def _gemma3() -> PretrainedConfig:
    text = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    return transformers.Gemma3Config(
        text_config={**text, "query_pre_attn_scalar": 32}, vision_config=SIGLIP, mm_tokens_per_image=4,
        image_token_index=5, boi_token_index=6, eoi_token_index=7,
    )  # fmt: skip


def _gemma4() -> PretrainedConfig:
    text = {
        **TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "global_head_dim": 64,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "patch_size": 16,
    }  # fmt: skip
    return transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=5, boi_token_id=6, eoi_token_id=7
    )  # fmt: skip


def _mistral3() -> PretrainedConfig:
    vision = {
        "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 32, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    text = {**TEXT, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)


def _gpt_oss() -> PretrainedConfig:
    return transformers.GptOssConfig(
        **TEXT, num_local_experts=4, num_experts_per_tok=2, sliding_window=32, tie_word_embeddings=False,
    )  # fmt: skip


def _qwen3_moe() -> PretrainedConfig:
    return transformers.Qwen3MoeConfig(**TEXT, **EXPERTS, tie_word_embeddings=False)


# the titles of the table -> config, class
FAMILIES: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "Llama": (_llama, "LlamaForCausalLM"),
    "Qwen3": (_qwen3, "Qwen3ForCausalLM"),
    "Qwen3.5": (_qwen3_5, "Qwen3_5ForConditionalGeneration"),
    "Gemma 3": (_gemma3, "Gemma3ForConditionalGeneration"),
    "Gemma 4": (_gemma4, "Gemma4ForConditionalGeneration"),
    "Mistral 3": (_mistral3, "Mistral3ForConditionalGeneration"),
    "gpt-oss": (_gpt_oss, "GptOssForCausalLM"),
    "Qwen3-MoE": (_qwen3_moe, "Qwen3MoeForCausalLM"),
}


def write_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model in bf16, with a tokenizer of single bytes. Return its directory."""
    make_config, name = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, name)(make_config())
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_fp8(source: Path, folder: Path) -> None:
    """Write a model with the weights of its layers in FP8, in blocks of 128 x 128 with a scale."""
    shutil.copytree(source, folder)
    stored = load_file(source / "model.safetensors")
    written = {}
    for name, tensor in stored.items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(
            rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK
        )
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scale[:, None, :, None]).reshape(rows, columns)
        written[name] = codes.to(torch.float8_e4m3fn)
        written[f"{name}_scale_inv"] = scale
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]
    }  # fmt: skip
    file.write_text(json.dumps(config, indent=2))


def write_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> None:
    """Write a tokenizer that has a token per byte, and for each merge, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [first + second for first, second in merges]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *alphabet, *merged])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
