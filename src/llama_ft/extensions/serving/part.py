"""A line about an adapter at the end of its run: how vLLM serves it, or what it would ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llama_ft.errors import UserError
from llama_ft.extensions.serving.hand_over import adapter_line
from llama_ft.run.parts import Part
from llama_ft.runtime import log

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun


class ServingLine(Part):
    """Adds the line to the summary of a run with an adapter. Nothing is written."""

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        self._is_main = setup.ranks.is_main
        self._has_line = inputs.config.peft.use_peft

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """See Part."""
        is_wanted = self._is_main and self._has_line and not run.built.has_score
        if how == "stopped" or not is_wanted:
            return
        name = run.config.model.model_name
        if name == "demo":
            name = str(run.built.folder)
        try:
            line = adapter_line(run.directory / "model", name, run.built.folder)
        except UserError as error:  # the adapter is written and complete
            log.warning(str(error))
        else:
            run.summary_lines.append(line)
