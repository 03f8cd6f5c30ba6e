"""What a checkpoint holds, and how it is put back: trained parameters, optimizer, random numbers. State comes from and
goes back through torch's `get_state_dict` and `set_state_dict`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llama_ft.checkpoint.reader import Checkpoint
from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.models import ShardGroup
from llama_ft.models.shards import local_shard
from llama_ft.runtime import Runtime, log
from llama_ft.training.optimizer import create_states

OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
TRAINED_ONLY = replace(OPTIONS, strict=False)  # frozen parameters are not there; what must be is compared before
Tensors = dict[str, torch.Tensor]


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime) -> Tensors:
    """This rank's part of a checkpoint: the tensors of which it writes its rows, or all if they are not sharded.

    Where ranks hold copies of the same rows, each writes its share of them. No rank writes what it has no rows of.
    """
    create_states(optimizer)  # else torch makes a hidden step
    shards = ShardGroup(runtime.mesh)
    copy, copies = _which_copy(runtime.mesh)
    written, loads = Tensors(), [0] * copies
    for name, tensor in _by_name(model, *get_state_dict(model, optimizer, options=OPTIONS)).items():
        rows = local_shard(tensor)
        writer = loads.index(min(loads))
        loads[writer] += rows.nbytes
        if writer == copy and rows.numel() and (shards.index == 0 or _is_sharded(tensor)):
            written[name] = tensor
    written[f"rng.{runtime.rank}.cpu"] = torch.get_rng_state()
    if runtime.device.type == "cuda":
        written[f"rng.{runtime.rank}.cuda"] = torch.cuda.get_rng_state(runtime.device)
    return written


def _which_copy(mesh: DeviceMesh) -> tuple[int, int]:
    """Which copy of the model this rank is part of, and how many there are."""
    if "replicate" not in (mesh.mesh_dim_names or ()):
        return 0, 1
    return mesh["replicate"].get_local_rank(), mesh["replicate"].size()


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def _by_name(model: nn.Module, weights: Mapping[str, Any], states: Mapping[str, Any]) -> Tensors:
    """The live tensors of a checkpoint by their names there.

    Args:
        model: its trained parameters are there, tied ones once. Buffers are not: they are the base model's.
        weights: its state dict.
        states: the optimizer's, flattened. Its settings are not saved: a resumed run has its own.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {f"model.{name}": weights[name] for name in trained} | {
        f"optimizer.{name}": state for name, state in states.items() if name.startswith("state.")
    }


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, train: TrainConfig, runtime: Runtime
) -> None:
    """Go on where a checkpoint was written: parameters, optimizer, random numbers; each rank reads its rows.

    Args:
        checkpoint: written by any number of ranks, however they shared the model.
        model: sharded; its trained parameters are overwritten.
        optimizer: without states. One of another kind than was saved begins without them.
        train: what made the optimizer.
        runtime: a rank that the checkpoint knows goes on with the random numbers of the rank of its number, any other
            with some of its own.

    Raises:
        UserError: the checkpoint's trained parameters are not the model's, or its optimizer states not the optimizer's.
    """
    saved, optimizers = checkpoint.trainer["config"]["train"], [optimizer]
    if _kind(saved) == _kind(vars(train)):
        create_states(optimizer)
    else:
        log.warning(f"{train.optimizer} begins without states: those of {saved['optimizer']} are left behind.")
        optimizers = []
    restore_weights(checkpoint, model, optimizers)
    _restore_generators(checkpoint, runtime)  # last: nothing above may draw from them


def restore_weights(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Collection[torch.optim.Optimizer] = ()
) -> None:
    """Put the trained parameters of a checkpoint into the model, each rank its rows, and states into optimizers that
    have states already. Raises as `restore`."""
    weights, states = get_state_dict(model, optimizers, options=OPTIONS)
    live = _by_name(model, weights, states)
    _check_same(checkpoint, live, "model.", "trained parameters")
    if optimizers:
        _check_same(checkpoint, live, "optimizer.", "optimizer states")
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(live, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint.folder)), planner=planner)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=states, options=TRAINED_ONLY)


def _kind(train: dict[str, object]) -> tuple[object, ...]:
    """Optimizers of one kind have the same states."""
    return train["optimizer"], train["use_kahan_summation"], train["optimizer"] == "SGD" and bool(train["momentum"])


def _check_same(checkpoint: Checkpoint, live: Tensors, prefix: str, what: str) -> None:
    """Compare names, shapes and dtypes before anything is read: torch ignores names that it was not asked for, and
    copies the codes of 8-bit states into numbers without an error. Floats may have another precision."""
    here = {name: _told(tuple(it.shape), it.dtype) for name, it in live.items() if name.startswith(prefix)}
    there = {name: _told(it.shape, it.dtype) for name, it in checkpoint.tensors.items() if name.startswith(prefix)}
    if here != there:
        different = sorted({name for name, _ in here.items() ^ there.items()})
        first = different[0]
        raise UserError(
            f"{checkpoint.folder}: its {what} are not those of this run. {len(different)} differ, such as "
            f"{first.removeprefix(prefix)}: {there.get(first, 'absent')} there, {here.get(first, 'absent')} here."
        )


def _told(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape}" if dtype.is_floating_point else f"{shape} of {str(dtype).removeprefix('torch.')}"


def _restore_generators(checkpoint: Checkpoint, runtime: Runtime) -> None:
    states = checkpoint.generator_states(runtime.rank)
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    else:
        torch.manual_seed(torch.initial_seed() + checkpoint.step)
    if "cuda" in states and runtime.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], runtime.device)
