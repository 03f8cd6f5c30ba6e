"""What is known about one step when its weights are updated, the same on all ranks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from llama_ft.data.prefetch import StepBatches


class RankNumbers(NamedTuple):
    """Numbers of every rank in one step, float64 [ranks] unless noted."""

    tokens: torch.Tensor  # input tokens without padding
    flops: torch.Tensor  # model FLOPs for these tokens
    peak_bytes: torch.Tensor  # highest host and device memory so far, [ranks, 2]
    stop_asked: torch.Tensor  # the rank's request to stop; see StopSignals
    save_failed: torch.Tensor  # 1 if the rank could not write the pending checkpoint
    save_requested: torch.Tensor  # 1 if the rank was asked for a checkpoint; see SaveRequests
    seconds: torch.Tensor  # since the first step of this launch
    own_work: torch.Tensor  # seconds in which the rank itself worked; see OwnWork
    waited: torch.Tensor  # seconds of them in which it waited for its batches


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, and what is due after it.

    Attributes:
        batches: the step's number, its position in the epoch and this rank's micro-batches.
        numbers: of all ranks.
        is_skipped: gradients overflowed in fp16, and the weights did not change.
        is_last: no step follows: all are done, or max_train_time is over.
        time_is_up: max_train_time is over.
        is_stopping: the run was asked to stop.
        save_failed: a rank could not write the pending checkpoint.
        evaluation: the validation loss is due.
        answers: answers to the sample prompts are due.
        save: a checkpoint is due by the settings or by a request to save or to stop.
    """

    batches: StepBatches
    numbers: RankNumbers
    is_skipped: bool
    is_last: bool
    time_is_up: bool
    is_stopping: bool
    save_failed: bool
    evaluation: bool
    answers: bool
    save: bool

    @property
    def step(self) -> int:
        """Number of the step, counted from 1."""
        return self.batches.step

    @property
    def needs_loss(self) -> bool:
        """Whether the loss must be read now: it decides whether the weights may be used."""
        is_used = self.evaluation or self.answers or self.save
        return is_used or self.is_last or self.is_stopping
