"""Losses and gradients of packed sequences that all ranks share, with parameters sharded by FSDP.
Arguments: a directory for the results, and the names of cases."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from llama_ft import runtime
from llama_ft.config import Config, FSDPConfig, TrainConfig
from llama_ft.data import IGNORED, Batch
from llama_ft.models import (
    BuiltModel,
    apply_fsdp,
    checkpoint_activations,
    compile_layers,
    use_chunked_loss,
    use_packed_attention,
    use_router_loss,
)
from llama_ft.models.packing.rope import use_rope_per_sample
from llama_ft.training.objectives.preferences import Preferences
from llama_ft.training.objectives.sft import SupervisedFineTuning

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MORE_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 24,
    "short_mscale": 1.0,
    "long_mscale": 2.0,
}
# case -> class of the config, settings, and attention
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "llama, eager": ("Llama", {"num_key_value_heads": 4}, "eager"),
    "window": ("Mistral", {"sliding_window": 16}, "sdpa"),
    "soft cap": ("Gemma2", {"sliding_window": 16}, "eager"),
    "gemma 3": ("Gemma3Text", {"sliding_window": 16}, "sdpa"),
    "sinks": ("GptOss", {"sliding_window": 16, **EXPERTS}, "eager"),
    "latent attention": ("DeepseekV3", MLA, "sdpa"),
    "longrope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 24}, "sdpa"),
    "routers": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "output_router_logits": True}, "sdpa"),
    "chunks": (
        "Llama4Text",
        {"attention_chunk_size": 16, "floor_scale": 8, "no_rope_layers": [1, 0, 1], "intermediate_size_mlp": 64}
        | EXPERTS
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
        "sdpa",
    ),
    # 4 ranks do not divide its key heads: each computes all of them
    "delta nets": ("Qwen3_5Text", {**DELTA, "head_dim": 16}, "sdpa"),
    "delta nets, joined": ("Qwen3Next", {**DELTA, **MORE_HEADS, **EXPERTS, "head_dim": 16, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "layer_types": MIXED}, "sdpa"),
    "delta nets, separate": ("OlmoHybrid", {**DELTA, **MORE_HEADS, "layer_types": MIXED}, "sdpa"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "sdpa"),
    "learned positions": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64, "dropout": 0.0}, "sdpa"),
}  # fmt: skip
COMPILED = ", compiled"  # after the name of a case
LENGTHS = [37, 20, 1, 45, 30]  # filled up to 134 or 136 tokens, so every cut is inside a sample
LABELED = 102  # no token after these is in the loss: the last of 4 ranks has none


def make(case: str) -> PreTrainedModel:
    """The model of a case, with weights so large that a wrong token shows."""
    kind, settings, attention = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **settings})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            # States that last for some tokens. With Qwen3.5's first values a token leaves hardly
            # anything, and one rounding of a weight changes gradients by 1e-3.
            if name.endswith("dt_bias"):
                parameter.normal_(-3, 1)
    return model


def make_batch() -> Batch:
    """Samples in one sequence."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (1, sum(LENGTHS)), generator=generator)
    labels = ids.clone()
    labels[:, torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)] = IGNORED
    labels[:, LABELED:] = IGNORED
    return Batch(ids, labels, LENGTHS, True, [""] * len(LENGTHS))


def pairs() -> Batch:
    """The first four samples as two pairs of responses."""
    batch = make_batch()
    count = sum(LENGTHS[:4])
    return Batch(batch.input_ids[:, :count], batch.labels[:, :count], LENGTHS[:4], True, [""] * 4)


def shared(case: str, ranks: runtime.Ranks) -> BuiltModel:
    """The model as the recipe prepares it."""
    name, is_compiled = case.removesuffix(COMPILED), case.endswith(COMPILED)
    built = BuiltModel(make(name))
    model = built.model
    built.mixers = use_packed_attention(built, ranks)
    use_rope_per_sample(model)
    built.router_coefficient = use_router_loss(model, None)
    checkpoint_activations(built, TrainConfig(activation_checkpointing="full"))
    built.has_chunked_loss = use_chunked_loss(built)
    if is_compiled:
        compile_layers(built, backend="aot_eager")
    precision = runtime.PRECISIONS["fp32"]
    fsdp = FSDPConfig(enable_fsdp=True, min_num_params=1000)
    built.units = apply_fsdp(built, ranks.mesh, fsdp, precision)
    model.train()
    return built


def compute(case: str, ranks: runtime.Ranks) -> dict[str, Any]:
    """The loss of the whole batch and all gradients of its sum."""
    objective: Any = SupervisedFineTuning()
    batch = make_batch()
    name, _, objective_name = case.partition(" by ")
    if objective_name:
        config = Config()
        config.preference.objective = objective_name
        objective = Preferences(config)
        batch = pairs()
    built = shared(name, ranks)
    result = objective.loss(built, batch, ranks)
    result.loss.backward()
    numbers = [result.loss.detach().double(), torch.tensor(float(result.count)).double()]
    names = sorted(result.logged)
    numbers += [result.logged[logged].double() for logged in names]
    sums = torch.stack(numbers)
    dist.all_reduce(sums)
    gradients = {}
    for key, parameter in built.model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradients[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    loss, count, *logged_sums = sums.tolist()
    return {
        "loss": loss,
        "count": count,
        "logged": dict(zip(names, logged_sums, strict=True)),
        "gradients": gradients,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    size = int(sys.argv[2])
    with runtime.start("cpu", "world", sequence_size=size) as ranks:
        for case in sys.argv[3:]:
            result = compute(case, ranks)
            if ranks.is_main:
                torch.save(result, out / f"{case}.pt")
