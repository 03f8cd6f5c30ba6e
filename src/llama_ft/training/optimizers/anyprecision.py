"""AdamW with bf16 states for bf16 weights, without losing small updates to rounding."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_ft.cpu.one_kernel import OneKernel
from llama_ft.training.optimizers.sharded_optimizer import (
    ShardedOptimizer,
    ShardUpdate,
    States,
    zeros_for,
)

PIECE = 2**24  # elements per kernel call: five fp32 temporaries of 64 MiB for any parameter size
# elements; pieces are whole rows of them, so that a kernel for any number of rows can read 16 bytes
# at once
ROW = 128
ALIGNED = 8  # int16 numbers in 16 bytes; a compiled kernel assumes that tensors start there
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8


def round_stochastically(target: Tensor, source: Tensor, noise: Tensor) -> None:
    """Write `source` (fp32) into `target` (bf16), rounded up or down at random so that the mean is
    exact. bf16 is the upper half of fp32's bits. A uniform random number added to the lower half
    carries with the right probability. `noise` is that number minus 2**15, as int16."""
    bits = noise.to(torch.int32).add_(1 << 15)  # 0 to 2**16 - 1
    bits.add_(source.view(torch.int32))
    bits.bitwise_and_(-(1 << 16))
    target.copy_(bits.view(torch.float32))


def _update_piece(
    weight: Tensor, others: list[Tensor], noises: Tensor, factors: list[Tensor]
) -> None:
    """Update in place. Changing factors are tensors, so that a compiled kernel can be reused for
    other values."""
    gradient, exp_avg, exp_avg_sq, *compensation = others
    decay, size, correction = factors
    slope = gradient.float()
    mean = exp_avg.float().lerp_(slope, 1 - BETA1)
    square = exp_avg_sq.float().mul_(BETA2)
    square.addcmul_(slope, slope, value=1 - BETA2)
    del slope  # a temporary is freed before the next one is made; see PIECE
    exact = weight.float()  # a view of the weight if it is fp32
    if compensation:
        exact.add_(compensation[0])
    exact.mul_(decay)
    denominator = (square / correction).sqrt_().add_(EPS)
    exact.add_((mean * size).div_(denominator))
    del denominator
    round_stochastically(exp_avg, mean, noises[0])
    round_stochastically(exp_avg_sq, square, noises[1])
    if compensation:
        weight.copy_(exact)
        compensation[0].copy_(exact.sub_(weight))
    elif weight.dtype == torch.bfloat16:
        round_stochastically(weight, exact, noises[2])


_update_in_one_pass = OneKernel(_update_piece)


class AnyPrecisionAdamW(ShardedOptimizer):
    """AdamW with two bf16 states, 4 bytes per parameter instead of 8. It computes in fp32, piece by
    piece.

    The neighbors of a bf16 weight of 1 are 0.8% away, so a step of 1e-4 would round to nothing.
    Here a bf16 weight is rounded stochastically; or with compensated summation, a third state keeps
    the lost part for the next step. The random numbers depend only on the step and the shard, so
    copies of a shard stay equal, also after a resume.

    Args:
        use_kahan_summation: compensated summation instead of stochastic rounding of bf16 weights.

    Source: AnyPrecisionAdamW (torchdistx, used by llama-recipes); https://arxiv.org/abs/2010.06192.
    """

    def __init__(
        self, params: Any, lr: float, use_kahan_summation: bool = False, weight_decay: float = 0.0
    ) -> None:
        self.use_kahan_summation = use_kahan_summation
        super().__init__(params, lr, weight_decay, betas=(BETA1, BETA2), eps=EPS)
        self._generators: dict[torch.device, torch.Generator] = {}

    def new_state(self, parameter: Tensor) -> States:
        names = ["exp_avg", "exp_avg_sq"]
        if self.use_kahan_summation and parameter.dtype == torch.bfloat16:
            names.append("compensation")
        shape = tuple(parameter.shape)
        return {name: zeros_for(parameter, shape, torch.bfloat16) for name in names}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._generators.clear()  # the first parameter on each device seeds it again
        super().step()

    def update(self, shard: ShardUpdate) -> None:
        """See `ShardedOptimizer`."""
        weight = shard.weight
        device = weight.device
        if device not in self._generators:
            seed = shard.step * 2**24 + _shard_number(shard.parameter)
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        generator = self._generators[device]
        if weight.numel() == 0:
            return
        lr = shard.param_group["lr"]
        scalars = [
            1 - lr * shard.param_group["weight_decay"],
            -lr / (1 - BETA1**shard.step),
            1 - BETA2**shard.step,
        ]
        options: Any = {"dtype": torch.float32, "device": device}
        factors = [torch.full((), scalar, **options) for scalar in scalars]
        has_compensation = "compensation" in shard.states
        is_rounded = weight.dtype == torch.bfloat16 and not has_compensation
        rounded = 3 if is_rounded else 2  # both states, and the weight
        # A compiled kernel would use the weight before rounding, and compute a lost part of zero.
        compute = _update_piece if has_compensation else _update_in_one_pass
        names = ("exp_avg", "exp_avg_sq", "compensation")
        states = [shard.states[name] for name in names if name in shard.states]
        tensors = [weight.detach(), shard.gradient, *states]
        flat_pieces = [tensor.view(-1).split(PIECE) for tensor in tensors]
        for flat in zip(*flat_pieces, strict=True):
            is_whole_rows = len(flat[0]) % ROW == 0
            pieces = [piece.view(-1, ROW) for piece in flat] if is_whole_rows else list(flat)
            noises = _draw_noises(pieces[0], rounded, generator)
            compute(pieces[0], pieces[1:], noises, factors)


def _draw_noises(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return uniform int16 numbers [count, *like.shape]. They are drawn as int64: CUDA uses 32
    random bits for each int16, but 64 for each int64, which makes four of them."""
    numbers = like.numel()
    aligned = -(-numbers // ALIGNED) * ALIGNED
    words = torch.empty(count * aligned // 4, dtype=torch.int64, device=like.device)
    words.random_(-(1 << 63), None, generator=generator)  # all values of int64
    parts = words.view(torch.int16).view(count, aligned)
    return parts[:, :numbers].unflatten(1, like.shape)


def _shard_number(parameter: Tensor) -> int:
    """Return the index of this rank's shard: the same on ranks that hold copies of it."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    number = 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return number
