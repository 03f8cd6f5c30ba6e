"""The base class of optimizers that compute on each rank's local rows. Their states are DTensors
sharded like the parameter, so checkpoints can be loaded on any number of ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from llama_ft.models.shards import local_shard

States = dict[str, Tensor]
Group = dict[str, Any]


def zeros_for(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, replicated: bool = False
) -> Tensor:
    """Return a state of zeros with the global `shape`, sharded by rows like the parameter, or
    `replicated`."""
    own = local_shard(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=own.device)
    rows = shape[0] if replicated else own.shape[0]
    empty = torch.empty((rows, *shape[1:]), dtype=dtype, device="meta")
    mesh = parameter.device_mesh
    placements: tuple[Placement, ...] = (
        (Replicate(),) * mesh.ndim if replicated else parameter.placements
    )
    stride = torch.empty(shape, device="meta").stride()
    laid_out = DTensor.from_local(
        empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    # Allocate only now: from_local would move it to the mesh's device, but offloaded weights are
    # elsewhere.
    return torch.zeros_like(laid_out, device=own.device)


class ShardedOptimizer(torch.optim.Optimizer):
    """Calls `update` with each parameter's local rows. It counts the state `step`, as torch's
    optimizers do.

    All optimizers take params (parameters or groups of them), lr, and weight_decay, which is
    decoupled as in AdamW: weights shrink by lr x weight_decay.
    """

    def new_state(self, parameter: Tensor) -> States:
        """Return the states of a parameter before its first step, without `step`."""
        raise NotImplementedError

    def first_state(self, parameter: Tensor, group: Group) -> States:
        """Return all states of a parameter before its first step."""
        return {"step": torch.tensor(0.0), **self.new_state(parameter)}

    def update(
        self,
        parameter: Tensor,
        weight: Tensor,
        grad: Tensor,
        state: States,
        step: int,
        group: Group,
    ) -> None:
        """Update this rank's rows of a parameter in place.

        Args:
            parameter: the DTensor (or plain tensor) itself, for its global shape and its mesh.
            weight: its local rows, perhaps none; the rank must still join collectives.
            grad: the gradient of these rows, in the weight's dtype.
            state: the local rows of the states from `new_state`.
            step: number of this step; 1 for the first.
            group: lr, weight_decay and the other entries of `defaults`.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.first_state(parameter, group))
                state["step"] += 1
                own = {name: local_shard(value) for name, value in state.items()}
                gradient = local_shard(parameter.grad).contiguous()
                self.update(
                    parameter,
                    local_shard(parameter),
                    gradient,
                    own,
                    int(state["step"].item()),
                    group,
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states unchanged. torch's own method would cast them to the parameter's dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])
