"""The optimizer and its learning rate."""

import math
from typing import Any

import torch
from torch import nn

from llama_ft.config import TrainConfig
from llama_ft.runtime import Runtime
from llama_ft.training.adafactor import Adafactor
from llama_ft.training.adamw_8bit import AdamW8bit
from llama_ft.training.anyprecision import AnyPrecisionAdamW
from llama_ft.training.sharded_optimizer import local_tensor


class AdamW(torch.optim.AdamW):
    """torch's, computing on each rank's own rows; its states are DTensors placed like the parameters.

    Its steps on DTensors are the same, by way of DTensor's dispatch: for 300 small parameters 3 to 5 times as long, and
    3 s more for the first.
    """

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All states of a parameter before its first step, as torch makes them."""
        step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def _init_group(self, group: Any, params: Any, gradients: Any, *states: Any) -> Any:
        is_complex = super()._init_group(group, params, gradients, *states)
        for tensors in (params, gradients, *states):
            tensors[:] = map(local_tensor, tensors)
        return is_complex


class SGD(torch.optim.SGD):
    """torch's."""

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All states of a parameter before its first step."""
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters; no weight decay on parameters of one dimension and on biases, which
    experts have in two."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    spared = {name for name, parameter in trained if parameter.ndim <= 1 or name.endswith("bias")}
    groups = [
        {"params": [p for name, p in trained if name not in spared], "weight_decay": train.weight_decay},
        {"params": [p for name, p in trained if name in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match train.optimizer:
        case "AdamW":
            return AdamW(groups, lr=train.lr, fused=True)
        case "anyprecision":
            return AnyPrecisionAdamW(groups, lr=train.lr, use_kahan_summation=train.use_kahan_summation)
        case "AdamW8bit":
            return AdamW8bit(groups, lr=train.lr)
        case "SGD":
            return SGD(groups, lr=train.lr, momentum=train.momentum)
        case "Adafactor":
            return Adafactor(groups, lr=train.lr)


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the parameters that have had no step yet the states they begin with. torch's state-dict utilities would make
    a step for that; an optimizer whose `state` has an entry, even an empty one, they leave alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(optimizer.first_state(parameter, group))  # type: ignore[attr-defined]


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's groups in a line."""
    counts = {group["weight_decay"]: sum(p.numel() for p in group["params"]) for group in optimizer.param_groups}
    decayed = [f"weight decay {decay:g} on {count:,} parameters" for decay, count in counts.items() if decay]
    kind = " (fused)" if optimizer.defaults.get("fused") else ""
    if isinstance(optimizer, AnyPrecisionAdamW):
        kind = f" (bf16 states, {optimizer.rounding})"
    return f"{type(optimizer).__name__}{kind}, {', '.join(decayed) or 'no weight decay'}; none on norms and biases"


def describe_state(optimizer: torch.optim.Optimizer, runtime: Runtime) -> str:
    """What the states take, measured on the tensors each rank holds; after the first step. All ranks call it."""
    state_bytes = sum(
        local_tensor(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    elements = sum(local_tensor(p).numel() for group in optimizer.param_groups for p in group["params"])
    ranks = runtime.all_gather_floats(state_bytes, elements)  # [ranks, 2]
    total, largest = ranks.sum(0), ranks[:, 0].max().item()
    per_parameter = (total[0] / total[1]).item()
    return f"Optimizer state: {largest / 2**20:.1f} MiB a rank at most, {per_parameter:.2f} bytes a trained parameter"


def learning_rate(train: TrainConfig, step: int, total_steps: int, epoch: int) -> float:
    """The learning rate of optimizer step `step` (0-based): a function of position only, so nothing has to be saved.
    Warm-up, cosine, linear and constant are those of transformers.get_scheduler: the first step of a warm-up has 0.

    Args:
        train: lr, lr_scheduler, warmup_steps, gamma.
        step: optimizer step, 0 <= step < total_steps.
        total_steps: optimizer steps of the whole run, where cosine and linear reach zero.
        epoch: 0-based; step multiplies by gamma after each, as torch's StepLR(step_size=1) per epoch does.
    """
    if step < train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    factors = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
        "step": train.gamma**epoch,
    }
    return train.lr * factors[train.lr_scheduler]
