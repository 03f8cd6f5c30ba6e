"""Makes tiny models with Transformers 4, or reads exported ones with it; runs in that version's
environment. Arguments: make or read, and a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    __version__,
)

TOKENS = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
TEXT = "What is a shard<|end|>\n  12 cafés"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"type": "longrope", "short_factor": [1.1] * 6, "long_factor": [2.0] * 6}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA = {"sliding_window": 16, "num_hidden_layers": 6, "rope_theta": 3e5, "rope_local_base_freq": 2e4,
         "rope_scaling": LINEAR, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWENS = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
# model_type and settings in the words of Transformers 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1": ("llama", {**SHAPE, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "Gemma 3 text": ("gemma3_text", {**SHAPE, **GEMMA}),
    "Qwen2, tied": ("qwen2", {**SHAPE, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "Qwen3, yarn": ("qwen3", {**SHAPE, "rope_theta": 1e6, "rope_scaling": YARN}),
    "Qwen3 MoE": ("qwen3_moe", {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "Phi-4": ("phi3", {**SHAPE, "original_max_position_embeddings": 18, "partial_rotary_factor": 0.75,
                       "rope_scaling": LONG}),
    "GPT-NeoX": ("gpt_neox", {**SHAPE, "rotary_pct": 0.5, "rotary_emb_base": 5e5}),
    "Gemma 3": ("gemma3", {"text_config": {**SHAPE, **GEMMA}, "vision_config": VISION, "mm_tokens_per_image": 1,
                           "image_token_index": 318}),
    "Qwen2.5-VL": ("qwen2_5_vl", {**SHAPE, "rope_theta": 1e6, "vision_config": QWENS, "image_token_id": 318,
                                  "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
}  # fmt: skip


def auto_class(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def make(base: Path, model_type: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(base)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<pad>", "<|end|>"]
    sizes = {"vocab_size": 300, "special_tokens": special, "initial_alphabet": alphabet}
    inner.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(**sizes, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|end|>"],
        model_max_length=77,
        padding_side="left",
    )
    tokenizer.save_pretrained(base)


def read(folder: Path) -> None:
    """Write what this version reads: logits, if there are weights, and tokens."""
    seen: dict[str, Any] = {}
    if (folder / "config.json").exists():
        model = auto_class(folder).from_pretrained(folder).eval()
        with torch.no_grad():
            seen["logits"] = model(input_ids=TOKENS).logits
    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen["tokens"] = tokenizer(TEXT).input_ids
    seen["chat_template"] = tokenizer.chat_template
    seen["special"] = tokenizer.special_tokens_map
    seen["sizes"] = (tokenizer.model_max_length, tokenizer.padding_side)
    torch.save(seen, folder / "seen_by_4.pt")


if __name__ == "__main__":
    assert __version__.startswith("4."), __version__
    work = Path(sys.argv[2])
    if sys.argv[1] == "make":
        for name, (model_type, settings) in MODELS.items():
            make(work / "4" / name, model_type, settings)
    else:
        for file in sorted(work.rglob("tokenizer_config.json")):
            read(file.parent)
