"""AdamW with 8-bit states on sharded parameters."""

from typing import Any

from torch import Tensor, float32, uint8
from torch.nn.functional import pad

from llama_ft.training.sharded_optimizer import Group, ShardedOptimizer, States, zeros_for

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

        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._codes = (create_dynamic_map(signed=True), create_dynamic_map(signed=False))
        self._zero_codes = tuple(int((codes == 0).nonzero()) for codes in self._codes)

    def new_state(self, parameter: Tensor) -> States:
        shape = tuple(parameter.shape)
        if parameter.ndim < 2 or parameter.numel() < FEWEST or shape[-1] < NARROWEST:
            return {
                name: zeros_for(parameter, shape, float32) for name in ("exp_avg", "exp_avg_sq")
            }
        scales = (*shape[:-1], -(-shape[-1] // BLOCK))
        return {
            "exp_avg": zeros_for(parameter, shape, uint8),
            "exp_avg_sq": zeros_for(parameter, shape, uint8),
            "absmax": zeros_for(parameter, scales, float32),
            "absmax_sq": zeros_for(parameter, scales, float32),
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
        from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

        if weight.numel() == 0:
            return
        (beta1, beta2), eps, lr, decay = (
            group["betas"],
            group["eps"],
            group["lr"],
            group["weight_decay"],
        )
        if "absmax" not in state:
            mean = state["exp_avg"]
            square = state["exp_avg_sq"]
            optimizer_update_32bit(
                "adam", grad, weight, mean, beta1, eps, step, lr, square, beta2, 0.0, 0.0, decay
            )
            return
        width = weight.shape[-1]
        padding = -width % BLOCK
        self._codes = signed, unsigned = (
            self._codes[0].to(weight.device),
            self._codes[1].to(weight.device),
        )
        fillers = (0, 0, *self._zero_codes)
        tensors = (
            grad,
            weight,
            *(state[name] for name in ("exp_avg", "exp_avg_sq", "absmax", "absmax_sq")),
        )
        rows_at_once = max(1, PIECE // (width + padding))
        pieces = zip(
            *(tensor.view(-1, tensor.shape[-1]).split(rows_at_once) for tensor in tensors),
            strict=True,
        )
        for *own, absmax, absmax_sq in pieces:
            whole = [
                pad(part, (0, padding), value=by) if padding else part
                for part, by in zip(own, fillers, strict=True)
            ]
            optimizer_update_8bit_blockwise(
                "adam",
                g=whole[0],
                p=whole[1],
                state1=whole[2],
                state2=whole[3],
                beta1=beta1,
                beta2=beta2,
                beta3=0.0,  # beta3 and alpha are AdEMAMix's
                alpha=0.0,
                eps=eps,
                step=step,
                lr=lr,
                qmap1=signed,
                qmap2=unsigned,
                absmax1=absmax.view(-1),
                absmax2=absmax_sq.view(-1),
                weight_decay=decay,
            )
            if padding:
                for target, result in zip(own[1:], whole[1:], strict=True):
                    target.copy_(result[:, :width])
