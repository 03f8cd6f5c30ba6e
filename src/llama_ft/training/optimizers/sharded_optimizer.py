"""The base class of optimizers that compute on each rank's local rows. Their states are DTensors
sharded like the parameter, so checkpoints can be loaded on any number of ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from llama_ft.models.base.shards import local_shard

States = dict[str, Tensor]
ParamGroup = dict[str, Any]


def zeros_for(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, replicated: bool = False
) -> Tensor:
    """Return a state of zeros with the global `shape`, sharded by rows like the parameter, or
    `replicated`."""
    shard = local_shard(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=shard.device)
    mesh = parameter.device_mesh
    placements: tuple[Placement, ...] = parameter.placements
    rows = shard.shape[0]
    if replicated:
        placements = (Replicate(),) * mesh.ndim
        rows = shape[0]
    empty = torch.empty((rows, *shape[1:]), dtype=dtype, device="meta")
    stride = torch.empty(shape, device="meta").stride()
    laid_out = DTensor.from_local(
        empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    # Allocate only now: from_local would move it to the mesh's device, but offloaded weights are
    # elsewhere.
    return torch.zeros_like(laid_out, device=shard.device)


@dataclass(frozen=True)
class ShardUpdate:
    """One step of this rank's rows of a parameter. An optimizer changes `weight` and `states` in
    place.

    Attributes:
        parameter: the DTensor (or plain tensor) itself, for its global shape and its mesh.
        weight: its local rows, possibly none; the rank must still join collectives.
        gradient: the gradient of these rows, in the weight's dtype.
        states: the local rows of the states from `new_state`.
        step: number of this step; 1 for the first.
        param_group: lr, weight_decay and the other entries of `defaults`.
    """

    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    states: States
    step: int
    param_group: ParamGroup


class ShardedOptimizer(torch.optim.Optimizer):
    """Calls `update` with each parameter's local rows. It counts the state `step`, as torch's
    optimizers do.

    A new optimizer is a subclass with `new_state` and `update`, and a line in
    config/settings.OPTIMIZERS. A subclass with further settings names them in its constructor:
    `build_optimizer` passes those of its options that the constructor has.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        weight_decay: decoupled as in AdamW: weights shrink by lr x weight_decay.
        further: other entries of `defaults`.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **further: Any) -> None:
        super().__init__(params, {"lr": lr, **further, "weight_decay": weight_decay})

    def new_state(self, parameter: Tensor) -> States:
        """Return the states of a parameter before its first step, without `step`."""
        raise NotImplementedError

    def first_state(self, parameter: Tensor, param_group: ParamGroup) -> States:
        """Return all states of a parameter before its first step."""
        return {"step": torch.tensor(0.0), **self.new_state(parameter)}

    def update(self, shard: ShardUpdate) -> None:
        """Update this rank's rows of a parameter in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.first_state(parameter, param_group))
                state["step"] += 1
                states = {name: local_shard(value) for name, value in state.items()}
                shard = ShardUpdate(
                    parameter=parameter,
                    weight=local_shard(parameter),
                    gradient=local_shard(parameter.grad).contiguous(),
                    states=states,
                    step=int(states.pop("step").item()),
                    param_group=param_group,
                )
                self.update(shard)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states unchanged. torch's own method would cast them to the parameter's dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved = [
            number for param_group in state_dict["param_groups"] for number in param_group["params"]
        ]
        parameters = [
            parameter for param_group in self.param_groups for parameter in param_group["params"]
        ]
        for number, parameter in zip(saved, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])
