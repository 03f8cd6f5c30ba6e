"""AdamW with 8-bit states on sharded parameters."""

from typing import Any

from torch import Tensor, float32, uint8
from torch.nn.functional import pad

from llama_ft.training.optimizers.sharded_optimizer import (
    ShardedOptimizer,
    ShardUpdate,
    States,
    zeros_for,
)

BLOCK = 256  # elements that share a scale; a constant of bitsandbytes' kernels
FEWEST = 4096  # smaller parameters keep fp32 states, as in bitsandbytes
NARROWEST = 64  # narrower parameters (LoRA's B) do, too: they would be mostly padding
# elements per kernel call: the CPU kernel has fp32 temporaries, the CUDA kernel counts in int32
PIECE = 2**24


class AdamW8bit(ShardedOptimizer):
    """bitsandbytes' 8-bit AdamW, with about 2 bytes of state per parameter. Its kernels get a
    rank's local rows. Rows are padded with zeros to whole blocks, so codes and scales [rows, blocks
    per row] are sharded like the parameter, and the result does not depend on the number of ranks.

    Source: https://arxiv.org/abs/2110.02861; bitsandbytes/optim/optimizer.py, Optimizer2State.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        from bitsandbytes.functional import create_dynamic_map

        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)
        self._codes = (create_dynamic_map(signed=True), create_dynamic_map(signed=False))
        # Padding has these codes, so that it decodes to states of 0.
        self._zero_codes = [int((codes == 0).nonzero()) for codes in self._codes]

    def new_state(self, parameter: Tensor) -> States:
        shape = tuple(parameter.shape)
        is_narrow = parameter.ndim < 2 or shape[-1] < NARROWEST
        if is_narrow or parameter.numel() < FEWEST:
            return {
                "exp_avg": zeros_for(parameter, shape, float32),
                "exp_avg_sq": zeros_for(parameter, shape, float32),
            }
        blocks_per_row = -(-shape[-1] // BLOCK)
        scales = (*shape[:-1], blocks_per_row)
        return {
            "exp_avg": zeros_for(parameter, shape, uint8),
            "exp_avg_sq": zeros_for(parameter, shape, uint8),
            "absmax": zeros_for(parameter, scales, float32),
            "absmax_sq": zeros_for(parameter, scales, float32),
        }

    def update(self, shard: ShardUpdate) -> None:
        """See `ShardedOptimizer`."""
        if shard.weight.numel() == 0:
            return
        if "absmax" in shard.states:
            self._update_in_8_bits(shard)
        else:
            _update_in_32_bits(shard)

    def _update_in_8_bits(self, shard: ShardUpdate) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        states = shard.states
        beta1, beta2 = shard.param_group["betas"]
        device = shard.weight.device
        signed, unsigned = (codes.to(device) for codes in self._codes)
        self._codes = (signed, unsigned)
        width = shard.weight.shape[-1]
        padding = -width % BLOCK
        rows_at_once = max(1, PIECE // (width + padding))
        tensors = [
            shard.gradient,
            shard.weight,
            states["exp_avg"],
            states["exp_avg_sq"],
            states["absmax"],
            states["absmax_sq"],
        ]
        pieces = [_pieces(tensor, rows_at_once) for tensor in tensors]
        fillers = (0, 0, *self._zero_codes)
        for *rows, absmax, absmax_sq in zip(*pieces, strict=True):
            padded = rows
            if padding:
                padded = [
                    pad(plain, (0, padding), value=filler)
                    for plain, filler in zip(rows, fillers, strict=True)
                ]
            gradient, weight, mean, square = padded
            optimizer_update_8bit_blockwise(
                "adam",
                g=gradient,
                p=weight,
                state1=mean,
                state2=square,
                beta1=beta1,
                beta2=beta2,
                beta3=0.0,  # beta3 and alpha are AdEMAMix's
                alpha=0.0,
                eps=shard.param_group["eps"],
                step=shard.step,
                lr=shard.param_group["lr"],
                qmap1=signed,
                qmap2=unsigned,
                absmax1=absmax.view(-1),
                absmax2=absmax_sq.view(-1),
                weight_decay=shard.param_group["weight_decay"],
            )
            if padding:  # the kernel has changed padded copies of weight, mean and square
                for plain, changed in zip(rows[1:], padded[1:], strict=True):
                    plain.copy_(changed[:, :width])


def _pieces(tensor: Tensor, rows_at_once: int) -> tuple[Tensor, ...]:
    """Return views of a few rows each; stacked matrices (experts) become one."""
    return tensor.view(-1, tensor.shape[-1]).split(rows_at_once)


def _update_in_32_bits(shard: ShardUpdate) -> None:
    from bitsandbytes.functional import optimizer_update_32bit

    beta1, beta2 = shard.param_group["betas"]
    optimizer_update_32bit(
        "adam",
        g=shard.gradient,
        p=shard.weight,
        state1=shard.states["exp_avg"],
        beta1=beta1,
        eps=shard.param_group["eps"],
        step=shard.step,
        lr=shard.param_group["lr"],
        state2=shard.states["exp_avg_sq"],
        beta2=beta2,
        weight_decay=shard.param_group["weight_decay"],
    )
