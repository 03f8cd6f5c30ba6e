"""Adafactor on sharded parameters."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_ft.training.optimizers.sharded_optimizer import (
    ShardedOptimizer,
    ShardUpdate,
    States,
    zeros_for,
)

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

    def new_state(self, parameter: Tensor) -> States:
        shape = tuple(parameter.shape)
        if parameter.ndim < 2:
            return {"variance": zeros_for(parameter, shape, torch.float32)}
        columns = (*shape[:-2], 1, shape[-1])
        return {
            "row_var": zeros_for(parameter, (*shape[:-1], 1), torch.float32),
            "col_var": zeros_for(parameter, columns, torch.float32, replicated=parameter.ndim == 2),
        }

    def update(self, shard: ShardUpdate) -> None:
        """See `ShardedOptimizer`."""
        parameter = shard.parameter
        weight = shard.weight
        states = shard.states
        newest = shard.step**DECAY  # weight of this step in the means of squared gradients
        squared = shard.gradient.float().square()
        weight_squares = weight.float().square().sum()
        if parameter.ndim == 2:
            row_means = states["row_var"].lerp_(squared.mean(-1, keepdim=True), newest)
            # One all-reduce for what this parameter needs of all rows: the columns' sums, the sum
            # of `row_var`, and the squares of the weights.
            sums = torch.cat([squared.sum(0), row_means.sum()[None], weight_squares[None]])
            _add_over_shards(sums, parameter)
            rows = parameter.shape[0]
            row_sum = sums[-2]
            weight_squares = sums[-1]
            column_means = states["col_var"].lerp_(sums[None, :-2] / rows, newest)
            variance = torch.mul(row_means, column_means, out=squared)
            variance.div_((row_sum / rows).clamp_(min=SMALLEST))
        elif parameter.ndim > 2:  # stacked experts: each matrix is whole on one rank
            row_means = states["row_var"].lerp_(squared.mean(-1, keepdim=True), newest)
            column_means = states["col_var"].lerp_(squared.mean(-2, keepdim=True), newest)
            variance = torch.mul(row_means, column_means, out=squared)
            variance.div_(row_means.mean(-2, keepdim=True).clamp_(min=SMALLEST))
            _add_over_shards(weight_squares, parameter)
        else:
            variance = squared.copy_(states["variance"].lerp_(squared, newest))
            _add_over_shards(weight_squares, parameter)
        update = variance.clamp_(min=SMALLEST**2).rsqrt_().mul_(shard.gradient)
        update_squares = _add_over_shards(update.square().sum(), parameter)
        update_rms = update_squares.div_(parameter.numel()).sqrt_()
        weight_rms = weight_squares.div(parameter.numel()).sqrt_()
        lr = shard.param_group["lr"]
        size = weight_rms.clamp_(min=SMALLEST_SCALE) * min(lr, shard.step**-0.5)
        weight.mul_(1 - lr * shard.param_group["weight_decay"])
        weight.sub_(update.mul_(size / update_rms.clamp_(min=1.0)))


def _add_over_shards(sums: Tensor, parameter: Tensor) -> Tensor:
    """Sum over all rows, in place, from each rank's sums over its own rows."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            # Replicas hold the same rows, so their sums must not be added.
            if placement.is_shard() and mesh.size(dimension) > 1:
                dist.all_reduce(sums, group=mesh.get_group(dimension))
    return sums
