"""Where in the model a run was when it failed, and what it held: read from the error's frames, which cost nothing until
then."""

from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llama_ft.phases import Holder


def frames_of(traceback: TracebackType | None) -> list[FrameType]:
    """The frames an error came through, the outermost first."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def first_local(frames: Iterable[FrameType], kind: type[Any]) -> Any:
    """The first local variable of a type, from the outermost frame on: the recipe's model, its optimizer. None if there
    is none."""
    return next((value for frame in frames for value in frame.f_locals.values() if isinstance(value, kind)), None)


def module_at_work(frames: list[FrameType], model: nn.Module | None) -> str:
    """The innermost module that was computing; in a backward pass, which mostly runs without frames of Python's, the
    unit whose backward began last. "" where neither is known."""
    if model is None:
        return ""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        self = frame.f_locals.get("self")
        if names.get(id(self)):
            return names[id(self)]
        if (unit := getattr(self, "_module_fqn", None)) and hasattr(self, "fsdp_params"):  # FSDP gathers or reduces it
            return str(unit)
    # A unit is in PRE_BACKWARD from the moment its output's gradient is there until its own are; they come in the
    # opposite order of the forward pass.
    begun = [group for group in _groups(model) if group._training_state.name == "PRE_BACKWARD"]
    order = {id(group): place for group in begun for place, group in enumerate(group.comm_ctx.post_forward_order)}
    last = min(begun, key=lambda group: order.get(id(group), len(order)), default=None)
    return last._module_fqn or "" if last is not None else ""


def held_now(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> dict[Holder, int]:
    """Bytes on `device` of what can be told by its owner, at any moment: also where units are gathered."""
    parameters = [parameter for group in _groups(model) for parameter in group.fsdp_params]
    gathered = [getattr(parameter, "_unsharded_param", None) for parameter in parameters]
    # FSDP hears only at the first step that loading has given the modules other tensors, and of some it never knows.
    is_gathered = {id(parameter) for parameter in gathered}
    loaded = [parameter for parameter in model.parameters() if id(parameter) not in is_gathered]
    sharded = [*(parameter.sharded_param for parameter in parameters), *loaded]
    states = optimizer.state.values() if optimizer is not None else []
    members: dict[Holder, Iterable[Any]] = {
        "sharded parameters": [tensor for tensor in sharded if tensor.is_floating_point()],
        "quantized parts": [tensor for tensor in sharded if not tensor.is_floating_point()],
        "gathered units": [*gathered, *(output for each in parameters for output in each.all_gather_outputs)],
        "gradients": [
            *(tensor.grad for tensor in (*sharded, *gathered) if tensor is not None),
            *(parameter.unsharded_accumulated_grad for parameter in parameters),
        ],
        "optimizer state": [value for state in states for value in state.values()],
    }
    counted: set[int] = set()
    held: dict[Holder, int] = {}
    for holder, tensors in members.items():
        held[holder] = 0
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and local.device.type == device.type:
                storage = local.untyped_storage()
                if storage._cdata not in counted:
                    counted.add(storage._cdata)
                    held[holder] += storage.nbytes()
    return held


def _groups(model: nn.Module) -> list[Any]:
    """torch's own record of each unit (FSDPParamGroup)."""
    states: list[Callable[[], Any]] = [m._get_fsdp_state for m in model.modules() if isinstance(m, FSDPModule)]
    return [group for state in states for group in _groups_of(state())]


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_group"):  # torch 2.11
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(state._fsdp_param_groups)
