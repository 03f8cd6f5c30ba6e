"""What a checkpoint holds, and how it is put back: trained parameters, optimizer, random numbers. State comes from and
goes back through torch's `get_state_dict` and `set_state_dict`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from llama_ft.checkpoint.reader import Checkpoint
from llama_ft.errors import UserError
from llama_ft.models import ShardGroup
from llama_ft.models.shards import local_shard
from llama_ft.models.source import listed
from llama_ft.runtime import Runtime
from llama_ft.training.optimizer import create_states

OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
TRAINED_ONLY = replace(OPTIONS, strict=False)  # frozen parameters are not there; what must be is compared before
Tensors = dict[str, torch.Tensor]


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime) -> Tensors:
    """This rank's part of a checkpoint: the tensors of which it writes its rows, or all if they are not sharded.

    Where ranks hold copies of the same rows, each writes its share of them. No rank writes what it has no rows of.
    """
    create_states(optimizer)  # else torch makes a hidden step
    mesh, written = runtime.mesh, Tensors()
    replicas = mesh["replicate"] if "replicate" in (mesh.mesh_dim_names or ()) else None
    copy, loads = (replicas.get_local_rank(), [0] * replicas.size()) if replicas else (0, [0])
    is_first_shard = ShardGroup(mesh).index == 0
    for name, tensor in _by_name(model, *get_state_dict(model, optimizer, options=OPTIONS)).items():
        rows = local_shard(tensor)
        is_sharded = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
        writer = loads.index(min(loads))
        loads[writer] += rows.nbytes
        if writer == copy and rows.numel() and (is_first_shard or is_sharded):
            written[name] = tensor
    written[f"rng.{runtime.rank}.cpu"] = torch.get_rng_state()
    if runtime.device.type == "cuda":
        written[f"rng.{runtime.rank}.cuda"] = torch.cuda.get_rng_state(runtime.device)
    return written


def _by_name(model: nn.Module, weights: Mapping[str, Any], states: Mapping[str, Any]) -> Tensors:
    """The live tensors of a checkpoint by their names there, out of the two state dicts. Buffers are not saved: they
    are the base model's. Nor are the optimizer's settings: a resumed run has its own."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {f"model.{name}": weights[name] for name in trained} | {
        f"optimizer.{name}": state for name, state in states.items() if name.startswith("state.")
    }


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    """Go on where a checkpoint was written: parameters, optimizer, random numbers; each rank reads its rows.

    Args:
        checkpoint: written by any number of ranks, however they shared the model.
        model: sharded; its trained parameters are overwritten.
        optimizer: without states.
        runtime: a rank that the checkpoint knows goes on with the random numbers of the rank of its number, any other
            with some of its own.

    Raises:
        UserError: the checkpoint's trained parameters are not the model's, or its optimizer states not the optimizer's.
    """
    create_states(optimizer)
    restore_weights(checkpoint, model, [optimizer])
    names = {kind: f"rng.{runtime.rank}.{kind}" for kind in ("cpu", "cuda")}  # last: nothing above may draw from them
    states = {kind: checkpoint.read(name) for kind, name in names.items() if name in checkpoint.tensors}
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    else:
        torch.manual_seed(torch.initial_seed() + checkpoint.step)
    if "cuda" in states and runtime.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], runtime.device)


def restore_weights(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Collection[torch.optim.Optimizer] = ()
) -> None:
    """Put the trained parameters of a checkpoint into the model, each rank its rows, and states into optimizers that
    have states already. Raises as `restore`."""
    weights, states = get_state_dict(model, optimizers, options=OPTIONS)
    live = _by_name(model, weights, states)
    check_same_tensors(checkpoint, live, "model.", *(["optimizer."] if optimizers else []))
    stored, planner = dcp.HuggingFaceStorageReader(str(checkpoint.folder)), dcp.DefaultLoadPlanner(False, False)
    dcp.load(live, storage_reader=stored, planner=planner)  # nothing is flattened: names stay
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=states, options=TRAINED_ONLY)


def check_same_tensors(checkpoint: Checkpoint, live: Mapping[str, torch.Tensor], *prefixes: str) -> None:
    """Compare names, shapes and dtypes before anything is read: torch ignores names that it was not asked for, and
    copies the codes of 8-bit states into numbers without an error. Floats may have another precision."""

    def described(tensors: Mapping[str, Any]) -> dict[str, str]:
        ours = {name: it for name, it in tensors.items() if name.startswith(prefixes)}
        return {n: f"{tuple(it.shape)}{'' if it.dtype.is_floating_point else f' {it.dtype}'}" for n, it in ours.items()}

    here, there = described(live), described(checkpoint.tensors)
    if different := sorted({name for name, _ in here.items() ^ there.items()}):
        lines = [f"{name}: {there.get(name, 'absent')} saved, {here.get(name, 'absent')} needed" for name in different]
        raise UserError(f"{checkpoint.folder}: does not fit the model or its optimizer:\n{listed(lines, 3)}")
