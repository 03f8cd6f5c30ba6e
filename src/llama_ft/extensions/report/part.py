"""Facts for report.html."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from llama_ft import observe
from llama_ft.run import Part

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun


class ReportFacts(Part):
    """Keeps facts for report.html: hardware, data, attempts and FSDP units."""

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        self._layout = setup.layout

    def opened(self, run: TrainingRun) -> None:
        """See Part."""
        run.facts.add(
            environment=observe.environment(run.description["versions"], self._layout),
            data=run.dataset.facts(),
            attempts=run.description["attempts"],
            total_steps=run.batches.total_steps,
            units=[dataclasses.asdict(unit) for unit in run.built.sharding.units],
        )
