"""The check before training that packed samples do not attend to each other."""

import random

import pytest
import torch
from datasets import Dataset
from tiny_llama import tiny_llama
from torch.distributed.fsdp import fully_shard
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BartConfig,
    BigBirdPegasusConfig,
    BlenderbotConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MistralConfig,
    PegasusConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, use_chunked_loss, use_packed_attention
from llama_ft.models.packing.rope import use_rope_per_sample
from llama_ft.runtime import Ranks
from llama_ft.training import check_packing

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def deaf_attention(module, query, key, value, attention_mask, **arguments):  # type: ignore[no-untyped-def]
    """An architecture's own attention code: causal over all tokens, which ignores the samples'
    positions."""
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True)


AttentionInterface.register("deaf", deaf_attention)
AttentionMaskInterface.register("deaf", lambda **_: None)


def make(attention: str, dtype: torch.dtype, runtime: Ranks) -> BuiltModel:
    """As the recipe makes one: its attention packed, sharded, in training mode."""
    # initial weights: hardest to tell apart
    model = tiny_llama(**SHAPE, num_key_value_heads=SHAPE["num_attention_heads"])
    model.config._attn_implementation = attention
    built = packed(model)
    model.to(dtype)
    fully_shard(model, mesh=runtime.mesh)
    model.train()
    return built


def packed(model: PreTrainedModel) -> BuiltModel:
    """The model, whose attention keeps packed samples apart."""
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    return built


def samples(*lengths: int) -> Dataset:
    ids = [random.Random(n).choices(range(101), k=length) for n, length in enumerate(lengths)]
    other = {"source": ["x"] * len(ids), "desirable": [None] * len(ids)}
    return Dataset.from_dict({"input_ids": ids, "labels": ids, **other})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_keeps_samples_apart_passes_and_is_unchanged(
    attention: str, dtype: torch.dtype, runtime: Ranks
) -> None:
    built = make(attention, dtype, runtime)
    model = built.model
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for lengths in ((40, 30, 20, 10), (3, 1, 2), (12, 12)):
        check_packing(built, samples(*lengths), 64, dtype, runtime)
    assert model.training
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None and torch.equal(parameter.to_local(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_ignores_sample_boundaries_runs_per_sample(
    dtype: torch.dtype, runtime: Ranks
) -> None:
    built = make("deaf", dtype, runtime)
    assert built.mixers is not None and not built.mixers.per_sample
    check_packing(built, samples(40, 30, 20, 10), 64, dtype, runtime)
    assert built.mixers.names() == "LlamaAttention"


def test_position_embeddings_that_count_tokens_run_per_sample(runtime: Ranks) -> None:
    torch.manual_seed(0)
    shape = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "init_std": 0.5,
    }
    model = AutoModelForCausalLM.from_config(
        BartConfig(vocab_size=101, is_encoder_decoder=False, **shape)
    )
    built = packed(model)
    check_packing(built, samples(40, 30, 20, 10), 64, torch.float32, runtime)
    assert built.mixers.names() == "BartLearnedPositionalEmbedding"


@pytest.mark.parametrize(
    "kind", [MarianConfig, PegasusConfig, BlenderbotConfig, BigBirdPegasusConfig]
)
def test_position_embeddings_that_look_up_positions_get_those_of_each_sample(
    kind: type[PretrainedConfig], runtime: Ranks
) -> None:
    torch.manual_seed(0)
    shape = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "init_std": 0.5,
        "vocab_size": 101,
        "decoder_vocab_size": 101,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(kind(is_encoder_decoder=False, **shape))
    built = packed(model)
    check_packing(built, samples(40, 30, 20, 10), 64, torch.float32, runtime)
    assert built.mixers.names().endswith("PositionalEmbedding")


@pytest.mark.parametrize(("value", "problem"), [(float("nan"), "NaN"), (0.0, "are all equal")])
def test_broken_weights_are_not_reported_as_a_packing_problem(
    value: float, problem: str, runtime: Ranks
) -> None:
    built = make("sdpa", torch.float32, runtime)
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.fill_(value)
    with pytest.raises(UserError, match=problem) as error:
        check_packing(built, samples(40, 30), 64, torch.float32, runtime)
    assert "padding" not in str(error.value)


class Failing(LlamaForCausalLM):
    """An architecture whose code cannot compute packed samples."""

    def forward(self, *args, position_ids=None, **arguments):  # type: ignore[no-untyped-def,override]
        if position_ids is not None:
            raise RuntimeError("The size of tensor a (48) must match the size of tensor b (144)")
        return super().forward(*args, **arguments)


def test_an_exception_of_the_model_for_packed_samples_suggests_padding(runtime: Ranks) -> None:
    model = Failing(LlamaConfig(vocab_size=101, **SHAPE))
    built = packed(model)
    with pytest.raises(UserError, match="(?s)tensor a .48.*Use --batching_strategy padding.$"):
        check_packing(built, samples(40, 30), 64, torch.float32, runtime)


class Summing(LlamaForCausalLM):
    """An architecture that looks back behind its layers."""

    def forward(self, *args, **arguments):  # type: ignore[no-untyped-def,override]
        output = super().forward(*args, **arguments)
        output.logits = output.logits.cumsum(1)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_mixes_samples_after_its_layers_is_rejected(
    dtype: torch.dtype, runtime: Ranks
) -> None:
    torch.manual_seed(0)
    model = Summing(LlamaConfig(vocab_size=101, **SHAPE)).to(dtype)
    built = packed(model)
    with pytest.raises(
        UserError, match="(?s)Summing does not keep.*Use --batching_strategy padding.$"
    ):
        check_packing(built, samples(40, 30, 20, 10), 64, dtype, runtime)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "longest", "per_sample_mixers"),
    # no sample has 25 tokens
    [(MistralConfig, 64, ""), (PhimoeConfig, 64, "PhimoeAttention"), (PhimoeConfig, 24, "")],
)
def test_a_model_that_loses_its_sliding_window_in_a_packed_sequence_runs_per_sample(
    kind: type[PretrainedConfig],
    longest: int,
    per_sample_mixers: str,
    dtype: torch.dtype,
    runtime: Ranks,
) -> None:
    torch.manual_seed(0)
    config = kind(
        vocab_size=101, num_key_value_heads=2, sliding_window=24, initializer_range=0.1, **SHAPE
    )
    config.router_jitter_noise = 0.0
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    built = packed(model)
    model.to(dtype)
    check_packing(built, samples(7, 5), longest, dtype, runtime)
    assert built.mixers.names() == per_sample_mixers


