"""The parts of the recipe's `train_step`: micro-batches, gradients over ranks, clipping, what a failed
step must not update, and the outcome."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from llama_ft.config import Config, TrainConfig
from llama_ft.data import Batch
from llama_ft.data.batches.prefetch import StepBatches
from llama_ft.errors import RunFailure
from llama_ft.models import BuiltModel
from llama_ft.models.adapters.pissa import clear_frozen_half
from llama_ft.models.base.shards import ShardGroup, local_shard
from llama_ft.models.sharding.fsdp import sum_over_replicas
from llama_ft.phases import NULL_MONITOR, PhaseMonitor
from llama_ft.runtime import Ranks
from llama_ft.training.objectives.base import LossSum, logged_means
from llama_ft.training.train_state import LossScale

MICRO_BATCHES_NAMED = 8


class LoopState:
    """What a step needs of the training loop and of the steps before it.

    Args:
        config: gradient clipping, and how gradients are accumulated.
        scale: of the loss in fp16; its factor is 1 for other precisions.
        device: where the model computes; None in a plan: tensors have no values, and no step fails.
        memory: informed when a phase of a step begins.

    Attributes:
        reduce_last_only: keep unsharded gradients until the last micro-batch and reduce them once.
            Right for LoRA, whose gradients are small; in full fine-tuning it keeps a whole model's
            gradients on every rank, so there every micro-batch is reduced into the shards.
    """

    def __init__(
        self,
        config: Config,
        scale: LossScale,
        device: torch.device | None,
        memory: PhaseMonitor = NULL_MONITOR,
    ) -> None:
        self.settings = config.train
        self.reduce_last_only = config.peft.use_peft or config.train.accumulate_unsharded
        self.scale = scale
        self.memory = memory
        self._failed = None if device is None else torch.zeros((), device=device)

    def update_loss_scale(self, outcome: "StepOutcome") -> bool:
        """In fp16, adapt the loss scale to the gradient norm of a step; this waits for the device.
        Return whether to skip the step because its gradients overflowed."""
        if not self.scale.is_used or self._failed is None:
            return False
        loss, norm = outcome.read()
        return self.scale.update(outcome.step, loss, norm)

    def failed_so_far(self, outcome: "StepOutcome") -> torch.Tensor | None:
        """Return, on the device, not 0 if the weights must not be updated: this step or an earlier
        one has a loss or a gradient norm that is not finite. A skipped step does not count for
        later ones."""
        if self._failed is None:
            return None
        if outcome.is_skipped:
            return outcome.failed
        self._failed = torch.maximum(self._failed, outcome.failed)
        return self._failed


def micro_batches(
    built: BuiltModel, step: StepBatches, loop: LoopState, ranks: Ranks
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of a step, for a forward and a backward pass each, and set how
    FSDP reduces gradients in the backward pass: each time into the shards (or only the last time),
    and the last time over copies of the model (DDP, HYBRID_SHARD).

    Args:
        built: the sharded model.
        step: every rank must have the same number of micro-batches.
        loop: see `LoopState.reduce_last_only`.
        ranks: the ranks.
    """
    sharded = cast(FSDPModule, built.model)  # fully_shard has changed its class
    for number, batch in enumerate(step.batches):
        is_last = number == len(step.batches) - 1
        sharded.set_requires_gradient_sync(is_last or not loop.reduce_last_only)
        # copies of the model (replicate) need the sum only once
        sharded.set_requires_all_reduce(is_last)
        for module in built.sharding.kept_unsharded:
            cast(FSDPModule, module).set_reshard_after_backward(is_last, recurse=False)
        yield batch
    sum_over_replicas(built.model, ranks.mesh)


