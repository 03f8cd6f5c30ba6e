"""The content of a checkpoint and how it is restored: trained parameters, optimizer states, random
number generators. It uses torch's `get_state_dict` and `set_state_dict`."""

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
from llama_ft.models.base.shards import local_shard
from llama_ft.models.base.source import listed
from llama_ft.runtime import Ranks
from llama_ft.training.optimizer import create_states

OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
# frozen parameters are missing; trained ones are checked before
TRAINED_ONLY = replace(OPTIONS, strict=False)
Tensors = dict[str, torch.Tensor]


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Tensors:
    """Return this rank's part of a checkpoint: the sharded tensors of which it writes its rows, and
    whole others.

    If several ranks hold copies of the same rows, each of them writes a part. A rank without rows
    of a tensor skips it.

    Raises:
        UserError: a state of the optimizer is sharded, but it does not say so.
    """
    create_states(optimizer)  # otherwise torch makes a hidden optimizer step
    written = Tensors()
    shard = ranks.shard
    loads = [0] * shard.copies  # bytes that each copy of the model writes
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    for name, tensor in _by_name(model, weights, states).items():
        rows = local_shard(tensor)
        if shard.size > 1 and rows.dim() and not isinstance(tensor, DTensor):
            # one rank's rows would be saved, and loaded on all ranks
            raise UserError(
                f"{type(optimizer).__name__}: its state {name} is not a DTensor, so it cannot be saved.\n"
                "Create states like the parameter, such as torch.zeros_like(parameter)."
            )
        is_sharded = isinstance(tensor, DTensor) and any(
            placement.is_shard() for placement in tensor.placements
        )
        writer = loads.index(min(loads))
        loads[writer] += rows.nbytes
        if writer == shard.copy and rows.numel() and (shard.rank == 0 or is_sharded):
            written[name] = tensor
    written[f"rng.{ranks.rank}.cpu"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        written[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return written


def _by_name(
    model: nn.Module,
    weights: Mapping[str, Any],
    states: Mapping[str, Any],
) -> Tensors:
    """Return the live tensors of a checkpoint by their names in it, from the two state dicts.
    Numbers become tensors, because some optimizers count their steps in an int.
    Buffers are not saved, because they are the base model's. Settings of the optimizer are not
    saved, because a resumed run has its own."""
    tensors = Tensors()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{name}"] = weights[name]
    for name, state in states.items():
        if name.startswith("state."):  # the others start with param_groups
            tensors[f"optimizer.{name}"] = _as_tensor(state)
    return tensors


def _as_tensor(state: torch.Tensor | float) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    return torch.tensor(state, dtype=torch.float64 if isinstance(state, float) else None)


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Restore parameters, optimizer states and random number generators. Each rank reads its rows.

    Args:
        checkpoint: written by any number of ranks, with any sharding.
        model: the sharded model; its trained parameters are overwritten.
        optimizer: an optimizer without states.
        ranks: a rank gets the generators of the rank with its number. If the checkpoint has none,
            it keeps its own.

    Raises:
        UserError: the trained parameters are not those of the model, or the states are not those of
            the optimizer.
    """
    create_states(optimizer)
    restore_weights(checkpoint, model, [optimizer])
    # last: nothing above may use them
    names = {kind: f"rng.{ranks.rank}.{kind}" for kind in ("cpu", "cuda")}
    states = {
        kind: checkpoint.read(name) for kind, name in names.items() if name in checkpoint.tensors
    }
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    else:
        torch.manual_seed(torch.initial_seed() + checkpoint.step)
    if "cuda" in states and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], ranks.device)


def restore_weights(
    checkpoint: Checkpoint, model: nn.Module, optimizers: Collection[torch.optim.Optimizer] = ()
) -> None:
    """Load the trained parameters of a checkpoint into the model, each rank its rows, and the
    states into optimizers that already have states. Raises the errors of `restore`."""
    states: Any
    weights, states = get_state_dict(model, optimizers, options=OPTIONS)
    live = _by_name(model, weights, states)
    check_same_tensors(checkpoint, live, "model.", *(["optimizer."] if optimizers else []))
    planner = dcp.DefaultLoadPlanner(False, False)  # not flattened: names stay the same
    dcp.load(live, storage_reader=checkpoint.open_storage(), planner=planner)
    for name, state in states.items():
        if name.startswith("state.") and not isinstance(state, torch.Tensor):
            states[name] = live[f"optimizer.{name}"].item()
    set_state_dict(
        model, optimizers, model_state_dict=weights, optim_state_dict=states, options=TRAINED_ONLY
    )


def check_same_tensors(
    checkpoint: Checkpoint, live: Mapping[str, torch.Tensor], *prefixes: str
) -> None:
    """Compare names, shapes and dtypes before reading. torch ignores additional names, and copies
    the codes of 8-bit states into floats without an error. Floats may have different precisions."""

    def described(tensors: Mapping[str, Any]) -> dict[str, str]:
        texts = {}
        for name, tensor in tensors.items():
            if name.startswith(prefixes):
                dtype = "" if tensor.dtype.is_floating_point else f" {tensor.dtype}"
                texts[name] = f"{tuple(tensor.shape)}{dtype}"
        return texts

    here = described(live)
    there = described(checkpoint.tensors)
    differences = here.items() ^ there.items()
    different = sorted({name for name, _ in differences})
    if different:
        lines = [
            f"{name}: {there.get(name, 'absent')} saved, {here.get(name, 'absent')} needed"
            for name in different
        ]
        raise UserError(
            f"{checkpoint.folder}: does not fit the model or its optimizer:\n{listed(lines, 3)}"
        )
