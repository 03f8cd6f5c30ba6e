"""AdamW with bf16 states for bf16 weights, without losing small updates to rounding."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_ft.runtime.one_kernel import OneKernel
from llama_ft.training.sharded_optimizer import Group, ShardedOptimizer, States, zeros_for

PIECE = 2**24  # elements per kernel call: five fp32 temporaries of 64 MiB for any parameter size
# elements; pieces are whole rows of them, so that a kernel for any number of rows can read 16 bytes
# at once
ROW = 128
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8


def round_stochastically(target: Tensor, source: Tensor, noise: Tensor) -> None:
    """Write `source` (fp32) into `target` (bf16), rounded up or down at random so that the mean is
    exact. bf16 is the upper half of fp32's bits. A uniform random number added to the lower half
    carries with the right probability. `noise` is that number minus 2**15, as int16."""
    bits = (
        noise.to(torch.int32).add_(1 << 15).add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    )
    target.copy_(bits.view(torch.float32))


def _update_piece(
    weight: Tensor, others: list[Tensor], noises: list[Tensor], factors: list[Tensor]
) -> None:
    """Update in place. Changing factors are tensors, so that a compiled kernel can be reused for
    other values."""
    (gradient, exp_avg, exp_avg_sq, *compensation), (decay, size, correction) = others, factors
    slope = gradient.float()
    mean = exp_avg.float().lerp_(slope, 1 - BETA1)
    square = exp_avg_sq.float().mul_(BETA2).addcmul_(slope, slope, value=1 - BETA2)
    del slope
    exact = weight.float()  # a view of the weight if it is fp32
    if compensation:
        exact.add_(compensation[0])
    exact.mul_(decay)
    exact.add_((mean * size).div_((square / correction).sqrt_().add_(EPS)))
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
        super().__init__(
            params, {"lr": lr, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": weight_decay}
        )
        self._generators: dict[torch.device, torch.Generator] = {}

    def new_state(self, parameter: Tensor) -> States:
        names = ["exp_avg", "exp_avg_sq"]
        if self.use_kahan_summation and parameter.dtype == torch.bfloat16:
            names.append("compensation")
        return {
            name: zeros_for(parameter, tuple(parameter.shape), torch.bfloat16) for name in names
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._generators.clear()  # the first parameter on each device seeds it again
        super().step()

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
        if weight.device not in self._generators:
            seed = step * 2**24 + _shard_number(parameter)
            self._generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
        generator = self._generators[weight.device]
        if weight.numel() == 0:
            return
        scalars = [
            1 - group["lr"] * group["weight_decay"],
            -group["lr"] / (1 - BETA1**step),
            1 - BETA2**step,
        ]
        factors = [
            torch.full((), scalar, dtype=torch.float32, device=weight.device) for scalar in scalars
        ]
        tensors = [
            weight.detach(),
            grad,
            *(value for name, value in state.items() if name != "step"),
        ]
        is_rounded = "compensation" not in state and weight.dtype == torch.bfloat16
        # A compiled kernel would use the weight before rounding, and compute a lost part of zero.
        compute = _update_piece if "compensation" in state else _update_in_one_pass
        for pieces in zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True):
            own = [piece.view(-1, ROW) if len(piece) % ROW == 0 else piece for piece in pieces]
            blank = [torch.empty_like(own[0], dtype=torch.int16) for _ in range(2 + is_rounded)]
            noises = [noise.random_(-(1 << 15), 1 << 15, generator=generator) for noise in blank]
            compute(own[0], own[1:], noises, factors)


def _shard_number(parameter: Tensor) -> int:
    """Return the index of this rank's shard: the same on ranks that hold copies of it."""
    if not isinstance(parameter, DTensor):
        return 0
    number = 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            number = number * parameter.device_mesh.size(
                dimension
            ) + parameter.device_mesh.get_local_rank(dimension)
    return number
