"""Which token mixers ranks that share a sequence divide by heads, and the part of a rank."""

from typing import Any

import pytest
import torch
import transformers
from models.packing.shared_sequences_job import DELTA, EXPERTS, MIXED, SHAPE
from torch import nn
from transformers import AutoModelForCausalLM

from llama_ft.models.packing.packed_samples import TokenMixers
from llama_ft.models.packing.shared_heads import can_divide_heads
from llama_ft.runtime.sequence import SequenceRank

DIVIDED = {
    "Qwen3_5Text": {**DELTA, "layer_types": MIXED},
    "Qwen3Next": {**DELTA, **EXPERTS, "moe_intermediate_size": 32, "layer_types": MIXED},
    "OlmoHybrid": {**DELTA, "layer_types": MIXED},
}
WHOLE: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Mamba": {},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": 8},
}


def mixers_of(kind: str, settings: dict[str, Any]) -> set[nn.Module]:
    """The mixers with a state of a model of 3 layers."""
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **settings})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mixers = TokenMixers(model).per_sample
    assert mixers
    return mixers


def ranks(size: int) -> SequenceRank:
    group: Any = None  # not asked
    return SequenceRank(0, size, group)


@pytest.mark.parametrize("kind", DIVIDED)
def test_gated_delta_nets_are_divided_if_the_ranks_divide_their_heads(kind: str) -> None:
    mixers = mixers_of(kind, DIVIDED[kind])  # 2 key heads, 4 value heads
    assert len(mixers) == 2
    for mixer in mixers:
        assert can_divide_heads(mixer, ranks(2))
        assert not can_divide_heads(mixer, ranks(4))


@pytest.mark.parametrize("kind", WHOLE)
def test_other_mixers_with_a_state_are_not_divided(kind: str) -> None:
    assert not any(can_divide_heads(mixer, ranks(2)) for mixer in mixers_of(kind, WHOLE[kind]))
