"""Shard a model on the meta device: choose its FSDP units, apply fully_shard, and describe the
units in a table."""

from collections import Counter
from collections.abc import Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Literal, cast

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from llama_ft.config import FSDPConfig
from llama_ft.cpu import gloo
from llama_ft.errors import UserError
from llama_ft.models.adapters.lora_linear import cast_where_used
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.base.torch_2_11 import allow_integers
from llama_ft.models.built import BuiltModel, FsdpUnit, Sharding
from llama_ft.models.quantization.layers import weight_counts
from llama_ft.models.sharding.dtypes import fp32_modules
from llama_ft.runtime.devices import Precision
from llama_ft.runtime.target import current_target


def apply_fsdp(
    built: BuiltModel, mesh: DeviceMesh, fsdp: FSDPConfig, precision: Precision
) -> Sharding:
    """Apply fully_shard to the modules of the wrap policy, then to the root. Return the FSDP units,
    root last. Raises UserError if the policy finds no decoder layer class. Without enable_fsdp,
    units only limit what is cast at once.

    Args:
        built: the model on the meta device, with adapters and packed attention.
        mesh: with one dimension it shards; with two it replicates over the first and shards over
            the second.
        fsdp: wrap policy, strategy, offloading.
        precision: dtypes of all-gather and reduce-scatter.
    """
    model = built.model
    fp32_units = fp32_modules(model, precision.compute)
    ready = _used_as_stored(model, mesh, fsdp, precision, fp32_units)
    # Without parameters that are sharded or cast they need no unit.
    fp32_units = [module for module in fp32_units if not ready.issuperset(module.parameters())]
    modules = fp32_units + _modules_to_wrap(built, fsdp, fp32_units)
    modules += [module for module in _tower_units(built) if module not in modules]
    units = _describe_units(model, modules, precision.compute, ready, fp32_units)
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    in_fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    # Pinned memory, so that copies to and from the GPU overlap with computation.
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if fsdp.fsdp_cpu_offload
        else OffloadPolicy()
    )
    allow_integers()
    shard_one = partial(fully_shard, mesh=mesh, offload_policy=offload, ignored_params=ready)
    layers = [module for module in decoder_layers(model) if module in modules]
    # The backward pass of the LM head and of the last decoder layer follows their forward pass at
    # once, so freeing their weights would all-gather them twice.
    last_ones = [model.get_output_embeddings(), *layers[-1:]]
    is_kept = fsdp.sharding_strategy == "SHARD_GRAD_OP"
    resharded = [module for module in modules if not is_kept and module not in last_ones]
    for module in modules:
        shard_one(
            module,
            mp_policy=in_fp32 if module in fp32_units else policy,
            reshard_after_forward=module in resharded,
        )
    shard_one(model, mp_policy=policy, reshard_after_forward=False)
    # On a GPU the next unit can be all-gathered while one computes.
    if mesh["shard"].size() > 1 and current_target().is_cuda:
        for layer, following in pairwise(layers):
            cast(FSDPModule, layer).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global number of loss tokens, so gradients are
            # summed, not averaged.
            if mesh.size() > 1:  # on one process, fully_shard would divide by 1 and copy the result
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            if gloo.is_over_gloo(mesh):
                gloo.use_gloo_collectives(module)
    # The root is unsharded first in the next forward pass, so keeping it takes no more memory.
    return Sharding(units, [*modules, model] if is_kept else [model], resharded)


def _used_as_stored(
    model: nn.Module,
    mesh: DeviceMesh,
    fsdp: FSDPConfig,
    precision: Precision,
    fp32_units: list[nn.Module],
) -> set[nn.Parameter]:
    """Return parameters that are whole on this rank, are used in their stored dtype (or cast where
    they are used), and get gradients from no other rank; or adapters, see `sum_over_replicas`.

    fully_shard ignores them. It would copy each one before every use, and copy its gradient twice.
    On one process this made steps in fp32 on the CPU 1.1 times (LoRA, 512 tokens) to 1.3 times
    (full fine-tuning) as long.
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
    # Their gradients are summed in their own dtype.
    adapters = cast_where_used(model) if precision.reduce == precision.trained else set()
    in_fp32 = set[nn.Parameter]()
    for module in fp32_units:
        in_fp32.update(
            parameter
            for parameter in module.parameters()
            if mesh.size() == 1 or not parameter.requires_grad
        )
    return ready | adapters | in_fp32


def sum_over_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of trained parameters that fully_shard ignores over the copies of the model,
    in one all-reduce, after the backward passes of a step.

    With data parallelism these are the adapters. One all-reduce per layer and micro-batch would
    take longer than such small gradients need.
    """
    if mesh.size() == 1 or mesh["shard"].size() > 1:
        return
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            # An expert without tokens has no gradient, but perhaps on another rank.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh["replicate"].get_group())
    parts = flat.split([gradient.numel() for gradient in gradients])
    shaped = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(gradients, shaped)


def _modules_to_wrap(
    built: BuiltModel,
    fsdp: FSDPConfig,
    fp32_units: list[nn.Module],
) -> list[nn.Module]:
    """Return the modules of the wrap policy, innermost first. `fp32_units` are units already."""
    if fsdp.fsdp_wrap_policy == "size":
        return _modules_by_size(built, fsdp.min_num_params, fp32_units)
    model = built.model
    layers = decoder_layers(model)
    if not layers:
        raise UserError("this model has no list of decoder layers. Use --fsdp_wrap_policy size.")
    layers = _without_shared(layers)
    if fsdp.fsdp_wrap_policy == "transformer":
        return layers
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = [module for module in both if module is not None]
    weights = list[nn.Parameter]()
    for module in ends:
        weights += module.parameters()
    if len(set(weights)) < len(weights):
        return layers  # a tied weight must stay in the root unit
    large_ends = []
    for module in ends:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count >= fsdp.min_num_params:
            large_ends.append(module)
    return layers + large_ends


