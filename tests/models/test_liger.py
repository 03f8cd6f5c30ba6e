"""What Liger is asked to change, and when it is refused. Its kernels need CUDA; here a package that notes what it is
told stands in for it, with the names of liger-kernel 0.8.5."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.models import apply_liger

MONKEY_PATCH = """
MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None, "llama": None}

def _apply_liger_kernel_to_instance(model, **kernels):
    model.asked = kernels
"""


def llama() -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=10))


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package / "monkey_patch.py").write_text(MONKEY_PATCH)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_ligers_losses_stay_out_and_it_does_not_rotate_in_place_what_selective_keeps(liger: None) -> None:
    asked = {}
    for how in ("off", "full", "selective"):
        model = llama()
        apply_liger(model, TrainConfig(activation_checkpointing=how))
        asked[how] = model.asked
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert asked == {"off": losses, "full": losses, "selective": {**losses, "rope": False}}
