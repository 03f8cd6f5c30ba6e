"""AdamW with states in bf16, for weights in bf16: what rounding would lose is kept."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama_ft.training.sharded_optimizer import Group, ShardedOptimizer, States, zeros_for

PIECE = 2**24  # elements computed on at once: five fp32 temporaries of 64 MiB, however large the parameter


def round_stochastically(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Write `source` (fp32) into `target` (bf16), rounded up or down at random so that the mean is exact: bf16 is the
    upper half of fp32's bits, and a uniform number added to the lower half carries with the right probability."""
    noise = torch.empty_like(source, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    noise.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    target.copy_(noise.view(torch.float32))


class AnyPrecisionAdamW(ShardedOptimizer):
    """AdamW whose two states are bf16, 4 bytes per parameter instead of 8; computed in fp32, piece by piece.

    A bf16 weight of 1 has neighbours 0.8% away, so a step of 1e-4 rounds to nothing. Here a bf16 weight is rounded
    stochastically, or with compensated summation its lost part is kept in a third state for the next step. The random
    numbers depend on the step and on the shard only: copies of a shard stay equal, also after a resume.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        use_kahan_summation: compensated summation instead of stochastic rounding of bf16 weights.
        weight_decay: decoupled, as in AdamW.

    Source: AnyPrecisionAdamW (torchdistx, used by llama-recipes); https://arxiv.org/abs/2010.06192.
    """

    def __init__(self, params: Any, lr: float, use_kahan_summation: bool = False, weight_decay: float = 0.0) -> None:
        self.use_kahan_summation = use_kahan_summation
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})
        self._generators: dict[torch.device, torch.Generator] = {}

    def new_state(self, parameter: Tensor) -> States:
        names = ["exp_avg", "exp_avg_sq"]
        if self.use_kahan_summation and parameter.dtype == torch.bfloat16:
            names.append("compensation")
        return {name: zeros_for(parameter, tuple(parameter.shape), torch.bfloat16) for name in names}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._generators.clear()  # seeded anew by the first parameter on each device
        super().step()

    def update(self, parameter: Tensor, weight: Tensor, grad: Tensor, state: States, step: int, group: Group) -> None:
        """See `ShardedOptimizer`."""
        if weight.device not in self._generators:
            seed = step * 2**24 + _shard_number(parameter)
            self._generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
        generator = self._generators[weight.device]
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        tensors = {"weight": weight, "gradient": grad, **{k: v for k, v in state.items() if k != "step"}}
        for pieces in zip(*(tensor.view(-1).split(PIECE) for tensor in tensors.values()), strict=True):
            piece = dict(zip(tensors, pieces, strict=True))
            slope = piece["gradient"].float()
            mean = piece["exp_avg"].float().lerp_(slope, 1 - beta1)
            square = piece["exp_avg_sq"].float().mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            exact = piece["weight"].float()  # the weight itself where it is fp32
            if "compensation" in piece:
                exact.add_(piece["compensation"])
            exact.mul_(1 - lr * group["weight_decay"])
            exact.addcdiv_(mean, (square / correction2).sqrt_().add_(eps), value=-lr / correction1)
            round_stochastically(piece["exp_avg"], mean, generator)
            round_stochastically(piece["exp_avg_sq"], square, generator)
            if "compensation" in piece:
                piece["weight"].copy_(exact)
                piece["compensation"].copy_(exact.sub_(piece["weight"]))
            elif piece["weight"].dtype == torch.bfloat16:
                round_stochastically(piece["weight"], exact, generator)


def _shard_number(parameter: Tensor) -> int:
    """Which of its shards this rank has: the same on ranks that hold copies of it."""
    if not isinstance(parameter, DTensor):
        return 0
    number = 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            number = number * parameter.device_mesh.size(dimension) + parameter.device_mesh.get_local_rank(dimension)
    return number
