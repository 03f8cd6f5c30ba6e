"""The optimizer and its learning rate."""

import inspect
import math
from importlib import import_module
from typing import Any

import torch
from torch import nn

from llama_ft.config import TrainConfig
from llama_ft.config.settings import OPTIMIZERS
from llama_ft.training.sharded_optimizer import local_tensor


class AdamW(torch.optim.AdamW):
    """torch's, computing on each rank's own rows, with states sharded like parameters. DTensor's dispatch takes 3 to
    5 times as long for 300 small parameters, and 3 s more for the first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, fused=True)

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
    decayed = [p for name, p in trained if p.ndim > 1 and not name.endswith("bias")]
    others = [p for name, p in trained if p.ndim <= 1 or name.endswith("bias")]
    pairs = ((decayed, train.weight_decay), (others, 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in pairs if parameters]
    module, _, name = OPTIMIZERS[train.optimizer].partition(".")
    kind: Any = getattr(import_module(f"llama_ft.training.{module}"), name)
    taken = inspect.signature(kind).parameters.keys() & {"momentum", "use_kahan_summation"}
    optimizer: torch.optim.Optimizer = kind(groups, lr=train.lr, **{name: getattr(train, name) for name in taken})
    return optimizer


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the parameters that have had no step yet the states they begin with. torch's state-dict utilities would make
    a step for that; an optimizer whose `state` has an entry, even an empty one, they leave alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(optimizer.first_state(parameter, group))  # type: ignore[attr-defined]


def learning_rate(train: TrainConfig, step: int, total_steps: int, epoch: int) -> float:
    """The learning rate of an optimizer step: a function of position only, so nothing has to be saved. Warm-up, cosine,
    linear and constant are those of transformers.get_scheduler: the first step of a warm-up has 0.

    Args:
        train: lr, lr_scheduler, warmup_steps, gamma.
        step: optimizer step, 0 <= step < total_steps.
        total_steps: optimizer steps of the whole run, where cosine and linear reach zero.
        epoch: 0-based; step multiplies by gamma after each, as torch's StepLR(step_size=1) per epoch does.
    """
    if step < train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    factors = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    factors["step"] = train.gamma**epoch
    return train.lr * factors[train.lr_scheduler]
