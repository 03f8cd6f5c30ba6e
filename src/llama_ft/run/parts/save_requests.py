"""Requests for a checkpoint without a stop: SIGUSR1 to a rank, or a file `save` in the run's
directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_ft.errors import reason
from llama_ft.run.parts.part import Part
from llama_ft.runtime import Ranks, log
from llama_ft.training import StepOutcome

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun

SAVE_FILE = "save"


class SaveRequests(Part):
    """Saves after a step if any rank was asked to. Rank 0 looks for the file, once per step."""

    def __init__(self, ranks: Ranks) -> None:
        self._event = ranks.signals.save_requested
        self._looks_for_file = ranks.is_main

    def numbers(self, run: TrainingRun) -> dict[str, float]:
        """Return whether there was a request since the last call. The file is removed then."""
        file = run.directory / SAVE_FILE
        if self._looks_for_file and file.is_file():
            try:
                file.unlink()
            except OSError as error:  # it would ask again after every step
                log.warning(f"{file} cannot be removed ({reason(error)}): it is ignored.")
                self._looks_for_file = False
            else:
                self._event.set()
        is_requested = self._event.is_set()
        self._event.clear()
        return {"save_requested": is_requested}

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Save if there was a request on any rank."""
        if outcome.numbers["save_requested"].any():
            log.info(f"A checkpoint of step {outcome.step} was requested.")
            outcome.save = True
