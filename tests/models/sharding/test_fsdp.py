"""Which modules become units, on the meta device: nothing here has storage."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_llama import tiny_llama
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, ZambaConfig, ZambaForCausalLM

from llama_ft.config import FSDPConfig, TrainConfig
from llama_ft.models import BuiltModel, apply_fsdp, set_storage_dtypes, shard_degree
from llama_ft.models.adapters.lora_linear import use_fused_lora
from llama_ft.models.base.shards import local_shard
from llama_ft.models.quantization.choice import Quantization, quantize_linears
from llama_ft.models.quantization.layers import FourBit
from llama_ft.models.sharding.fsdp import FsdpUnit, _describe_units, _modules_to_wrap
from llama_ft.models.weights.load_weights import compute_buffers
from llama_ft.runtime import PRECISIONS, Ranks
from llama_ft.training import build_optimizer


def llama(tied: bool = False) -> LlamaForCausalLM:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
    }
    with torch.device("meta"):
        model = tiny_llama(**shape, num_hidden_layers=4, tie_word_embeddings=tied)
    model.tie_weights()
    return model


def units_of(model: torch.nn.Module, **fsdp: object) -> list[FsdpUnit]:
    settings = FSDPConfig(enable_fsdp=True, **fsdp)
    return _describe_units(model, _modules_to_wrap(BuiltModel(model), settings, []), torch.bfloat16)


LAYERS = [f"model.layers.{n}" for n in range(4)]


def test_layers_are_fsdp_units_and_large_embeddings_and_heads_with_the_hybrid_policy() -> None:
    units = units_of(llama(), fsdp_wrap_policy="transformer")
    assert [unit.name for unit in units] == [*LAYERS, ""]
    assert units[-1].parameters == 2 * 64 * 1000 + 64
    ends = ["model.embed_tokens", "lm_head", ""]
    assert [unit.name for unit in units_of(llama(), min_num_params=60_000)] == [*LAYERS, *ends]
    assert [unit.name for unit in units_of(llama(), min_num_params=70_000)] == [*LAYERS, ""]


def test_the_size_policy_wraps_innermost_modules_first_and_only_the_root_is_below_the_limit() -> (
    None
):
    units = units_of(llama(), fsdp_wrap_policy="size", min_num_params=20_000)
    assert all(unit.parameters >= 20_000 for unit in units[:-1])
    assert sum(unit.parameters for unit in units) == sum(p.numel() for p in llama().parameters())
    assert {"model.layers.0.mlp", "model.embed_tokens"} < {unit.name for unit in units}


def test_the_sharding_strategy_determines_how_many_ranks_share_a_model() -> None:
    assert shard_degree(FSDPConfig()) == 1
    assert shard_degree(FSDPConfig(enable_fsdp=True)) == "world"
    assert shard_degree(FSDPConfig(enable_fsdp=True, sharding_strategy="NO_SHARD")) == 1
    assert shard_degree(FSDPConfig(enable_fsdp=True, sharding_strategy="HYBRID_SHARD")) == "node"
    assert (
        shard_degree(
            FSDPConfig(enable_fsdp=True, sharding_strategy="HYBRID_SHARD", sharding_group_size=2)
        )
        == 2
    )


def test_offloading_parameters_does_not_change_gradients(runtime: Ranks) -> None:
    plain = tiny_llama(vocab_size=50)
    offloaded = tiny_llama(vocab_size=50)
    settings = FSDPConfig(enable_fsdp=True, fsdp_cpu_offload=True)
    apply_fsdp(BuiltModel(offloaded), runtime.mesh, settings, PRECISIONS["fp32"])
    state = offloaded._get_fsdp_state()
    group = (
        state._fsdp_param_groups[0]
        if hasattr(state, "_fsdp_param_groups")
        else state._fsdp_param_group
    )
    assert isinstance(group.offload_policy, CPUOffloadPolicy)
    ids = torch.arange(20).view(2, 10)
    for model in (plain, offloaded):
        for _ in range(2):  # accumulated, which offloading does on the host
            model(input_ids=ids, labels=ids).loss.backward()
    for (name, expected), found in zip(
        plain.named_parameters(), offloaded.parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)


def test_layers_that_share_weights_stay_in_the_root_unit(runtime: Ranks) -> None:
    torch.manual_seed(0)
    config = ZambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    )
    plain = ZambaForCausalLM(config)
    model = ZambaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    # offloaded, so that one process has units in fp32
    settings = FSDPConfig(enable_fsdp=True, fsdp_cpu_offload=True)
    sharding = apply_fsdp(BuiltModel(model), runtime.mesh, settings, PRECISIONS["fp32"])
    assert [unit.name for unit in sharding.units] == ["model.layers.0", "model.layers.2", ""]
    ids = torch.arange(20).view(2, 10)
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)


def test_offloaded_4_bit_layers_are_copied_per_pass_and_train_the_same(runtime: Ranks) -> None:
    seen = []
    precision = PRECISIONS["bf16_mixed"]
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = llama()
        quantize_linears(BuiltModel(model), Quantization(FourBit("nf4", 64, None), None, False))
        inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear"), model)
        use_fused_lora(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        set_storage_dtypes(model, precision)
        apply_fsdp(
            BuiltModel(model),
            runtime.mesh,
            FSDPConfig(enable_fsdp=True, fsdp_cpu_offload=is_offloaded),
            precision,
        )
        model.to_empty(device="cpu")
        for parameter in map(local_shard, model.parameters()):
            bits = torch.randint(0, 256, parameter.shape, dtype=torch.uint8)
            scale = torch.full(parameter.shape, 0.02).view(torch.int32)
            values = {torch.uint8: bits, torch.int32: scale}.get(
                parameter.dtype, torch.randn(parameter.shape) * 0.02
            )
            parameter.detach().copy_(values)
        compute_buffers(model, model)
        optimizer = build_optimizer(model, TrainConfig())
        layer = model.model.layers[0]
        packed = layer.mlp.down_proj.base_layer.weight
        assert isinstance(packed, DTensor) == is_offloaded and packed.device.type == "cpu"
        held: list[torch.Tensor] = []
        layer.mlp.register_forward_hook(
            lambda mlp, *_, held=held: held.append(mlp.down_proj.base_layer.weight)
        )
        losses = []
        for _ in range(3):
            ids = torch.arange(20).view(2, 10)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            assert (held[-1].untyped_storage().nbytes() == 0) == is_offloaded, "its copy is freed"
            assert (held[-1].data_ptr() == local_shard(packed).data_ptr()) != is_offloaded
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append(losses)
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][2]


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group, and fully_shard's copies for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "fsdp"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure", "bf16_mixed", "fp16"])
@pytest.mark.parametrize("also_trained", [[], ["lm_head"]])
def test_on_one_process_fully_shard_manages_only_parameters_that_are_cast(
    precision: str, also_trained: list[str], runtime: Ranks
) -> None:
    dtypes = PRECISIONS[precision]
    model = llama().to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    settings = LoraConfig(r=2, target_modules="all-linear", modules_to_save=also_trained or None)
    inject_adapter_in_model(settings, model)
    use_fused_lora(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
    set_storage_dtypes(model, dtypes)
    apply_fsdp(BuiltModel(model), runtime.mesh, FSDPConfig(enable_fsdp=True), dtypes)
    managed = [
        name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
    ]
    is_cast = dtypes.trained != dtypes.compute
    assert managed == (
        ["lm_head.modules_to_save.default.weight"] if is_cast and also_trained else []
    )
    train = TrainConfig(precision=precision)
    optimizer = build_optimizer(model, train)
    ids = torch.arange(20).view(2, 10)
    with Collectives() as collectives:
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            assert all(parameter.grad.dtype == dtypes.trained for parameter in trained)
            optimizer.step()
            optimizer.zero_grad()
    assert [name for name in collectives.found if "chunk_cat" not in name] == []
