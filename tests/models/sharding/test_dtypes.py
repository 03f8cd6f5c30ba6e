"""The default precision on models whose buffers and routers need care: the reference is plain
transformers, loaded in bf16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import losses, metrics, run_cases
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import FSDPConfig, ModelConfig, PeftConfig
from llama_ft.models import (
    LoadSettings,
    apply_fsdp,
    build_on_meta,
    load_model_config,
    load_weights,
    set_storage_dtypes,
)
from llama_ft.models.sharding.dtypes import fp32_modules
from llama_ft.runtime import PRECISIONS, Ranks

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "pad_token_id": 2,
}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "unpadded_vocab_size": 320,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 16,
    "rel_extent": 16,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "minimax": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "layer_types": ["full_attention", "linear_attention"],
        "block_size": 16,
    },
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "inkling2_text": INKLING,
    "xlstm": {"num_blocks": 2, "num_heads": 4, "chunk_size": 16},
}
# Transformers keeps vectors and convolutions of Inkling 2 in fp32, from 5.24 on also those of queries,
# keys and values; its xLSTM computes in fp32 only.
INKLING_TOLERANCE = 5e-3 if Version(transformers.__version__) >= Version("5.24") else 2e-3
TOLERANCE = {
    "minimax": 1e-6,
    "openai-gpt": 1e-6,
    "inkling2_text": INKLING_TOLERANCE,
    "xlstm": 2e-3,
}


def save_model(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    wanted = SHAPE | MODELS[name]
    config = AutoConfig.for_model(name, **wanted)
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, precision: str, runtime: Ranks) -> PreTrainedModel:
    """A model as the recipe makes one."""
    dtypes = PRECISIONS[precision]  # type: ignore[index]
    config = load_model_config(folder, False)
    built = build_on_meta(config, ModelConfig(model_name=str(folder)), folder=folder)
    set_storage_dtypes(built.model, dtypes)
    apply_fsdp(built, runtime.mesh, FSDPConfig(min_num_params=1000), dtypes)
    load_weights(built, runtime, LoadSettings(PeftConfig(), 0, dtypes.frozen))
    return built.model


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_pure"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_gradient_in_bf16_are_those_of_plain_transformers(
    name: str, precision: str, runtime: Ranks, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, name)
    dtype = torch.float32 if name == "xlstm" else torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (plain.train(), loaded(folder, precision, runtime).train()):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm()
        found.append((loss.item(), norm.item()))
    assert found[1][0] == pytest.approx(found[0][0], rel=TOLERANCE[name])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-2)


def test_the_routers_that_transformers_keeps_in_fp32_stay_in_fp32(
    runtime: Ranks, tmp_path: Path
) -> None:
    model = loaded(save_model(tmp_path, "inkling2_text"), "bf16_pure", runtime)
    kept = {type(module).__name__ for module in fp32_modules(model, torch.bfloat16)}
    assert "Inkling2TopKRouter" in kept
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    routers = [name for name in dtypes if name.endswith("mlp.gate.weight")]
    assert routers and all(dtypes[name] == torch.float32 for name in routers)
    assert dtypes["lm_head.weight"] == torch.bfloat16
    assert fp32_modules(model, torch.float32) == []


@pytest.mark.parametrize(
    "names", [["mixed", "pure"], pytest.param(["size", "lora"], marks=pytest.mark.slow)]
)
def test_two_ranks_train_fp32_routers_as_separate_fsdp_units(  # type: ignore[no-untyped-def]
    tmp_path: Path, save_tokenizer, names: list[str]
) -> None:
    folder = save_model(tmp_path / "base", "inkling2_text")
    save_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 300, (24,), generator=generator).tolist() for _ in range(4)]
    lines = [json.dumps({"input_ids": ids, "labels": ids}) for ids in samples]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    common = f"--model_name {folder} --dataset {tmp_path}/samples.jsonl --device cpu --enable_fsdp"
    common += " --batching_strategy padding --batch_size_training 2 --num_epochs 2 --lr 1e-2"
    common += " --min_num_params 1000 --sample_tokens 0"
    cases = {
        "mixed": "--precision bf16_mixed",
        "size": "--precision bf16_mixed --fsdp_wrap_policy size",
        "pure": "--precision bf16_pure",
        "lora": "--precision bf16_mixed --use_peft --target_modules sink_proj",
    }
    flags = [f"{common} {cases[name]} --output_dir {tmp_path}/{name}" for name in names]
    output = run_cases(tmp_path, [line.split() for line in flags], ranks=2).output
    assert "Inkling2TopKRouter" in output, "a unit"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    alone = [torch.tensor([ids]) for ids in samples]
    expected = sum(plain(input_ids=ids, labels=ids).loss for ids in alone) / len(alone)
    expected.backward()
    gradients = [weight.grad for weight in plain.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    for name in names:
        seen = losses(tmp_path / name)
        assert seen[0] == pytest.approx(expected.item(), rel=2e-3)
        assert seen[1] < seen[0]
        if name != "lora":
            first = next(line for line in metrics(tmp_path / name) if "train/loss" in line)
            assert first["train/grad_norm"] == pytest.approx(norm, rel=1e-2)
