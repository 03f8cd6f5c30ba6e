"""What Liger is asked to change. Its kernels need CUDA; here a module that notes what it is told stands in for it, with
the names of liger-kernel 0.8.5."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ft.config import TrainConfig
from llama_ft.models import apply_liger


def test_ligers_losses_stay_out_and_it_does_not_rotate_in_place_what_selective_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    liger: Any = ModuleType("liger_kernel.transformers")
    liger.monkey_patch = ModuleType("monkey_patch")
    liger.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    liger.monkey_patch._apply_liger_kernel_to_instance = lambda model, **kernels: asked.append(kernels)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=10))
    for how in ("off", "full", "selective"):
        apply_liger(model, TrainConfig(activation_checkpointing=how))
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == [losses, losses, {**losses, "rope": False}]
