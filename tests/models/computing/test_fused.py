"""Fused kernels: which are chosen, and that they compute what the model's own code computes."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import run
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llama_ft.config import Config, ModelConfig, TrainConfig
from llama_ft.errors import UserError
from llama_ft.models import choose_liger, fuse_layers
from llama_ft.models.computing import compiled
from llama_ft.models.computing.compiled import AUTO_LIGER
from llama_ft.run import Setup
from llama_ft.runtime import Target, computing_on

CPU = Target("cpu")
CUDA = Target("cuda")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SHAPE |= {"num_hidden_layers": 1, "vocab_size": 40, "pad_token_id": 0}
needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is missing"
)


def fused_norms(kind: str, target: Target, **settings: Any) -> list[str]:
    """Names of the modules of a small model that fuse_layers changes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE))
    with computing_on(target):
        fuse_layers(model, ModelConfig(use_liger=False, **settings), TrainConfig())
    return [
        name.removeprefix("model.")
        for name, module in model.named_modules()
        if "forward" in vars(module)
    ]


@pytest.mark.parametrize("target", [CUDA, CPU], ids=str)
def test_norms_with_the_formula_of_llama_are_fused_and_no_others(target: Target) -> None:
    own = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"]
    assert fused_norms("llama", target) == own
    assert fused_norms("qwen3", target) == [
        "layers.0.self_attn.q_norm",
        "layers.0.self_attn.k_norm",
        *own,
    ]
    # they multiply before they round
    assert fused_norms("olmo2", target) == fused_norms("gemma3_text", target) == []
    assert fused_norms("llama", target, compile=True) == []


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)]
)
def test_the_fused_norm_computes_what_llama_computes(dtype: torch.dtype, rounding: float) -> None:
    """The plain one rounds twice in 16 bits, the fused one once: neither is further from float64
    than that."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    inputs = torch.randn(50, 96) * 3
    gradient = torch.randn(50, 96)
    norm.weight.data.normal_()
    fused = torch.nn.Sequential(LlamaRMSNorm(96, eps=1e-5).to(dtype))
    fused.load_state_dict({"0.weight": norm.weight.data})
    with computing_on(CUDA):
        fuse_layers(fused, ModelConfig(use_liger=False), TrainConfig())  # type: ignore[arg-type]

    def passes(module: Any, weight: torch.Tensor, to: torch.dtype) -> list[torch.Tensor]:
        x = inputs.to(dtype).to(to).requires_grad_()
        output = module(x)
        found = [output.detach(), *torch.autograd.grad(output, [x, weight], gradient.to(to))]
        return [tensor.double() for tensor in found]

    weight = norm.weight.detach().double().requires_grad_()
    exact = passes(lambda x: functional.rms_norm(x, (96,), weight, 1e-5), weight, torch.float64)
    plain = passes(norm, norm.weight, dtype)
    ours = passes(fused, fused[0].weight, dtype)
    assert "forward" in vars(fused[0])
    for one, other, reference in zip(plain, ours, exact, strict=True):
        allowed = 4 * rounding * reference.norm()
        assert (one - reference).norm() < allowed
        assert (other - reference).norm() < allowed
    mixed = inputs.bfloat16()
    assert torch.equal(fused.float()(mixed), norm.float()(mixed))
    assert fused(mixed).dtype == torch.float32


def test_liger_is_chosen_if_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = AutoConfig.for_model("llama", **SHAPE)
    assert choose_liger("auto", llama, False, CPU) == (False, "")
    assert choose_liger("auto", llama, True, CUDA) == (False, "Fused kernels: torch.compile's.")
    assert choose_liger(False, llama, False, CUDA)[0] is False
    with pytest.raises(UserError, match="need CUDA"):
        choose_liger(True, llama, False, CPU)
    monkeypatch.setattr(compiled, "find_spec", lambda _: "installed")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    use, reason = choose_liger("auto", llama, False, CUDA)
    assert not use
    assert reason.startswith("Fused kernels: torch's RMSNorm")
    assert "cannot be imported" in reason
    with pytest.raises(UserError, match="cannot be imported"):
        choose_liger(True, llama, False, CUDA)


def test_a_user_without_liger_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    advice = 'is not installed: pip install -e ".[gpu]"'
    assert advice in choose_liger("auto", AutoConfig.for_model("llama", **SHAPE), False, CUDA)[1]
    with pytest.raises(UserError, match="is not installed"):
        choose_liger(True, AutoConfig.for_model("llama", **SHAPE), False, CUDA)
    # a model that Liger would not be chosen for
    other = choose_liger("auto", AutoConfig.for_model("mixtral", **SHAPE), False, CUDA)[1]
    assert advice not in other


@needs_liger
def test_liger_is_not_chosen_if_its_result_would_be_wrong() -> None:
    assert choose_liger("auto", AutoConfig.for_model("llama", **SHAPE), False, CUDA) == (
        True,
        "Fused kernels: Liger's.",
    )
    experts = AutoConfig.for_model("mixtral", **SHAPE)
    assert [choose_liger(asked, experts, False, CUDA)[0] for asked in ("auto", True)] == [
        False,
        True,
    ]
    for config in (
        AutoConfig.for_model("llama", **SHAPE, hidden_act="gelu"),
        AutoConfig.for_model("gpt2"),
    ):
        assert choose_liger("auto", config, False, CUDA)[0] is False
        with pytest.raises(UserError, match="liger-kernel"):
            choose_liger(True, config, False, CUDA)


@needs_liger
@pytest.mark.large
def test_ligers_own_kernels_compute_what_each_architecture_computes() -> None:
    kinds = sorted(AUTO_LIGER)
    job = [sys.executable, str(Path(__file__).with_name("liger_job.py")), *kinds]
    finished = run(job, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    lines = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    assert finished.exit_code == 0 and len(lines) == 2 * len(kinds), finished.output
    for line in lines:
        assert line["choice"][0] is True
        assert line["loss"][1] == pytest.approx(line["loss"][0], rel=1e-6), line
        assert line["error"] < 2e-6, line


def test_a_resumed_run_keeps_its_kernels_or_stops() -> None:
    def resume(stored: bool) -> bool | str:
        trainer = {"config": {"model": {"use_liger": stored}}}
        ranks = SimpleNamespace(target=CPU, broadcast_from_rank0=lambda function: function())
        resumed = SimpleNamespace(trainer=trainer)
        setup: Any = SimpleNamespace(config=Config(), resumed=resumed, ranks=ranks)
        model_config = AutoConfig.for_model("llama", **SHAPE)
        return Setup.choose_kernels(setup, model_config).model.use_liger

    assert resume(False) is False
    with pytest.raises(UserError, match="(?s)need CUDA.*--use_liger false"):
        resume(True)
