"""The final model in the trackers that want it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llama_ft.config import parse_duration
from llama_ft.run.parts.part import Part
from llama_ft.run.result import outcome_of

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class TrackedModel(Part):
    """Uploads the final model or adapter with the trackers that want it."""

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """See Part."""
        if how == "stopped":
            return
        run.facts.add(weights_of=run.weights_of)
        # the other ranks wait for it
        seconds = parse_duration(run.config.train.collective_timeout) / 2
        run.log.log_result(run.directory / "model", outcome_of(run), seconds)
