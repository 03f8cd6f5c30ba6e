"""torch's CUDA memory snapshot of the first steps, for --memory_snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_ft.observe import SNAPSHOT_STEPS, write_snapshot
from llama_ft.run.parts.part import Part
from llama_ft.runtime import log
from llama_ft.training import StepOutcome

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class MemorySnapshot(Part):
    """Writes the snapshot after the third step of this launch, or after the last one."""

    def __init__(self) -> None:
        self._steps = 0

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Count a step, and write the snapshot if it is the one."""
        self._steps += 1
        is_last = outcome.step == run.batches.total_steps
        if self._steps == SNAPSHOT_STEPS or (self._steps < SNAPSHOT_STEPS and is_last):
            file = write_snapshot(run.directory, run.ranks.rank, f"step-{outcome.step}")
            log.info(f"Memory snapshot: {file}")