@dataclass(eq=False)
class StepOutcome:
    """One optimizer step: what it has computed, and what is due after it.

    The loss and the gradient norm are on the device at once. Reading them on the host waits for the
    device, so a training loop reads them after the next step was queued.

    Attributes:
        batches: the step's number, its position in the epoch and this rank's micro-batches.
        losses: of this rank's micro-batches, without gradient.
        count: losses that are summed in the global batch.
        sums: over all ranks, float64 [2 + logged + largest]: sum of the losses, L2 norm of the
            gradients, the sums that `losses` log, and the largest of other numbers.
        failed: float32 scalar on the device: 1 if the loss or the norm is not finite.
        is_skipped: gradients overflowed in fp16, and the weights did not change.

    `TrainingRun.end_step` sets the others, equal on all ranks:
        numbers: of all ranks by name, float64 [ranks].
        metrics: known values; `read_loss_or_stop` adds the loss and the norm.
        is_last: no step follows: all are done, or max_train_time is over.
        time_is_up: max_train_time is over.
        end_reason: why a part of the run has set `is_last`, for the log.
        is_stopping: the run was asked to stop.
        save_failed: a rank could not write the pending checkpoint.
        evaluation: the validation loss is due.
        answers: answers to the sample prompts are due.
        save: a checkpoint is due by the settings or by a request to save or to stop.
        is_logged: the metrics are due by log_steps, an evaluation or the last step.
    """

    batches: StepBatches
    losses: Sequence[LossSum]
    count: int
    sums: torch.Tensor
    failed: torch.Tensor = field(init=False)
    is_skipped: bool = False
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    is_last: bool = False
    time_is_up: bool = False
    end_reason: str = ""
    is_stopping: bool = False
    save_failed: bool = False
    evaluation: bool = False
    answers: bool = False
    save: bool = False
    is_logged: bool = False

    def __post_init__(self) -> None:
        sums = self.sums
        self.failed = sums[:2].isfinite().all().logical_not().float()
        self._copied = None
        if sums.is_cuda:
            self.sums = torch.empty_like(sums, device="cpu", pin_memory=True)
            self.sums.copy_(sums, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def step(self) -> int:
        """Number of the step, counted from 1."""
        return self.batches.step

    def end_early(self, reason: str) -> None:
        """Make this the last step of the run, on all ranks. `reason` is for the log."""
        self.is_last = True
        self.is_logged = True
        self.answers = False
        self.end_reason = reason

    @property
    def needs_loss(self) -> bool:
        """Whether the loss must be read now: it decides whether the weights may be used."""
        is_used = self.evaluation or self.answers or self.save
        return is_used or self.is_last or self.is_stopping

    def read(self) -> tuple[float, float]:
        """Return the mean loss and the norm. Waits until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        loss_sum, norm, *_ = self.sums.tolist()
        return loss_sum / self.count, norm

    def logged(self) -> dict[str, float]:
        """The means of the further sums and the largest numbers, as `train/<name>`; after `read`."""
        names = logged_names(self.losses)
        values = iter(self.sums[2:].tolist())
        sums = dict(zip(names, values, strict=False))
        numbers = logged_means(sums, self.count)
        numbers |= zip(largest_names(self.losses), values, strict=True)
        return {f"train/{name}": value for name, value in numbers.items()}


def logged_names(losses: Sequence[LossSum]) -> list[str]:
    """Return the names of the further sums, in the order of `StepOutcome.sums`."""
    return sorted(set().union(*[summed.logged for summed in losses]))


def largest_names(losses: Sequence[LossSum]) -> list[str]:
    """Return the names of the numbers whose largest one is logged, in the same order."""
    return sorted(losses[0].largest)


def local_gradients(built: BuiltModel, scale: LossScale, ranks: Ranks) -> list[torch.Tensor]:
    """Return this rank's part of each gradient after the backward passes, divided by the loss scale
    of fp16. Frozen parameters have none."""
    adapter = built.adapter
    if adapter is not None and adapter.trained_rank is not None:  # PiSSA
        # before the norm, in which frozen halves must not count
        clear_frozen_half(built.model, adapter.trained_rank, ShardGroup(ranks))
    gradients = [
        local_shard(parameter.grad)
        for parameter in built.model.parameters()
        if parameter.grad is not None
    ]
    if scale.is_used:
        torch._foreach_div_(gradients, scale.factor)
    return gradients


def reduce_losses_and_norm(
    losses: Sequence[LossSum], gradients: list[torch.Tensor], ranks: Ranks
) -> torch.Tensor:
    """Return `StepOutcome.sums`: the sum of the losses, the L2 norm of all gradients, further sums
    and largest numbers, over all ranks. It takes one small all-reduce and does not wait for the
    device.

    Args:
        losses: of this rank's micro-batches.
        gradients: the result of `local_gradients`.
        ranks: the ranks.
    """
    # One kernel for all gradients. Their squares are added in float64: a sum over many parameters
    # would lose small ones in float32.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    squares = torch.stack(list(norms)).double().square().sum()
    loss_sum = torch.stack([summed.loss for summed in losses]).double().sum()
    # `copies` ranks hold the same shard, and each adds its squares
    numbers = [loss_sum, squares.to(ranks.device) / ranks.shard.copies]
    for name in logged_names(losses):
        values = torch.stack([summed.logged[name] for summed in losses])
        numbers.append(values.double().sum())
    sums = torch.stack(numbers)
    names = largest_names(losses)
    if names:
        # each rank has its own column, and zeros in the others: their sum over the ranks has all
        by_rank = sums.new_zeros(len(names), ranks.world_size)
        for own, name in zip(by_rank[:, ranks.rank], names, strict=True):
            own.copy_(torch.stack([summed.largest[name] for summed in losses]).max())
        sums = torch.cat([sums, by_rank.flatten()])
    # over all ranks: the losses of their samples, and the squares of their shards
    if ranks.world_size > 1:
        dist.all_reduce(sums)
    if names:
        of_ranks = sums[len(numbers) :].view(len(names), ranks.world_size)
        sums = torch.cat([sums[: len(numbers)], of_ranks.amax(1)])
    sums[1].sqrt_()
    return sums


def clip_grad_norm(
    gradients: list[torch.Tensor], norm: torch.Tensor, settings: TrainConfig
) -> None:
    """With gradient_clipping, multiply the gradients in place so that their norm is at most its
    threshold, as torch.nn.utils.clip_grad_norm_ does. `norm` is that of all ranks."""
    if settings.gradient_clipping:
        # 1e-6 and the clamp as in clip_grad_norm_; the factor stays on the device
        factor = (settings.gradient_clipping_threshold / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.float().to(gradients[0].device))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step. A group of parameters may have a multiple of it."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group.get("lr_ratio", 1.0)


def may_update(optimizer: torch.optim.Optimizer, failed: torch.Tensor | None) -> bool:
    """Return whether to call `optimizer.step()`: not if the scalar `failed` is not 0. The host
    waits for it, unless the optimizer is fused: that gets `failed` here, as torch.amp.GradScaler
    does it, and then changes no weight or state itself."""
    if not optimizer.defaults.get("fused"):
        return failed is None or not failed.item()
    # torch would not wait for its copy to the host, where offloaded weights are
    if failed is not None:
        first = optimizer.param_groups[0]["params"][0]
        failed = failed.to(local_shard(first).device)
    optimizer.found_inf = failed  # type: ignore[attr-defined]
    return True


class PendingMetrics:
    """Steps whose loss was not read yet: on a GPU the newest one. `device`: where the model
    computes."""

    LAGGING = ("cuda",)

    def __init__(self, device: torch.device) -> None:
        self._steps: list[StepOutcome] = []
        self._lags = device.type in self.LAGGING

    def push(self, newest: StepOutcome | None) -> list[StepOutcome]:
        """Add a step. Return the steps to read now: all earlier ones, and this one if its loss is
        needed or already known. None: return all."""
        if newest is not None:
            self._steps.append(newest)
        count = len(self._steps)
        if newest is not None and self._lags and not newest.needs_loss:
            count -= 1
        ready = self._steps[:count]
        self._steps = self._steps[count:]
        return ready


def is_due(step: int, every: int, otherwise: bool) -> bool:
    """Return whether an action every `every` steps (0: never) is due after `step`, or for another
    reason."""
    return otherwise or (every > 0 and step % every == 0)


def read_loss_or_stop(
    outcome: StepOutcome, last_checkpoint: Callable[[], Path | None], ranks: Ranks
) -> None:
    """Add a step's loss and gradient norm to its metrics. If they are not finite, raise a
    RunFailure on every rank: the weights are then those before the step. `last_checkpoint` may wait
    for a pending save."""
    loss, norm = outcome.read()
    outcome.metrics["train/loss"] = loss
    outcome.metrics["train/grad_norm"] = norm
    outcome.metrics.update(outcome.logged())
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    if is_finite or outcome.is_skipped:
        return
    lines = []
    micro_batches = zip(outcome.losses, outcome.batches.batches, strict=True)
    for number, (summed, batch) in enumerate(micro_batches, start=1):
        local_loss = summed.loss.item()
        # If the loss is finite, any sample may have caused the norm.
        if math.isfinite(loss) or not math.isfinite(local_loss):
            place = f"rank {ranks.rank}, micro-batch {number}"
            lines.append(f"{place} (loss {local_loss:g}): {', '.join(batch.locations)}")
    all_lines = list(chain.from_iterable(ranks.gather(lines)))
    sample_lines = "\n".join(all_lines[:MICRO_BATCHES_NAMED])
    way_back = "No checkpoint was written yet."
    checkpoint = last_checkpoint()
    if checkpoint is not None:
        way_back = f"The last good checkpoint is {checkpoint}."
    raise RunFailure(
        f"step {outcome.step}: the loss is {loss:g} and the gradient norm {norm:g}; training cannot continue.\n"
        f"The samples:\n{sample_lines}\n{way_back} A lower --lr, --warmup_steps, "
        "--gradient_clipping or --precision fp32 can help."
    )
