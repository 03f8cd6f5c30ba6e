"""Adafactor on sharded parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_ft.training.sharded_optimizer import Group, ShardedOptimizer, States, zeros_for

DECAY = -0.8
SMALLEST = torch.finfo(torch.float32).eps
SMALLEST_SCALE = 1e-3


class Adafactor(ShardedOptimizer):
    """torch.optim.Adafactor does not support DTensors. Here each rank sums over its rows, and two
    small all-reduces per parameter add the sums of the ranks that share a copy.

    Args:
        lr: maximum step relative to the root mean square of a parameter; after t steps it is at
            most 1 / sqrt(t).

    Source: https://arxiv.org/abs/1804.04235; torch/optim/_adafactor.py.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def new_state(self, parameter: Tensor) -> States:
        shape = tuple(parameter.shape)
        if parameter.ndim < 2:
            return {"variance": zeros_for(parameter, shape, torch.float32)}
        columns = (*shape[:-2], 1, shape[-1])
        return {
            "row_var": zeros_for(parameter, (*shape[:-1], 1), torch.float32),
            "col_var": zeros_for(parameter, columns, torch.float32, replicated=parameter.ndim == 2),
        }

    def update(
        self,
        parameter: Tensor,
        weight: Tensor,
        grad: Tensor,
        state: States,
        step: int,
        group: Group,
    ) -> None:
        """See `ShardedOptimizer`."""
        newest = step**DECAY
        squared = grad.float().square()
        weight_squares = weight.float().square().sum()
        if parameter.ndim == 2:
            rows = parameter.shape[0]
            state["row_var"].lerp_(squared.mean(-1, keepdim=True), newest)
            sums = torch.cat([squared.sum(0), state["row_var"].sum()[None], weight_squares[None]])
            *_, row_sum, weight_squares = sums = _add_over_shards(sums, parameter)
            state["col_var"].lerp_(sums[None, :-2] / rows, newest)
            variance = torch.mul(state["row_var"], state["col_var"], out=squared)
            variance.div_((row_sum / rows).clamp_(min=SMALLEST))
        elif parameter.ndim > 2:  # stacked experts: each matrix is whole on one rank
            state["row_var"].lerp_(squared.mean(-1, keepdim=True), newest)
            state["col_var"].lerp_(squared.mean(-2, keepdim=True), newest)
            variance = torch.mul(state["row_var"], state["col_var"], out=squared)
            variance.div_(state["row_var"].mean(-2, keepdim=True).clamp_(min=SMALLEST))
            _add_over_shards(weight_squares, parameter)
        else:
            variance = squared.copy_(state["variance"].lerp_(squared, newest))
            _add_over_shards(weight_squares, parameter)
        update = variance.clamp_(min=SMALLEST**2).rsqrt_().mul_(grad)
        update_rms = (
            _add_over_shards(update.square().sum(), parameter).div_(parameter.numel()).sqrt_()
        )
        weight_rms = weight_squares.div(parameter.numel()).sqrt_()
        size = weight_rms.clamp_(min=SMALLEST_SCALE) * min(group["lr"], step**-0.5)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(update.mul_(size / update_rms.clamp_(min=1.0)))


def _add_over_shards(sums: Tensor, parameter: Tensor) -> Tensor:
    """Sum over all rows, in place, from each rank's sums over its own rows."""
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard() and parameter.device_mesh.size(dimension) > 1:
                dist.all_reduce(sums, group=parameter.device_mesh.get_group(dimension))
    return sums
