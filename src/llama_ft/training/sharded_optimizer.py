"""What the optimizers of this folder share: they compute on each rank's own rows, and their states are DTensors sharded
like the parameter, so that checkpoints load on any number of ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from llama_ft.models.shards import local_shard

States = dict[str, Tensor]
Group = dict[str, Any]


def zeros_for(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, replicated: bool = False) -> Tensor:
    """A state of zeros with the (global) `shape`, sharded by rows as the parameter is, or whole on every rank."""
    own = local_shard(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=own.device)
    rows = shape[0] if replicated else own.shape[0]
    empty = torch.empty((rows, *shape[1:]), dtype=dtype, device="meta")
    mesh = parameter.device_mesh
    placements: tuple[Placement, ...] = (Replicate(),) * mesh.ndim if replicated else parameter.placements
    stride = torch.empty(shape, device="meta").stride()
    laid_out = DTensor.from_local(empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    # Given storage only now: from_local would move it to the mesh's device, and offloaded weights are not there.
    return torch.zeros_like(laid_out, device=own.device)


class ShardedOptimizer(torch.optim.Optimizer):
    """Calls `update` with each parameter's local rows. A state `step` is counted here, as torch's optimizers do.

    All of them take params (parameters or groups of them), lr, and weight_decay: decoupled as in AdamW, so that weights
    shrink by lr x weight_decay.
    """

    def new_state(self, parameter: Tensor) -> States:
        """The states of a parameter before its first step, without `step`."""
        raise NotImplementedError

    def first_state(self, parameter: Tensor, group: Group) -> States:
        """All states of a parameter before its first step."""
        return {"step": torch.tensor(0.0), **self.new_state(parameter)}

    def update(self, parameter: Tensor, weight: Tensor, grad: Tensor, state: States, step: int, group: Group) -> None:
        """Update this rank's rows of one parameter in place.

        Args:
            parameter: the DTensor (or plain tensor) itself, to know its whole shape and its mesh.
            weight: its local rows, perhaps none; the rank must still take part in collectives.
            grad: of the same rows, in the weight's dtype.
            state: the local rows of what `new_state` made.
            step: 1 at the first step.
            group: lr, weight_decay and what else `defaults` had.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
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
                self.update(parameter, local_shard(parameter), gradient, own, int(state["step"].item()), group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states as they are: torch's own method casts them to the parameter's dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])
