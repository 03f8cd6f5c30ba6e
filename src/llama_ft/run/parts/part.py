"""The base class of the parts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from llama_ft.data import StepBatches
from llama_ft.training import StepOutcome

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class Part:
    """Something that writes, measures or uploads during a run. A part overrides the methods that it
    needs. A run calls those of all its parts in the order of the list, on all ranks."""

    def opened(self, run: TrainingRun) -> None:
        """Begin: the run's directory, log and writer of checkpoints are open."""

    def before_step(self, run: TrainingRun, step: StepBatches) -> None:
        """Called when the batches of a step have arrived, before its forward pass."""

    def numbers(self, run: TrainingRun) -> dict[str, float]:
        """Return numbers of this rank, after each step. All ranks must return the same names, in
        every step. `outcome.numbers` then has them of all ranks, by name."""
        return {}

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Called when the weights are updated. The loss of the step may still be unknown.

        Args:
            run: its `state` counts the step.
            outcome: what is due after the step; `outcome.save = True` on all ranks adds a
                checkpoint, and `outcome.end_early(reason)` ends the run.
            metrics: entries that are added, numbers or tensors of one number, are logged.
        """

    def step_read(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """Called when the loss of a step is in `outcome.metrics`: on a GPU mostly after the next step
        was queued, so that nothing waits for it. What a part changes there is logged."""

    def saved(self, run: TrainingRun, step: int) -> None:
        """Called when a checkpoint is complete, in the thread that writes: without collectives."""

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """Called at the end: finished: the final model is written; stopped: a request to stop has
        ended the run, and its last checkpoint is written. It is not called after an error."""


def gather_numbers(
    run: TrainingRun, own: dict[str, float], parts: Sequence[Part]
) -> dict[str, torch.Tensor]:
    """Return the numbers of all ranks by name, float64 [ranks], with one all-gather between hosts:
    the `own` ones of this rank and those of its parts."""
    numbers = dict[str, float]()
    for part in parts:
        numbers |= part.numbers(run)
    numbers |= own
    gathered = run.ranks.all_gather_floats(*numbers.values())
    return dict(zip(numbers, gathered.unbind(1), strict=True))
