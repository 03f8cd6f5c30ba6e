"""Facts for report.html."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from llama_ft import observe
from llama_ft.data import StepBatches
from llama_ft.run import Part
from llama_ft.training import StepOutcome

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun


class ReportFacts(Part):
    """Keeps facts for report.html: hardware, data, attempts and FSDP units."""

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        self._layout = setup.layout
        self._has_begun = False
        self._saves = 0

    def opened(self, run: TrainingRun) -> None:
        """See Part."""
        run.facts.add(
            environment=observe.environment(run.description["versions"], self._layout),
            data=run.dataset.facts(),
            attempts=run.description["attempts"],
            total_steps=run.batches.total_steps,
            units=[dataclasses.asdict(unit) for unit in run.built.sharding.units],
        )

    def before_step(self, run: TrainingRun, step: StepBatches) -> None:
        """Note when the first step of this launch begins: `llama-ft watch` estimates the end by it."""
        if not self._has_begun:
            self._has_begun = True
            run.facts.add(training_began={"step": step.step - 1, "time": _now()})

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Keep the time of each checkpoint under its own step. metrics.jsonl has it with a later
        one, and no line follows the last checkpoint."""
        if len(run.writer.durations) > self._saves:
            self._keep_saves(run)

    def _keep_saves(self, run: TrainingRun) -> None:
        durations = dict(run.writer.durations)  # a thread adds to it
        self._saves = len(durations)
        run.facts.add(saves={str(step): list(times) for step, times in durations.items()})

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """See Part."""
        self._keep_saves(run)
        run.facts.add(ended=_now())


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S+00:00}"
