"""Layers with a state along the sequence, and attention without an interface, under packing: the
reference is transformers on one sample at a time."""

from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.data import collate
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, checkpoint_activations, compile_layers, use_packed_attention
from llama_ft.models.packing.packed_samples import missing_kernels, report_missing_kernels
from llama_ft.runtime import Ranks, Target, computing_on
from llama_ft.training import SupervisedFineTuning

LENGTHS = [5, 19, 1, 11, 28]  # longer and shorter than convolutions (4), chunks and windows (8)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE |= {
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
# Class -> what differs from SHAPE, and what runs per sample. With what transformers' own generation
# calls a cache.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3_5Text": ({**DELTA, "head_dim": 16}, "Qwen3_5GatedDeltaNet"),
    "Bamba": ({**MAMBA, "attn_layer_indices": [1]}, "BambaMixer"),
    "Jamba": (
        {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
        "JambaMambaMixer",
    ),
    "Lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "Lfm2ShortConv"),
    "MiniMax": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
        "MiniMaxLightningAttention",
    ),
    "RecurrentGemma": (
        {"lru_width": 32, "attention_window_size": 8},
        "RecurrentGemmaRecurrentBlock",
    ),
    # Its own positions scale attention where no rotary embedding does.
    "Llama4Text": (
        {
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0, 1, 0],
        }
        | {"intermediate_size_mlp": 64, "layer_types": ["chunked_attention", "full_attention"] * 2},
        "Llama4TextAttention",
    ),
    # until 5.23; then it goes through the attention interface
    "GPTJ": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "GPTJAttention" if Version(transformers.__version__) < Version("5.24") else "",
    ),
    "StableLm": ({}, ""),  # its attention has the interface, and drops what it should be given
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    settings, _ = MODELS[name]
    if name == "GPTJ":  # has other names for the rest of SHAPE
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        settings = settings | no_dropout | {"vocab_size": 101}
    else:
        settings = SHAPE | settings
    config = getattr(transformers, f"{name}Config")(**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


def samples() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 101, (length,), generator=generator).tolist() for length in LENGTHS]
    other = {"source": ["x"] * len(ids), "desirable": [None] * len(ids)}
    return Dataset.from_dict({"input_ids": ids, "labels": ids, **other})


def loss_and_norm(model: PreTrainedModel, loss: torch.Tensor) -> tuple[float, float]:
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    model.zero_grad()
    return loss.item(), norm


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [*((name, "off") for name in MODELS), ("Qwen3_5Text", "full"), ("Bamba", "selective")],
)
def test_packed_samples_have_the_loss_and_gradient_norm_of_the_samples_alone(
    name: str, checkpointing: Any, runtime: Ranks
) -> None:
    model = make(name)
    dataset = samples()
    alone = torch.zeros(())
    for ids in dataset["input_ids"]:
        sample = torch.tensor([ids])
        logits = model(input_ids=sample, use_cache=False).logits[0, :-1].float()
        alone = alone + torch.nn.functional.cross_entropy(logits, sample[0, 1:], reduction="sum")
    loss, norm = loss_and_norm(model, alone)
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    assert built.mixers.names() == MODELS[name][1]
    checkpoint_activations(built, TrainConfig(activation_checkpointing=checkpointing))
    packed = (
        SupervisedFineTuning()
        .loss(built, collate(dataset, range(len(LENGTHS)), 0, True), runtime)
        .loss
    )
    # Another sequence is computed before the backward pass: recomputed layers still see their own
    # samples.
    SupervisedFineTuning().loss(built, collate(dataset, [4, 0], 0, True), runtime)
    found = loss_and_norm(model, packed)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert found[1] == pytest.approx(norm, rel=1e-4)


def test_layers_that_run_per_sample_are_not_compiled() -> None:
    model = make("Lfm2")
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    with pytest.raises(
        UserError, match="--compile: Lfm2ForCausalLM computes packed samples one after another"
    ):
        compile_layers(built)


def test_missing_kernels_are_reported_on_cuda_once_with_what_to_install(
    caplog: pytest.LogCaptureFixture,
) -> None:
    packages = {
        "Qwen3_5Text": {"causal-conv1d", "flash-linear-attention"},
        "Bamba": {"causal-conv1d", "mamba-ssm"},
    }
    for name, expected in packages.items():
        model = make(name)
        mixers = use_packed_attention(BuiltModel(model))
        assert [missing_kernels(mixer) for mixer in mixers.per_sample] == [expected] * 3
        caplog.clear()  # another test may have made the logger print the line about mixers
        with caplog.at_level("WARNING", logger="llama_ft"):
            report_missing_kernels(model)
            assert not caplog.records
            with computing_on(Target("cuda")):
                report_missing_kernels(model)
        assert caplog.records.pop().message.endswith(f"pip install {' '.join(sorted(expected))}")
        assert not caplog.records
