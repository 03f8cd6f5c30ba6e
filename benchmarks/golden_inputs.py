"""The small models and data of golden.py: random, but the same for every checkout."""

import random
from pathlib import Path
from typing import Any

from text_files import write_json_lines

VOCABULARY = 260  # 256 bytes, 3 special tokens, and a row without a token
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
    "image_size": 28,
    "patch_size": 14,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "attn_layer_indices": [1],
}


def write_inputs(folder: Path) -> None:
    """Write models with a tokenizer of single bytes, and data for every objective."""
    _write_models(folder)
    generator = random.Random(0)
    write_json_lines(
        folder / "samples.jsonl", (_sample(generator, number) for number in range(150))
    )
    write_json_lines(folder / "chats.jsonl", (_chat(number) for number in range(120)))
    write_json_lines(folder / "pairs.jsonl", (_pair(number) for number in range(60)))
    write_json_lines(folder / "prompts.jsonl", ({"prompt": f"What is {n} + 1?"} for n in range(5)))


def _write_models(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**SIZES)
    mixture = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    images = transformers.LlavaConfig(
        text_config={"model_type": "llama", **SIZES},
        vision_config=VISION,
        image_token_index=VOCABULARY - 1,
        tie_word_embeddings=False,
    )
    hybrid = transformers.BambaConfig(
        **SIZES, **MAMBA, num_key_value_heads=2, max_position_embeddings=256
    )
    tied = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    models = {
        "model": transformers.LlamaForCausalLM(llama),
        "mixture": transformers.MixtralForCausalLM(mixture),
        "images": transformers.LlavaForConditionalGeneration(images),
        "hybrid": transformers.BambaForCausalLM(hybrid),
        "tied": transformers.LlamaForCausalLM(tied),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        _write_tokenizer(folder / name)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _sample(generator: random.Random, number: int) -> dict[str, Any]:
    """Tokens of uneven length; the first ones are not in the loss."""
    ids = [generator.randrange(256) for _ in range(8 + number % 90)]
    masked = number % 5
    return {"input_ids": ids, "labels": [-100] * masked + ids[masked:]}


def _chat(number: int) -> dict[str, Any]:
    messages = []
    for added in range(1 + number % 3):
        messages.append({"role": "user", "content": f"What is {number} + {added}?"})
        messages.append({"role": "assistant", "content": f"{number + added}, I think."})
    return {"messages": messages}


def _pair(number: int) -> dict[str, Any]:
    return {
        "prompt": f"What is {number} + 1?",
        "chosen": f" {number + 1}" + "!" * (number % 4),
        "rejected": " I do not know" + "." * (number % 3),
    }
