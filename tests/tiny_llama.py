"""A random Llama for tests that need a model and no files."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Return a Llama of two layers with grouped-query attention. `settings` of LlamaConfig replace
    its own."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **settings}))
