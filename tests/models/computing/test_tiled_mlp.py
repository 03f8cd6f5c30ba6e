"""MLPs and experts that compute a few tokens at a time: the gradients are those of Transformers' own
model, and less is kept."""

import copy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import REPOSITORY, load_script, losses, run_cases, write_rows
from models.computing.test_activation_checkpointing import Operators
from peft import LoraConfig, inject_adapter_in_model
from tiny_llama import tiny_llama
from torch import nn

from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.models import BuiltModel, checkpoint_activations
from llama_ft.models.adapters.lora_experts import use_split_experts
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.models.computing.tiled_mlp import find_mlps, use_tiled_mlp

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 48, "output_router_logits": True}
SHARED: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# class of the config -> settings, and MLPs and experts of both layers
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama": ({}, 2),
    "Gemma3Text": ({"sliding_window": 16}, 2),
    "Qwen3Moe": (EXPERTS, 2),
    "GptOss": ({**EXPERTS, "sliding_window": 16}, 2),
    "DeepseekV3": (SHARED, 3),  # an MLP; shared and other experts
    "Bloom": ({"hidden_dropout": 0.0, "attention_dropout": 0.0}, 2),  # adds the residual itself
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0}, 2),
}
TOKENS = 46  # of 2 samples
TILE = 10


def make(kind: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **settings})
    config.resid_pdrop = 0.0
    return transformers.AutoModelForCausalLM.from_config(config).float()


