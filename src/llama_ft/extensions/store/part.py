"""Uploads to --save_to as a part of a run. They have a thread of their own, see uploads.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llama_ft.extensions.store.uploads import Uploads, upload_grace_seconds
from llama_ft.run.parts.part import Part

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


class UploadedRun(Part):
    """Uploads each checkpoint, and at the end the final model or adapter. The report and the status
    follow when they are written: see `at_end` in run/result.py."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    def opened(self, run: TrainingRun) -> None:
        """Upload the newest local checkpoint if the store lacks it."""
        self._uploads.add_missing()

    def saved(self, run: TrainingRun, step: int) -> None:
        """Upload a checkpoint."""
        self._uploads.add(step)

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """Wait for the checkpoints, and upload the final model. After a signal there is only the
        time that launchers leave."""
        seconds = None
        if run.stop is not None and run.stop.exit_code != 0:
            seconds = run.ranks.signals.seconds_left(upload_grace_seconds())
        run.writer.finish_uploads(seconds)
        if how == "finished":
            self._uploads.put_model()
            run.summary_lines.append(self._uploads.describe())
