"""What is recomputed, what is kept, and that gradients do not change by it."""

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_llama import tiny_llama
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers import modeling_utils as transformers_modeling

from llama_ft.config import TrainConfig
from llama_ft.models import BuiltModel, checkpoint_activations
from llama_ft.models.adapters.lora_linear import use_fused_lora

LAYERS = 4
HIDDEN = 64
TOKENS = 48
WAYS = [("full", 2), ("every_k", 3), ("selective", 2)]
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def llama(how: str, k: int = 2, offload: bool = False, lora: bool = False) -> LlamaForCausalLM:
    model = tiny_llama(hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS)
    settings = TrainConfig(
        activation_checkpointing=how, activation_checkpointing_k=k, activation_offload=offload
    )
    checkpoint_activations(BuiltModel(model), settings)
    if lora:
        adapters = LoraConfig(
            r=4, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False
        )
        inject_adapter_in_model(adapters, model)
        use_fused_lora(model)
    return model.train()


def forward(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(TOKENS).reshape(2, -1)
    return model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)  # of LoRA's dropout
    forward(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Operators(TorchDispatchMode):
    """Counts the operators that run, and watches the memory of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.outputs: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.runs[func.name().partition(".")[0]] += 1
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.outputs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def held_bytes(self) -> int:
        return sum(size for reference, size in self.outputs.values() if not reference.expired())


def measure(model: nn.Module) -> tuple[Counter[str], Counter[str], int]:
    """Operators of the forward pass, of the backward pass, and bytes kept in between."""
    with Operators() as first:
        loss = forward(model)
    held = first.held_bytes()
    with Operators() as second:
        loss.backward()
    return first.runs, second.runs, held


@pytest.mark.parametrize("lora", [False, True], ids=["full tuning", "lora with dropout"])
@pytest.mark.parametrize(("how", "k"), WAYS)
def test_gradients_equal_those_without_checkpointing_bit_for_bit(
    how: str, k: int, lora: bool
) -> None:
    expected = gradients(llama("off", lora=lora))
    found = gradients(llama(how, k, lora=lora))
    assert found.keys() == expected.keys() and len(found) > 2 * LAYERS
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_full_recomputes_matmuls_and_attention_and_selective_only_the_rest() -> None:
    ran = {how: measure(llama(how))[1] for how in ("off", "full", "selective")}
    forward_runs = measure(llama("off"))[0]
    more = {how: ran[how] - ran["off"] for how in ("full", "selective")}
    # Of a layer's 7 products the last, down_proj's, is not needed again: recomputing stops before
    # it.
    assert forward_runs["aten::mm"] == 7 * LAYERS + 1
    assert (more["full"]["aten::mm"], more["full"][ATTENTION]) == (6 * LAYERS, LAYERS)
    assert (more["selective"]["aten::mm"], more["selective"][ATTENTION]) == (0, 0)
    for cheap in ("aten::silu", "aten::rsqrt", "aten::neg"):
        assert more["selective"][cheap] == more["full"][cheap] >= LAYERS


def test_selective_keeps_only_the_outputs_of_adapted_layers() -> None:
    ran = {how: measure(llama(how, lora=True)) for how in ("off", "full", "selective")}
    assert ran["off"][0]["llama_ft::lora_linear"] == 7 * LAYERS
    again = {how: ran[how][1]["llama_ft::lora_linear"] for how in ran}
    assert again == {"off": 0, "full": 6 * LAYERS, "selective": 0}
    adapters = 7 * 4  # of rank 4
    widths = HIDDEN + 2 * HIDDEN // 2 + HIDDEN + 4 + HIDDEN + 2 * 128 + HIDDEN + adapters
    assert ran["selective"][2] - ran["full"][2] == pytest.approx(
        4 * TOKENS * LAYERS * widths, rel=0.1
    )


@pytest.mark.parametrize("how", ["full", "every_k", "selective"])
def test_only_the_inputs_of_recomputed_layers_are_offloaded(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device to copy from, a copy on the CPU stands in for the one in pinned memory."""
    expected = gradients(llama("off", lora=True))
    moved = []

    class Copy(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **_: Any) -> None:
            super().__init__(self.pack, torch.Tensor.clone)

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            moved.append(tuple(tensor.shape))
            return tensor.clone()

    monkeypatch.setattr(transformers_modeling, "save_on_cpu", Copy)
    found = gradients(llama(how, offload=True, lora=True))
    inputs = [shape for shape in moved if shape != (0,)]  # an empty tensor is checkpoint's own
    assert inputs == [(2, TOKENS // 2, HIDDEN)] * (LAYERS // 2 if how == "every_k" else LAYERS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
