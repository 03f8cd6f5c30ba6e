"""Facts for report.html."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from llama_ft import observe
from llama_ft.run.parts.part import Part

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class ReportFacts(Part):
    """Keeps facts for report.html: hardware, data, attempts and FSDP units.

    Args:
        layout: a line about the ranks and the batch size.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout

    def opened(self, run: TrainingRun) -> None:
        """See Part."""
        run.facts.add(
            environment=observe.environment(run.description["versions"], self._layout),
            data=run.dataset.facts(),
            attempts=run.description["attempts"],
            total_steps=run.batches.total_steps,
            units=[dataclasses.asdict(unit) for unit in run.built.units],
        )
