"""One optimizer step: micro-batches in, gradients summed over ranks, weights updated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.data import Batch
from llama_ft.errors import RunFailure
from llama_ft.phases import NOBODY, PhaseWatch
from llama_ft.runtime import Runtime
from llama_ft.training.loss import token_loss_sum
from llama_ft.training.loss_scale import LossScale

MICRO_BATCHES_NAMED = 8


def accumulate_gradients(
    model: PreTrainedModel,
    micro_batches: Sequence[Batch],
    target_tokens: int,
    reduce_last_only: bool,
    device: torch.device,
    loss_scale: float = 1.0,
    watch: PhaseWatch = NOBODY,
) -> list[torch.Tensor]:
    """Forward and backward of this rank's micro-batches; gradients are those of the mean over all target tokens.

    Args:
        model: sharded; gradients are summed over ranks as its backward goes.
        micro_batches: this rank's; every rank must have equally many.
        target_tokens: of the global batch, over all ranks and micro-batches.
        reduce_last_only: keep unsharded gradients until the last micro-batch and reduce them once. Right for LoRA,
            whose gradients are small; in full fine-tuning it keeps a whole model's gradients on every rank, so there
            every micro-batch is reduced into the shards.
        device: where the model computes.
        loss_scale: gradients come out times this; see training/loss_scale.py.
        watch: is told when a forward and when a backward pass begins.

    Returns:
        The loss sum of each micro-batch, detached scalars on the device.
    """
    sharded = cast(FSDPModule, model)  # which fully_shard has made it too
    losses = []
    for number, batch in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        sharded.set_requires_gradient_sync(is_last or not reduce_last_only)
        sharded.set_requires_all_reduce(is_last)  # copies of the model (replicate) need the sum only once
        watch.enter("forward")
        loss = token_loss_sum(model, batch, device)
        watch.enter("backward")
        (loss / (target_tokens / loss_scale)).backward()
        losses.append(loss.detach())
    return losses


def gradient_norm(model: nn.Module, settings: TrainConfig, loss_scale: float = 1.0) -> float:
    """Divide all gradients by `loss_scale`; return their L2 norm over all ranks, from before they are clipped.

    As torch.nn.utils.clip_grad_norm_ does, but with gradient_clipping off they are left at that.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if loss_scale != 1.0:
        for gradient in gradients:
            gradient.div_(loss_scale)
    norm = get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if settings.gradient_clipping:
        clip_grads_with_norm_(model.parameters(), settings.gradient_clipping_threshold, norm)
    return norm.item()


def update_weights(optimizer: torch.optim.Optimizer, lr: float, skip: bool = False) -> None:
    """One optimizer step at learning rate `lr`, or none with `skip`; gradients are freed."""
    if not skip:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()


def is_due(step: int, every: int, otherwise: bool) -> bool:
    """Whether something done every so many steps (0: never) is due after `step`, or for another reason."""
    return otherwise or (every > 0 and step % every == 0)


def free_gathered(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered (the root unit, or all with SHARD_GRAD_OP)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def stop_if_not_finite(
    loss: float,
    norm: float,
    scale: LossScale,
    step: int,
    losses: Sequence[torch.Tensor],
    micro_batches: Sequence[Batch],
    last_checkpoint: Path | None,
    runtime: Runtime,
) -> bool:
    """End the run, before the weights are touched, when the loss or the gradient norm is no longer a number, unless
    gradients have only overflowed fp16.

    Args:
        loss: of the global batch, known to all ranks.
        norm: of the gradients, known to all ranks.
        scale: is adapted to the outcome.
        step: the optimizer step this would have been.
        losses: of this rank's micro-batches.
        micro_batches: to name the rows of the first that is not finite.
        last_checkpoint: to name it.
        runtime: the ranks.

    Returns:
        Whether the step is to be skipped; all ranks agree.

    Raises:
        RunFailure: on every rank, with the rows of whichever rank had them.
    """
    skip = scale.note(step, loss, norm)
    if skip or (math.isfinite(loss) and math.isfinite(norm)):
        return skip
    mine = [
        f"rank {runtime.rank}, micro-batch {number + 1} (loss {value.item():g}): {', '.join(batch.sources)}"
        for number, (value, batch) in enumerate(zip(losses, micro_batches, strict=True))
        if not math.isfinite(value.item()) or math.isfinite(loss)
    ]
    everyone: list[list[str]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(everyone, mine)
    rows = [line for lines in everyone for line in lines]
    if len(rows) > MICRO_BATCHES_NAMED:
        rows[MICRO_BATCHES_NAMED:] = [f"... and {len(rows) - MICRO_BATCHES_NAMED} more"]
    kept = f"The last good checkpoint is {last_checkpoint}." if last_checkpoint else "No checkpoint was written yet."
    raise RunFailure(
        f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; the run cannot go on.\n"
        + "The rows of this step:\n"
        + "\n".join(rows)
        + f"\n{kept} A lower --lr, --warmup_steps, --gradient_clipping or --precision fp32 help most often."
    )
