"""config.json of the models that configs/ and the guide to models name, with what has a shape in it,
as published on the hub."""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248_320,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 262_144, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Qwen/Qwen3-8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B-Base": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_position_embeddings": 262_144, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-14B": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": QWEN3 | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "HuggingFaceTB/SmolLM3-3B": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "vocab_size": 128_256, "hidden_size": 2048,
        "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65_536, "tie_word_embeddings": True,
    },
    "microsoft/phi-4": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 100_352, "hidden_size": 5120,
        "intermediate_size": 17_920, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16_384, "sliding_window": None, "tie_word_embeddings": False,
    },
    "mistralai/Mistral-Small-24B-Instruct-2501": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 131_072, "hidden_size": 5120,
        "intermediate_size": 32_768, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 32_768, "sliding_window": None, "tie_word_embeddings": False,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32_768, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32_768, "sliding_window": None, "tie_word_embeddings": False,
    },
    "google/gemma-3-4b-it": {  # takes images, too
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
            "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "max_position_embeddings": 131_072, "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "google/gemma-3-12b-it": {  # takes images, too
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360,
            "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "max_position_embeddings": 131_072, "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "Qwen/Qwen3-VL-8B-Instruct": {  # takes images, too
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": False,
        "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262_144, "rope_theta": 5_000_000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    # From Transformers' Ministral3Config, whose page is that of the 8B model; the model's page counts 8.4B for text
    "mistralai/Ministral-3-8B-Instruct-2512": {  # takes images, too
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": None},
        "text_config": {
            "model_type": "ministral3", "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262_144, "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "head_dim": 64,
        },
    },
    # Of these three the text part. Qwen3.5: from Transformers' Qwen3_5TextConfig, whose defaults are those
    # of the 9B model, and from the config.json of the 27B model as other repositories' tests quote it
    "Qwen/Qwen3.5-9B": QWEN3_5 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "Qwen/Qwen3.5-27B": QWEN3_5 | {
        "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
    # From the config.json of google/gemma-4-E4B-it-qat-w4a16-ct, as another repository's tests quote it
    "google/gemma-4-E4B-it": {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144,
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "sliding_window": 512,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
}  # fmt: skip
# As the models' pages count them, of Gemma the text part: of its 4,300,079,472 the vision tower has
# 416,866,032 (27 layers of 15,239,504, patches, positions, a norm) and the projector 2,950,272.
PARAMETERS = {
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-3-4b-it": 3_880_263_168,
    "Qwen/Qwen3-VL-8B-Instruct": 8_190_735_360,
}

# Models that are published quantized. What is not set is Transformers' default: that of gpt-oss-120b,
# and of DeepSeek V3.
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4_GROUPS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-8B-FP8": CONFIGS["Qwen/Qwen3-8B"] | {"quantization_config": FP8_BLOCKS},
    "Devstral Small 2 (24B)": {
        "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "vocab_size": 131_072,
        "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": None},
    },
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS,
    "DeepSeek V3": DEEPSEEK_V3 | {"quantization_config": FP8_BLOCKS},
    "Kimi K2 Thinking": DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "quantization_config": INT4_GROUPS,
    },
}  # fmt: skip
HUB_NAMES = {
    "mistralai/Devstral-Small-2-24B-Instruct-2512": "Devstral Small 2 (24B)",
    "openai/gpt-oss-20b": "gpt-oss-20b",
}
CONFIGS |= {hub: PUBLISHED[name] for hub, name in HUB_NAMES.items()}
# As the models' pages count them, of DeepSeek V3 without the layer for multi-token prediction and
# without the 58 x 256 biases of its routers, which are buffers.
PARAMETERS |= {
    "Qwen3-8B-FP8": 8_190_735_360,
    "Devstral Small 2 (24B)": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "DeepSeek V3": 671_026_419_200 - 58 * 256,
}


def write_config(folder: Path, model_name: str) -> Path:
    """A model's folder with config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = (CONFIGS | PUBLISHED)[model_name]
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    return folder


def write_llama(folder: Path, **settings: Any) -> Path:
    """config.json of a small Llama, or of another model by `settings`, and no weights."""
    shape = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"dtype": "bfloat16"} | shape | settings)
    )
    return folder