class Sharper(LlamaForCausalLM):
    """An architecture whose head does something that only shows where tokens are given."""

    def forward(self, input_ids=None, **arguments):  # type: ignore[no-untyped-def,override]
        output = super().forward(input_ids=input_ids, **arguments)
        output.logits = output.logits * (3 if input_ids is not None else 1)
        return output


@pytest.mark.parametrize(("kind", "is_kept"), [(LlamaForCausalLM, True), (Sharper, False)])
def test_a_chunked_loss_that_differs_from_that_of_the_logits_is_switched_off(
    kind: type[LlamaForCausalLM], is_kept: bool, runtime: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = kind(LlamaConfig(vocab_size=101, **SHAPE))
    built = packed(model)
    built.has_chunked_loss = use_chunked_loss(built)
    assert built.has_chunked_loss
    model.to_empty(device="cpu")
    model.init_weights()
    torch.nn.init.normal_(model.lm_head.weight)
    model.model.rotary_emb.__init__(model.config)  # type: ignore[misc]  # its buffers are not among the weights
    fully_shard(model, mesh=runtime.mesh)
    with caplog.at_level("WARNING", logger="llama_ft"):
        model.train()
        is_exact = check_packing(built, samples(40, 30), 64, torch.float32, runtime)
    assert is_exact == is_kept
    assert ("Chunked cross-entropy is off" in caplog.text) != is_kept


@pytest.mark.parametrize("per_sample", [True, False])
def test_longrope_factors_of_the_longest_sample_for_all_are_an_error(
    per_sample: bool, runtime: Ranks
) -> None:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=101,
        pad_token_id=0,
        initializer_range=0.1,
        original_max_position_embeddings=24,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4} | factors,
        **SHAPE,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    built = packed(model)
    if per_sample:
        use_rope_per_sample(model)
        check_packing(built, samples(16, 16), 64, torch.float32, runtime)
        return
    with pytest.raises(UserError, match="does not keep packed samples apart"):
        check_packing(built, samples(16, 16), 64, torch.float32, runtime)
