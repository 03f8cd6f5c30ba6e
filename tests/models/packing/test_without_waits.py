"""Replaced methods compute what Transformers' own compute."""

from typing import Any

import pytest
import torch
from transformers import FalconConfig
from transformers.models.falcon.modeling_falcon import FalconAttention

from llama_ft.models.packing.without_waits import _split_heads

KINDS: dict[str, dict[str, Any]] = {
    "7B": {"multi_query": True},
    "40B": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "1B": {"multi_query": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_falcon_splits_heads_as_before(kind: str) -> None:
    config = FalconConfig(hidden_size=32, num_attention_heads=4, alibi=False, **KINDS[kind])
    attention = FalconAttention(config, layer_idx=0)
    fused = attention.query_key_value(torch.randn(2, 5, 32))
    expected = attention._split_heads(fused)
    for ours, theirs in zip(_split_heads(attention, fused), expected, strict=True):
        assert torch.equal(ours, theirs)
