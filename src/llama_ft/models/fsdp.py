"""Sharding the skeleton: which modules are gathered together, and the table that says so."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import FSDPConfig
from llama_ft.errors import UserError
from llama_ft.models.build import decoder_layers
from llama_ft.models.lora_linear import cast_where_used
from llama_ft.models.packed_rows import has_token_mixers, token_mixers
from llama_ft.models.quantized import weight_counts
from llama_ft.models.torch_2_11 import allow_integers
from llama_ft.runtime.devices import Precision


@dataclass(frozen=True)
class Unit:
    """Parameters that are all-gathered, used and freed together."""

    name: str  # of its module; "" is the root, which holds what no other unit does
    kind: str  # class of that module
    parameters: int  # each tied weight once
    bytes: int  # all-gathered: quantized weights as they are, others in the compute dtype; not what is used as stored


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, fsdp: FSDPConfig, precision: Precision) -> list[Unit]:
    """Apply fully_shard to the units of the wrap policy, then to the root. Returns the units, root last; a UserError if
    the policy finds no decoder layer class. Without enable_fsdp the units only bound what is cast at once.

    Args:
        model: on the meta device, adapters injected.
        mesh: one dimension shards; two replicate over the first and shard over the second.
        fsdp: wrap policy, strategy, offloading.
        precision: dtypes to gather and to reduce in.
    """
    modules = _modules_to_wrap(model, fsdp)
    ready = _used_as_stored(model, mesh, fsdp, precision)
    units = _describe_units(model, modules, precision.compute, ready)
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    # Pinned, so that copies to and from the GPU overlap with its work.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if fsdp.fsdp_cpu_offload else OffloadPolicy()
    allow_integers()
    shard_one = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=ready)
    for module in modules:
        # The head's backward pass follows its forward pass at once: freed in between it would be gathered twice.
        is_head = module is model.get_output_embeddings()
        shard_one(module, reshard_after_forward=fsdp.sharding_strategy != "SHARD_GRAD_OP" and not is_head)
    shard_one(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global number of target tokens: gradients are summed, not averaged.
            if mesh.size() > 1:  # on one process fully_shard would divide by 1 and copy the quotient
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            if _is_over_gloo(mesh) and mesh["shard"].size() > 1:
                module.set_custom_reduce_scatter(SumOfParts())  # type: ignore[arg-type]  # called, not derived from
    return units


class SumOfParts:
    """fully_shard's reduce-scatter over gloo, whose own is an all-reduce of a copy: each rank gets its part of every
    rank's input and adds the parts up, which moves half as many bytes. On two ranks the sums are equal bit by bit."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate what fully_shard asks for."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        """Sum inputs [ranks x n] over the ranks into this rank's output [n]."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


def _is_over_gloo(mesh: DeviceMesh) -> bool:
    """A plan of GPUs, made on the CPU, replaces this."""
    return mesh.device_type == "cpu"


def _used_as_stored(model: nn.Module, mesh: DeviceMesh, fsdp: FSDPConfig, precision: Precision) -> set[nn.Parameter]:
    """Parameters that a rank holds whole and in the dtype it computes in, or casts where it uses them, and whose
    gradients no other rank adds to.

    fully_shard leaves them alone: it would copy each into a gathered one before every use, and its gradient twice. On
    one process that made steps of fp32 on the CPU 1.1 (LoRA, 512 tokens) to 1.3 times as long (full).
    """
    if mesh["shard"].size() > 1 or fsdp.fsdp_cpu_offload:
        return set()
    alone = mesh.size() == 1 and precision.reduce == precision.compute
    ready = {
        parameter
        for parameter in model.parameters()
        if (alone or not parameter.requires_grad)
        and (parameter.dtype == precision.compute or not parameter.is_floating_point())
    }
    # Gradients of these are summed in their own dtype.
    adapters = cast_where_used(model) if mesh.size() == 1 and precision.reduce == precision.trained else set()
    return ready | adapters


