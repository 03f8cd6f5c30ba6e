"""The optimizer and its learning rate."""

import inspect
import math
from collections import defaultdict
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llama_ft.config import TrainConfig
from llama_ft.config.settings.settings import OPTIMIZERS
from llama_ft.config.settings.structured_values import ParameterGroup, rate_of
from llama_ft.errors import UserError
from llama_ft.models.architecture.groups import find_groups
from llama_ft.models.base.shards import local_shard
from llama_ft.models.base.source import listed
from llama_ft.user_function import load_function


class AdamW(torch.optim.AdamW):
    """torch's AdamW on each rank's local rows, with states sharded like parameters. DTensor's
    dispatch would take 3 to 5 times as long for 300 small parameters, and 3 s more for the first
    step."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    def first_state(
        self, parameter: torch.Tensor, param_group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return all states of a parameter before its first step, as torch creates them."""
        step = torch.zeros((), device=parameter.device if param_group["fused"] else "cpu")
        return {
            "step": step,
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _init_group(self, group: Any, params: Any, gradients: Any, *states: Any) -> Any:
        """Fill the lists of this step's tensors, and replace DTensors with their local rows. torch
        calls its kernels with these lists, so they update the rows in place."""
        is_complex = super()._init_group(group, params, gradients, *states)
        for tensors in (params, gradients, *states):
            tensors[:] = map(local_shard, tensors)
        return is_complex


class SGD(torch.optim.SGD):
    """torch's SGD, with the method that ShardedOptimizer also has."""

    def first_state(
        self, parameter: torch.Tensor, param_group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return all states of a parameter before its first step."""
        if not param_group["momentum"]:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter)}


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters. The constructor of one of OPTIMIZERS gets
    those of the options below that it has. With `file.py:function`, see `_call_own`."""
    if train.optimizer not in OPTIMIZERS:
        return _call_own(_named_groups(model, train), train)
    module, _, name = OPTIMIZERS[train.optimizer].rpartition(".")
    optimizer_class: Any = getattr(import_module(module), name)
    options = {
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "momentum": train.momentum,
        "use_kahan_summation": train.use_kahan_summation,
    }
    parameters = inspect.signature(optimizer_class).parameters
    options = {name: value for name, value in options.items() if name in parameters}
    param_groups = parameter_groups(model, train)
    optimizer: torch.optim.Optimizer = optimizer_class(param_groups, lr=train.lr, **options)
    return optimizer


def parameter_groups(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Return the optimizer's groups of the trained parameters. Weight decay does not apply to
    biases and to parameters with one dimension, unless --groups sets it. (Biases of stacked experts
    have two.) With LoRA+ (https://arxiv.org/abs/2402.12354), B matrices have their own groups. With
    it or with --groups, `lr_ratio` multiplies the learning rate."""
    uses_loraplus = train.loraplus_lr_ratio != 1
    numbers = find_groups(model, train.groups)
    # of a group of --groups (-1: none), B matrices, decayed
    members = defaultdict[tuple[int, bool, bool], list[nn.Parameter]](list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = numbers.get(name, -1)
            is_b = uses_loraplus and ".lora_B." in name
            is_decayed = parameter.ndim > 1 and not name.endswith("bias")
            if number >= 0 and "weight_decay" in train.groups[number]:
                is_decayed = True
            members[number, is_b, is_decayed].append(parameter)
    param_groups = []
    for number, is_b, is_decayed in product(
        range(-1, len(train.groups)), (False, True), (True, False)
    ):
        parameters = members[number, is_b, is_decayed]
        if not parameters:
            continue
        own = train.groups[number] if number >= 0 else ParameterGroup(match="")
        decay = own.get("weight_decay", train.weight_decay) if is_decayed else 0.0
        param_group: dict[str, Any] = {"params": parameters, "weight_decay": decay}
        if uses_loraplus or train.groups:
            ratio = rate_of(own.get("lr", "1x"), train.lr) / train.lr
            param_group["lr_ratio"] = ratio * train.loraplus_lr_ratio if is_b else ratio
        param_groups.append(param_group)
    return param_groups


def _named_groups(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Return the groups as a user's function gets them: `params` are pairs of name and parameter,
    as torch.optim.Optimizer takes them, `lr` is the peak learning rate of the group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named_groups = []
    for param_group in parameter_groups(model, train):
        named = [(names[id(parameter)], parameter) for parameter in param_group["params"]]
        lr = train.lr * param_group.get("lr_ratio", 1.0)
        named_groups.append(
            {"params": named, "lr": lr, "weight_decay": param_group["weight_decay"]}
        )
    return named_groups


def _call_own(param_groups: list[dict[str, Any]], train: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the function of --optimizer makes of `_named_groups`. The schedule
    multiplies the learning rate of each of its groups.

    Raises:
        UserError: the function raises an error or returns something else; or its optimizer has not
            exactly the trained parameters, needs a closure, or has a learning rate below 0.
    """
    name = train.optimizer
    expected = dict[int, str]()
    for param_group in param_groups:
        expected |= {id(parameter): known_as for known_as, parameter in param_group["params"]}
    optimizer = load_function(name)(param_groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"--optimizer {name} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer."
        )
    ids = [
        id(parameter)
        for param_group in optimizer.param_groups
        for parameter in param_group["params"]
    ]
    missing = [known_as for number, known_as in expected.items() if number not in ids]
    if missing:
        raise UserError(
            f"--optimizer {name}: its optimizer lacks {listed(missing)}.\n"
            "Put every parameter of the groups into it, or freeze some: --groups '[{match: ..., freeze: true}]'."
        )
    if len(ids) > len(expected):
        raise UserError(
            f"--optimizer {name}: its optimizer has parameters that are not in the groups."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"--optimizer {name}: {type(optimizer).__name__} computes the loss several times per step, "
            "which is not supported. Return an optimizer whose step needs no closure."
        )
    for param_group in optimizer.param_groups:
        rate = float(param_group["lr"])
        if not 0 <= rate < math.inf:
            raise UserError(
                f"--optimizer {name}: a group has lr {rate}; expected a learning rate of at least 0."
            )
        param_group["lr_ratio"] = rate / train.lr
    return optimizer


def check_own_optimizer(model: nn.Module, train: TrainConfig) -> None:
    """With --optimizer file.py:function, call the function before weights are loaded, with
    parameters that have no memory. Raises the errors of `_call_own`."""
    if train.optimizer in OPTIMIZERS:
        return
    param_groups = _named_groups(model, train)
    with FakeTensorMode():
        for param_group in param_groups:
            empty = [
                (name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
                for name, parameter in param_group["params"]
            ]
            param_group["params"] = empty
        _call_own(param_groups, train)


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial states of trained parameters that have had no step yet.

    Optimizers of this package have the method `first_state`. Other optimizers create their states
    in a step with gradients of 0 and a learning rate of 0, which does not change the weights.

    Every parameter gets an entry in the optimizer's `state`, even an empty one. Otherwise torch's
    state-dict utilities would make such a step for an optimizer without states.
    """
    first_state = getattr(optimizer, "first_state", None)
    if first_state is None:
        _step_without_gradients(optimizer)
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            state = optimizer.state[parameter]
            if first_state is not None and not state and parameter.requires_grad:
                state.update(first_state(parameter, param_group))


def _step_without_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of the parameters that have no states. The others do not take part."""
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    without_states = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    if not without_states:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in without_states:
        parameter.grad = torch.zeros_like(parameter)
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
    optimizer.step()
    for param_group, rate in zip(optimizer.param_groups, rates, strict=True):
        param_group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Return the optimizer steps of the warm-up. A share of the steps is rounded up, as in
    Transformers. A warm-up as long as the run becomes a tenth of it, so that every config can be
    tried for a few steps."""
    steps = train.warmup_steps or math.ceil(train.warmup_ratio * total_steps)
    if steps >= total_steps:
        return total_steps // 10
    return steps


def learning_rate(train: TrainConfig, step: int, total_steps: int, epoch: int) -> float:
    """Return the learning rate of an optimizer step. It depends on the position only, so nothing
    must be saved. Warm-up and all schedules but step are those of transformers.get_scheduler:
    warm-up begins with learning rate 0. (With warmup_stable_decay and min_lr, Transformers begins
    the warm-up with min_lr.)

    Args:
        train: lr, min_lr, lr_scheduler, warmup_steps, warmup_ratio, decay_ratio, gamma.
        step: optimizer step, 0 <= step < total_steps.
        total_steps: optimizer steps of the whole run; there the decays to min_lr end.
        epoch: 0-based. lr_scheduler=step multiplies by gamma after each epoch, like torch's
            StepLR(step_size=1).
    """
    warmup = warmup_steps(train, total_steps)
    if step < warmup:
        return train.lr * step / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    decay_steps = min(math.ceil(train.decay_ratio * total_steps), total_steps - warmup)
    decayed = max(0.0, (step - total_steps + decay_steps) / decay_steps)
    # transformers.get_inverse_sqrt_schedule's timescale without a warm-up
    timescale = warmup or 10_000
    factors = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
        "step": train.gamma**epoch,
        "warmup_stable_decay": (1 + math.cos(math.pi * decayed)) / 2,
        "inverse_sqrt": math.sqrt(timescale / (step - warmup + timescale)),
    }
    return train.min_lr + (train.lr - train.min_lr) * factors[train.lr_scheduler]
