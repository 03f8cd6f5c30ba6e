"""LoRA on stacked experts in parts: what PEFT's sum of the weights computes, in all ways in which
Transformers' experts multiply."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ft.config import TrainConfig
from llama_ft.models import BuiltModel, checkpoint_activations, quantize_linears
from llama_ft.models.lora import expert_names
from llama_ft.models.lora_experts import LowRankSum, StackLora, use_split_experts
from llama_ft.models.quantization import Quantization
from llama_ft.models.quantized import FourBit, Int8, QuantizedStacks, Scheme

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_experts_per_tok": 2, "vocab_size": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5},
    "gpt_oss": {"num_local_experts": 5, "sliding_window": 16},  # [experts, in, out], with biases
    "nemotron_h": {"n_routed_experts": 4, "layers_block_type": ["attention", "moe"], "n_groups": 1,
                   "mamba_num_heads": 4, "moe_shared_expert_intermediate_size": 64},  # without gates
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 128},  # bmm of all experts
    "jetmoe": {"num_local_experts": 4, "kv_channels": 16},  # a loop over experts
}  # fmt: skip
OWN_LOOPS = ("llama4_text", "jetmoe")  # without a choice of implementations
WAYS = [
    (model_type, way)
    for model_type in MODELS
    for way in ("grouped_mm", "batched_mm", "eager")
    if way == "eager" or model_type not in OWN_LOOPS
]
SCHEMES: dict[str, Scheme] = {"8bit": Int8(6.0), "nf4": FourBit("nf4", 64, None)}


def model_of(
    model_type: str,
    way: str = "grouped_mm",
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    checkpointing: str = "off",
) -> Any:
    """A model with PEFT's adapters of its experts; equal for equal arguments."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    choice = {} if model_type in OWN_LOOPS else {"experts_implementation": way}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **choice)
    settings = TrainConfig(activation_checkpointing=checkpointing)
    checkpoint_activations(BuiltModel(model), settings)
    add_adapters(model, rank)
    return model


def add_adapters(model: Any, rank: int = 4) -> None:
    names = expert_names(model)
    lora = LoraConfig(
        r=rank, lora_alpha=3 * rank, target_modules=[], target_parameters=names,
        init_lora_weights=False,
    )  # fmt: skip
    get_peft_model(model, lora, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    model.train().get_input_embeddings().requires_grad_(True)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def results(model: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    ids = torch.arange(40).view(2, 20)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) >= 2 + 2 * 2
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name
        assert value.norm() > 0, name


@pytest.mark.parametrize("rank", [4, 3], ids=["", "rank 3"])
@pytest.mark.parametrize(("model_type", "way"), WAYS)
def test_loss_and_gradients_are_those_of_peft(model_type: str, way: str, rank: int) -> None:
    expected = results(model_of(model_type, way, rank))
    model = model_of(model_type, way, rank)
    use_split_experts(model)
    assert any(type(module) is StackLora for module in model.modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LowRankSum, "sum")  # the sum of all experts' weights is never made
        found = results(model)
    assert_close(found, expected)
