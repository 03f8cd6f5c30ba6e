"""The formula of model FLOPs against torch's own count, and the rate of matrix products."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.modeling_utils import PreTrainedModel

from llama_ft.models import BuiltModel
from llama_ft.models.architecture.groups import freeze_first_layers
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.quantization.choice import Quantization, quantize_linears
from llama_ft.models.quantization.layers import FourBit
from llama_ft.observe.flops import flop_formula, matmul_rate, published_peak, visible_pairs
from llama_ft.runtime import Ranks

ROWS = 2
LENGTH = 24
TOKENS = ROWS * LENGTH
SHAPE: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "gpt-2": GPT2Config(
        vocab_size=120, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager"
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gemma4": Gemma4TextConfig(
        **SHAPE,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        sliding_window=LENGTH,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
        tie_word_embeddings=False,
    ),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[name]), dtype=torch.float32, experts_implementation="eager"
    )


def counted(model: torch.nn.Module) -> int:
    """What torch counts of a forward and a backward pass with logits of all positions."""
    ids = torch.randint(120, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return flops.get_total_flops()


def expected(model: PreTrainedModel) -> float:
    """The formula, with the pairs of tokens that eager attention computes and masks."""
    products, attention = flop_formula(model).of([LENGTH] * ROWS, TOKENS)
    return products + attention * LENGTH**2 / visible_pairs(LENGTH)


@pytest.mark.parametrize("name", CONFIGS)
def test_full_fine_tuning_has_as_many_flops_as_torch_counts(name: str) -> None:
    model = model_of(name)
    assert counted(model) == expected(model)


def test_full_fine_tuning_takes_six_flops_per_weight_without_embeddings() -> None:
    model = model_of("llama")
    weights = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    )
    formula = flop_formula(model)
    assert formula.per_token == 6 * weights
    # 12 x layers x heads x head_dim x length for each token where it sees all; half of it where it
    # sees those before
    assert formula.of([1000], 1000)[1] == 12 * 3 * 32 * 1000 * 1001 / 2
    unlabelled = formula.of([LENGTH], LENGTH)[0] - formula.of([LENGTH], 3)[0]
    assert unlabelled == 6 * model.lm_head.weight.numel() * (LENGTH - 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_frozen_weights_torch_counts_the_same_except_for_the_inputs_of_the_first_layer(
    name: str,
) -> None:
    model = model_of(name)
    rank = 4
    targets = ["c_attn"] if name == "gpt-2" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=rank, target_modules=targets, fan_in_fan_out=name == "gpt-2")
    )
    # of the first layer: neither they nor what is below is trained
    at_input = ("q_proj", "k_proj", "v_proj", "c_attn")
    first = [m for n, m in decoder_layers(model)[0].named_modules() if n.endswith(at_input)]
    unneeded = sum(m.base_layer.weight.numel() + rank * 32 for m in first)
    assert expected(model) - counted(adapted) == 2 * TOKENS * unneeded


def test_activation_checkpointing_repeats_each_layer_except_its_last_matmul() -> None:
    model = model_of("llama")
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    left_out = sum(
        2 * TOKENS * layer.mlp.down_proj.weight.numel() for layer in decoder_layers(model)
    )
    once = counted(model_of("llama"))
    # Eager attention computes all pairs, of which `visible_pairs` are half and a diagonal.
    formula = flop_formula(model)
    every = LENGTH**2 / visible_pairs(LENGTH)
    attention = formula.of([LENGTH] * ROWS, 0)[1] / 3
    assert (
        counted(model) - once
        == formula.recomputed([LENGTH] * ROWS) + attention * (every - 1) - left_out
    )


def test_frozen_first_layers_still_pass_gradients_to_a_trained_embedding() -> None:
    model = model_of("llama")
    freeze_first_layers(model, 2)
    assert counted(model) == expected(model)
    whole = flop_formula(model).per_token
    model.get_input_embeddings().requires_grad_(False)
    frozen = sum(
        p.numel() for layer in decoder_layers(model)[:2] for p in layer.parameters() if p.ndim == 2
    )
    assert whole - flop_formula(model).per_token == 2 * frozen
    assert counted(model) == expected(model)


def test_sharding_does_not_change_the_flops(runtime: Ranks) -> None:
    model = model_of("mixtral")
    before = flop_formula(model)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=runtime.mesh)
    fully_shard(model, mesh=runtime.mesh)
    assert flop_formula(model) == before


def test_quantized_weights_have_the_flops_of_the_original_weights() -> None:
    plain = model_of("llama")
    quantized = model_of("llama").to("meta")
    quantize_linears(BuiltModel(quantized), Quantization(FourBit("nf4", 32, None), None, False))
    for model in (plain, quantized):
        get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), low_cpu_mem_usage=True
        )
    assert flop_formula(quantized) == flop_formula(plain)


def test_attention_windows_are_those_of_the_layers() -> None:
    with torch.device("meta"):
        gemma = AutoModelForCausalLM.from_config(
            Gemma3TextConfig(num_hidden_layers=6, sliding_window=512)
        )
        mistral = AutoModelForCausalLM.from_config(
            MistralConfig(num_hidden_layers=2, sliding_window=64)
        )
    each = 12 * 8 * 256
    assert flop_formula(gemma).per_pair == {512: 5 * each, None: each}
    assert flop_formula(mistral).per_pair == {64: 2 * 12 * 4096}


@pytest.mark.parametrize(("length", "window"), [(1, None), (9, None), (9, 4), (3, 100)])
def test_attention_pairs_are_those_of_the_mask(length: int, window: int | None) -> None:
    mask = torch.ones(length, length).tril()
    assert (
        visible_pairs(length, window) == (mask if window is None else mask.triu(1 - window)).sum()
    )


def test_measuring_the_matmul_rate_does_not_change_random_numbers() -> None:
    torch.manual_seed(3)
    expected_next = torch.Generator().manual_seed(3)
    rate = matmul_rate((256, 512), torch.float32, torch.device("cpu"))
    assert torch.equal(torch.rand(4), torch.rand(4, generator=expected_next))
    assert 1e8 < rate < 1e15


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A10G", 70),
        ("NVIDIA GH200 480GB", 989),
        ("A GPU of tomorrow", 0),
    ],
)
def test_published_peaks_are_found_by_the_device_name_of_torch(
    name: str, teraflops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert published_peak(torch.bfloat16, torch.device("cuda")) == teraflops * 1e12
    assert published_peak(torch.float32, torch.device("cuda")) == 0
    assert published_peak(torch.bfloat16, torch.device("cpu")) == 0