def _tower_units(built: BuiltModel) -> list[nn.Module]:
    """Return the layers of towers, each a unit. Every rank runs them in every micro-batch (see
    `Media.tensors`), so no rank waits for an all-gather that others skip. The rest of a tower is
    in the root unit: Transformers finds by a tower's class what it can return, and fully_shard would
    change this class."""
    units = []
    for part in built.tower_modules:
        stacks = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
        inner = set[nn.Module]()
        for stack in stacks:
            for layer in stack:
                inner.update(child for child in layer.modules() if child is not layer)
        for stack in stacks:
            units += [layer for layer in stack if layer not in inner and _is_called(layer)]
    return units


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has weights and is not a container."""
    containers = nn.ModuleList | nn.ModuleDict | nn.ParameterDict
    return not isinstance(module, containers) and any(True for _ in module.parameters())


def _without_shared(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the layers that share no parameter with another one (Zamba). A parameter belongs to one
    unit: shared ones stay in the root unit, with the rest of their layers."""
    times = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    return [
        layer for layer in layers if all(times[parameter] == 1 for parameter in layer.parameters())
    ]


def _modules_by_size(
    built: BuiltModel,
    least: int,
    fp32_units: list[nn.Module],
) -> list[nn.Module]:
    """Return modules, innermost first, with at least `least` parameters that no unit inside them
    holds. It does not split the LM head, which is called for one chunk of positions at a time
    (chunked_loss); modules that run sample by sample, because ranks have different numbers of
    samples; and modules wrapped by PEFT: DoRA and adapters of experts read parameters of inner
    modules without calling them, so these would not be all-gathered."""
    model = built.model
    wrapped: list[nn.Module] = []
    held = set[int]()
    for module in fp32_units:
        held.update(id(parameter) for parameter in module.parameters())
    whole = {model.get_output_embeddings()}
    if built.mixers is not None:
        whole |= built.mixers.per_sample | built.mixers.with_kernels
    times = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )

    def visit(module: nn.Module) -> None:
        if module not in whole and not isinstance(module, BaseTunerLayer):
            for child in module.children():
                visit(child)
        own = _parameters_without(module, held)
        # fully_shard all-gathers around `forward`, which containers do not have.
        containers = nn.ModuleList | nn.ModuleDict | nn.ParameterDict
        if module is model or isinstance(module, containers):
            return
        has_tied = any(times[key] > 1 for key in own)
        count = sum(parameter.numel() for parameter in own.values())
        if count >= least and not has_tied:
            wrapped.append(module)
            held.update(own)

    visit(model)
    return wrapped


def _parameters_without(
    module: nn.Module,
    held: Set[int],
) -> dict[int, nn.Parameter]:
    """Return a module's parameters by their ids, without those that another unit holds."""
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    return {key: parameter for key, parameter in parameters.items() if key not in held}


def _describe_units(
    model: nn.Module,
    modules: list[nn.Module],
    compute: torch.dtype,
    ready: Set[nn.Parameter] = frozenset(),
    fp32_units: Sequence[nn.Module] = (),
) -> list[FsdpUnit]:
    names = {module: name for name, module in model.named_modules()}
    quantized = weight_counts(model)
    held: set[int] = set()
    units = []
    for module in [*modules, model]:
        own = _parameters_without(module, held)
        held.update(own)
        count = 0
        gathered = 0
        for key, parameter in own.items():
            count += quantized.get(key, parameter.numel())
            is_cast = parameter.is_floating_point() and module not in fp32_units
            dtype = compute if is_cast else parameter.dtype
            if parameter not in ready:
                gathered += parameter.numel() * dtype.itemsize
        units.append(FsdpUnit(names[module], type(module).__name__, count, gathered))
    return units


def unit_table(units: list[FsdpUnit]) -> str:
    """Return the FSDP units as lines for the log. Equal ones are counted together; the largest is
    named."""
    groups = Counter(
        (unit.kind if unit.name else "rest of the model", unit.parameters, unit.bytes)
        for unit in units
    )
    lines = [
        f"  {count} x {kind}: {parameters:,} parameters, {gathered / 2**20:,.1f} MiB unsharded"
        for (kind, parameters, gathered), count in groups.items()
    ]
    largest = max(units, key=lambda unit: unit.parameters)
    total = sum(unit.parameters for unit in units)
    largest_name = largest.name or "outside the decoder layers"
    share = f"the largest ({largest_name}) has {largest.parameters / total:.0%}"
    return "\n".join([f"{total:,} parameters in {len(units)} FSDP units; {share}", *lines])


def shard_degree(fsdp: FSDPConfig) -> int | Literal["node", "world"]:
    """Return how many ranks share one copy of the model: 1 (DDP), a number, those of a node, or
    all."""
    if not fsdp.enable_fsdp or fsdp.sharding_strategy == "NO_SHARD":
        return 1
    if fsdp.sharding_strategy == "HYBRID_SHARD":
        return fsdp.sharding_group_size or "node"
    return "world"


def free_unsharded(model: nn.Module) -> None:
    """Free parameters that a forward pass without backward left unsharded (root, or all with
    SHARD_GRAD_OP)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
