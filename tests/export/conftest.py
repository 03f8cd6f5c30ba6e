"""Base models to export for, of every layout that differs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_by_hand import load


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the tensors of tiny models take several blocks of rows."""
    monkeypatch.setattr("llama_ft.models.base.source.BLOCK_ELEMENTS", 500)


@pytest.fixture(scope="session")
def bases(
    save_model: Callable[..., Path],
    save_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder of base models with tokenizers."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GptOssConfig,
        GptOssForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    folder = tmp_path_factory.mktemp("bases")
    save_model(folder / "llama")
    save_model(folder / "tied", tied=True)
    save_model(folder / "biased", attention_bias=True)
    shutil.copytree(
        folder / "llama", folder / "fp16", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    load(folder / "llama").to(torch.float16).save_pretrained(folder / "fp16")
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=301, initializer_range=0.1)
    )
    gpt2.save_pretrained(save_tokenizer(folder / "gpt2"))
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = {"num_local_experts": 3, "num_key_value_heads": 2, "vocab_size": 301}
    MixtralForCausalLM(MixtralConfig(**shape, **experts)).save_pretrained(
        save_tokenizer(folder / "mixtral")
    )
    oss = GptOssForCausalLM(GptOssConfig(**shape, **experts, head_dim=8, num_experts_per_tok=2))
    oss.save_pretrained(save_tokenizer(folder / "gpt_oss"))
    deep = {**shape, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
            "vocab_size": 301, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_tok": 2}  # fmt: skip
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**deep))
    for name, buffer in deepseek.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    deepseek.save_pretrained(save_tokenizer(folder / "deepseek"))
    return folder