def _modules_to_wrap(model: PreTrainedModel, fsdp: FSDPConfig) -> list[nn.Module]:
    if fsdp.fsdp_wrap_policy == "size":
        return _modules_by_size(model, fsdp.min_num_params)
    layers = decoder_layers(model)
    if not layers:
        raise UserError("this model has no list of decoder layers. Use --fsdp_wrap_policy size.")
    if fsdp.fsdp_wrap_policy == "transformer":
        return layers
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    weights = [weight for module in ends for weight in module.parameters()]
    if len(set(weights)) < len(weights):
        return layers  # one tied weight has to stay in the root unit
    return layers + [m for m in ends if sum(p.numel() for p in m.parameters()) >= fsdp.min_num_params]


def _modules_by_size(model: PreTrainedModel, least: int) -> list[nn.Module]:
    """Innermost first, every module whose parameters that no unit holds yet number at least `least`. Not looked into:
    the head, which is called for a piece of the positions at a time (see chunked_loss); what runs row by row, as ranks
    have different numbers of rows; and what peft has wrapped: DoRA and adapters of experts read the parameters of
    modules inside without calling these, which gathers nothing."""
    wrapped: list[nn.Module] = []
    held: set[int] = set()
    whole = {model.get_output_embeddings()}
    if has_token_mixers(model):
        whole |= token_mixers(model).by_row | token_mixers(model).with_kernels
    times = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))

    def visit(module: nn.Module) -> None:
        if module not in whole and not isinstance(module, BaseTunerLayer):
            for child in module.children():
                visit(child)
        own = {id(p): p for p in module.parameters() if id(p) not in held}
        # fully_shard gathers around forward, which containers do not have.
        is_unit = module is not model and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterDict)
        if is_unit and all(times[key] == 1 for key in own) and sum(p.numel() for p in own.values()) >= least:
            wrapped.append(module)
            held.update(own)

    visit(model)
    return wrapped


def _describe_units(
    model: PreTrainedModel, modules: list[nn.Module], compute: torch.dtype, ready: Set[nn.Parameter] = frozenset()
) -> list[Unit]:
    names = {module: name for name, module in model.named_modules()}
    quantized = weight_counts(model)
    held: set[int] = set()
    units = []
    for module in [*modules, model]:
        own = {id(p): p for p in module.parameters() if id(p) not in held}
        held.update(own)
        count = sum(quantized.get(key, p.numel()) for key, p in own.items())
        gathered = sum(
            p.numel() * (compute if p.is_floating_point() else p.dtype).itemsize for p in own.values() if p not in ready
        )
        units.append(Unit(names[module], type(module).__name__, count, gathered))
    return units


def unit_table(units: list[Unit]) -> str:
    """The units as lines for people: equal ones counted together, the largest named."""
    groups = Counter((unit.kind if unit.name else "rest of the model", unit.parameters, unit.bytes) for unit in units)
    lines = [
        f"  {count} x {kind}: {parameters:,} parameters, {gathered / 2**20:,.1f} MiB gathered"
        for (kind, parameters, gathered), count in groups.items()
    ]
    largest, total = max(units, key=lambda unit: unit.parameters), sum(unit.parameters for unit in units)
    share = f"the largest, {largest.name or 'the rest'}, is {largest.parameters / total:.0%}"
    return "\n".join([f"{len(units)} FSDP units, {total:,} parameters; {share}", *lines])


def shard_degree(fsdp: FSDPConfig) -> int | Literal["node", "world"]:
    """How many ranks share one copy of the model: 1 (data parallel), a number, those of a node, or all."""
    if not fsdp.enable_fsdp or fsdp.sharding_strategy == "NO_SHARD":
        return 1
    if fsdp.sharding_strategy == "HYBRID_SHARD":
        return fsdp.sharding_group_size or "node"
    return "world"