def tiled(model: Any, tile: int = TILE, checkpointing: Any = "off") -> Any:
    settings = TrainConfig(tiled_mlp=tile, activation_checkpointing=checkpointing)
    checkpoint_activations(BuiltModel(model), settings)
    use_tiled_mlp(model, settings)
    return model


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a training step, with that of routers, and the gradients."""
    model.train()
    torch.manual_seed(5)
    ids = torch.arange(TOKENS).reshape(2, -1)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    found = {name: value.grad for name, value in model.named_parameters()}
    return output.loss.item(), {name: g for name, g in found.items() if g is not None}


def assert_equal(
    found: tuple[float, Any], expected: tuple[float, Any], tolerance: float = 1e-6
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 4
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (found[1][name] - gradient).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_transformers(kind: str) -> None:
    settings, count = MODELS[kind]
    model = make(kind, **settings)
    expected = step(copy.deepcopy(model))
    assert len(find_mlps(model)) == count
    for checkpointing in ("off", "full"):
        assert_equal(step(tiled(copy.deepcopy(model), TILE, checkpointing)), expected)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "GptOss"])
def test_gradients_of_adapters_are_those_of_peft(kind: str) -> None:
    model = make(kind, **MODELS[kind][0])
    experts = [name for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    settings.target_parameters = experts or None
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    expected = step(copy.deepcopy(model))
    use_fused_lora(model)
    use_split_experts(model)
    assert len(find_mlps(model)) == 2
    # PEFT multiplies by the sum of the experts' weights and their adapters
    assert_equal(step(tiled(model)), expected, 1e-6 if kind == "Llama" else 3e-6)


def test_a_tile_of_all_tokens_changes_nothing() -> None:
    expected = step(make("Llama"))
    found = step(tiled(make("Llama"), TOKENS))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_dropout_is_the_same_when_a_piece_is_computed_again() -> None:
    model = tiny_llama()
    settings = LoraConfig(r=4, lora_dropout=0.5, target_modules=["up_proj", "down_proj"])
    settings.init_lora_weights = False
    inject_adapter_in_model(settings, model)
    mlp: Any = model.model.layers[0].mlp.train()
    hidden = torch.randn(1, 23, 32)

    def gradients(results: list[torch.Tensor]) -> list[torch.Tensor]:
        weights = [value for value in mlp.parameters() if value.requires_grad]
        loss = torch.cat(results, 1).square().sum()
        return list(torch.autograd.grad(loss, weights))

    torch.manual_seed(3)
    expected = gradients([mlp(piece) for piece in hidden.split(8, 1)])
    use_tiled_mlp(model, TrainConfig(tiled_mlp=8))
    torch.manual_seed(3)
    results = [mlp(hidden)]
    after = torch.get_rng_state()
    found = gradients(results)
    assert torch.equal(after, torch.get_rng_state())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def measure(tile: int, checkpointing: str) -> tuple[int, int]:
    """Bytes kept for the backward pass, and its matmuls."""
    model = tiny_llama(hidden_size=32, intermediate_size=256, num_hidden_layers=3).train()
    tiled(model, tile, checkpointing)
    ids = torch.arange(100).reshape(1, -1)
    with Operators() as first:
        loss = model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum()
    held = first.held_bytes()
    with Operators() as second:
        loss.backward()
    return held, second.runs["aten::mm"]


def test_only_the_input_of_an_mlp_is_kept() -> None:
    saved = measure(100, "off")[0] - measure(25, "off")[0]
    # of each token of 3 layers: gate, its activation, up, and their product; all 4 bytes per number
    assert saved == 100 * 3 * 4 * 256 * 4
    for checkpointing in ("full", "selective"):
        assert measure(25, checkpointing)[0] <= measure(100, checkpointing)[0]


def test_a_checkpointed_layer_does_not_compute_its_mlp_a_third_time() -> None:
    # Of a layer: backward 2 products for each of 7; for the attention 4 again. For an MLP, 3 again.
    # Two of the LM head.
    assert measure(100, "off")[1] == 3 * 7 * 2 + 2
    assert measure(50, "full")[1] == 3 * (4 * 2 + 4 + 2 * (3 * 2 + 3)) + 2
    assert measure(50, "off")[1] == 3 * (4 * 2 + 2 * (3 * 2 + 3)) + 2


def test_gradients_of_16_bits_are_added_in_fp32() -> None:
    model: Any = tiny_llama().bfloat16()
    mlp: nn.Module = model.model.layers[0].mlp
    hidden = torch.randn(1, 512, 32, dtype=torch.bfloat16)
    exact = copy.deepcopy(mlp).float()
    exact(hidden.float()).sum().backward()
    mlp(hidden).sum().backward()
    untiled = [value.grad for value in mlp.parameters()]
    mlp.zero_grad()
    use_tiled_mlp(model, TrainConfig(tiled_mlp=8))
    mlp(hidden).sum().backward()

    def error(gradients: list[Any]) -> float:
        pairs = zip(gradients, exact.parameters(), strict=True)
        return sum((one.float() - other.grad).norm().item() for one, other in pairs)  # type: ignore[union-attr]

    assert error([value.grad for value in mlp.parameters()]) < 1.2 * error(untiled)


def test_layers_without_an_mlp_of_their_own_are_a_user_error() -> None:
    config = transformers.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=61
    )
    model = transformers.OPTForCausalLM(config)  # its layers hold fc1 and fc2
    with pytest.raises(UserError, match="--tiled_mlp 64: no MLP was found in the layers of OPT"):
        use_tiled_mlp(model, TrainConfig(tiled_mlp=64))
    for setting in ("auto", "off"):
        assert use_tiled_mlp(model, TrainConfig(tiled_mlp=setting)) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (2, ("full", "4bit")),
        pytest.param(2, ("8bit",), marks=pytest.mark.slow),
        pytest.param(1, ("full", "4bit", "8bit"), marks=pytest.mark.slow),
    ],
)
def test_runs_have_the_losses_of_runs_without_tiles(
    ranks: int, chosen: tuple[str, ...], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    common = ["--model_name", str(folder), "--dataset", str(rows), "--precision", "fp32"]
    common += ["--max_train_step", "3", "--context_length", "64", "--batch_size_training", "2"]
    common += ["--enable_fsdp", "--lr", "0.01", "--save_model", "false"]
    lora = ["--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0"]
    methods = {
        "full": ["--activation_checkpointing", "full", "--gradient_accumulation_steps", "2"],
        "4bit": [*lora, "--quantization", "4bit"],
        "8bit": [*lora, "--quantization", "8bit", "--activation_checkpointing", "selective"],
    }
    cases = []
    for name in chosen:
        for tile in ("off", "48"):
            output = str(tmp_path / f"{name}-{tile}")
            cases.append([*common, *methods[name], "--tiled_mlp", tile, "--output_dir", output])
    finished = run_cases(tmp_path, cases, ranks=ranks)
    assert finished.output.count("MLPs compute at most 48 tokens at a time.") == len(chosen)
    for name in chosen:
        expected = losses(tmp_path / f"{name}-off")
        assert len(expected) == 3
        assert losses(tmp_path / f"{name}-48") == pytest.approx(expected, rel=2e-6)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's allocations are counted by C++")
@pytest.mark.large
def test_a_step_of_wide_mlps_takes_at_most_seven_tenths_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    benchmark = load_script(REPOSITORY / "benchmarks" / "planner" / "tiled_mlp.py")
    planned, (whole, tiled) = benchmark.measure_memory(tmp_path)
    assert tiled <= 0.7 * whole
    assert planned == pytest.approx([whole, tiled], rel=0.05)
