"""What a checkpoint holds of this rank, and how it is put back: trained parameters, optimizer, random numbers."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llama_ft.checkpoint.reader import Checkpoint
from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.models import ShardGroup
from llama_ft.models.shards import local_shard
from llama_ft.runtime import Runtime, log
from llama_ft.training.sharded_optimizer import zeros_for


@dataclass(frozen=True)
class OwnState:
    """What this rank writes.

    Attributes:
        tensors: its rows by name in the file, sharing the memory of what they are rows of.
        whole: names of those that are not rows but the whole.
        shard: which shard of the model the rows are.
    """

    tensors: dict[str, torch.Tensor]
    whole: list[str]
    shard: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Runtime) -> OwnState:
    """This rank's part of a checkpoint: where ranks hold copies of the same rows, each writes its share of them."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    everything: dict[str, torch.Tensor] = {f"model/{name}": parameter for parameter, name in names.items()}
    whole = []
    for parameter, name in names.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):  # loading them changes their order
            if isinstance(value, torch.Tensor):
                everything[f"optimizer/{name}/{key}"] = value
                if not _goes_by_rows(value, parameter):
                    whole.append(f"optimizer/{name}/{key}")
    shards = ShardGroup(runtime.mesh)
    copy, copies = _which_copy(runtime.mesh)
    written, loads = dict[str, torch.Tensor](), [0] * copies
    for name, tensor in everything.items():
        rows = local_shard(tensor)
        writer = loads.index(min(loads))
        loads[writer] += rows.nbytes
        is_mine = writer == copy and (shards.index == 0 or name not in whole)
        if is_mine and rows.numel():
            written[name] = rows
    return OwnState(written | _generator_states(runtime.device), [n for n in whole if n in written], shards.index)


def _which_copy(mesh: DeviceMesh) -> tuple[int, int]:
    """Which copy of the model this rank is part of, and how many there are."""
    if "replicate" not in (mesh.mesh_dim_names or ()):
        return 0, 1
    return mesh["replicate"].get_local_rank(), mesh["replicate"].size()


def _goes_by_rows(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ranks share a state out by rows, as they do the parameter; one that holds all of it may be plain."""
    if isinstance(state, DTensor):
        return any(placement.is_shard() for placement in state.placements)
    return state.ndim > 0 and len(state) == len(parameter)


def _generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    return states


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
        UserError: the checkpoint's trained parameters are not the model's.
    """
    restore_weights(checkpoint, model, runtime)
    _restore_generators(checkpoint, runtime)
    saved = checkpoint.trainer["config"]["train"]
    if any(saved[name] != getattr(train, name) for name in ("optimizer", "use_kahan_summation")):
        log.warning(f"{train.optimizer} begins without states: those of {saved['optimizer']} are left behind.")
        return
    shards = ShardGroup(runtime.mesh)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trained}
    for full_name, header in checkpoint.tensors.items():
        kind, _, rest = full_name.partition("/")
        name, _, key = rest.rpartition("/")
        if kind != "optimizer" or name not in trained:
            continue
        if not header.shape:
            states[name][key] = checkpoint.read(full_name)
            continue
        whole = full_name in checkpoint.whole
        state = zeros_for(trained[name], header.shape, header.dtype, replicated=whole)
        start, stop = (0, header.shape[0]) if whole else shards.own_rows(header.shape[0])
        local_shard(state).copy_(checkpoint.read_rows(full_name, start, stop))
        states[name][key] = state
    _give_states(optimizer, {trained[name]: state for name, state in states.items() if state})


def restore_weights(checkpoint: Checkpoint, model: nn.Module, runtime: Runtime) -> None:
    """Put the trained parameters of a checkpoint into the model, each rank its rows. Raises as `restore`."""
    weights = checkpoint.weights()
    shards = ShardGroup(runtime.mesh)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    stored = {name: header.shape for name, header in weights.tensors.items()}
    if shapes != stored:
        different = sorted({name for name, _ in shapes.items() ^ stored.items()})
        raise UserError(
            f"{checkpoint.folder}: its trained parameters are not those of this run. {len(different)} differ, such as "
            f"{different[0]}: {stored.get(different[0], 'absent')} there, {shapes.get(different[0], 'absent')} here."
        )
    for name, parameter in trained.items():
        start, stop = shards.own_rows(parameter.shape[0])
        if stop > start:
            local_shard(parameter).copy_(weights.read_rows(name, start, stop))


def _give_states(optimizer: torch.optim.Optimizer, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    """The groups stay as they are: learning rate and decay are this run's settings."""
    settings = optimizer.state_dict()["param_groups"]
    numbers = [number for group in settings for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {n: states[p] for n, p in zip(numbers, parameters, strict=True) if p in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": settings})


def _restore_generators(checkpoint: Checkpoint, runtime: Runtime) -> None:
    states = checkpoint.generator_states(runtime.rank)
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    else:
        torch.manual_seed(torch.initial_seed() + checkpoint.step)
    if "cuda" in states and runtime.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], runtime.device)
