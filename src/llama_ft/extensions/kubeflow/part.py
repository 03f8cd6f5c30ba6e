"""Kubeflow Trainer as a tracker of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llama_ft.extensions.kubeflow.extension import URL_VARIABLE
from llama_ft.extensions.kubeflow.tracker import KubeflowTracker
from llama_ft.run.parts import Part

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun


class KubeflowProgress(Part):
    """Gives rank 0's log a tracker that reports to the TrainJob's status."""

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        self._is_main = setup.ranks.is_main

    def opened(self, run: TrainingRun) -> None:
        """See Part."""
        if self._is_main:
            resume_step = run.resumed.step if run.resumed is not None else None
            url = os.environ[URL_VARIABLE]
            run.log.add_tracker(KubeflowTracker(url, run.batches.total_steps, resume_step))
