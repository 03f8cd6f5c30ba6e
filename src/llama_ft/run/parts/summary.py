"""The summary at the end of a run: results, files and the commands for the next steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llama_ft import observe, runtime
from llama_ft.run.parts.part import Part

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class Summary(Part):
    """Prints the summary of a finished run on rank 0.

    Args:
        recipes: the directory of the recipes.
        started_at: time.monotonic() at the start of this launch.
    """

    def __init__(self, recipes: Path, started_at: float) -> None:
        self._recipes = recipes
        self._started_at = started_at

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """See Part."""
        if how == "stopped" or not run.ranks.is_main:
            return
        best = run.state.best
        outcome = observe.RunOutcome(
            ended=run.ended,
            seconds=time.monotonic() - self._started_at,
            best_of=best.title,
            best_value=best.value,
            best_step=best.step,
            weights_of=run.weights_of,
            leaks=run.dataset.leaks,
            has_validation=bool(run.dataset.validations),
            further_lines=tuple(run.summary_lines),
        )
        runtime.console.print(observe.summary(run.config, run.directory, self._recipes, outcome))
