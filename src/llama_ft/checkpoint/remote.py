"""Checkpoints of a run in another place than its disk: nothing here, an extension brings one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from llama_ft import door
from llama_ft.checkpoint.reader import Checkpoint
from llama_ft.checkpoint.writer import SaveHooks
from llama_ft.config import CheckpointConfig
from llama_ft.runtime import Ranks


class RemoteCheckpoints(Protocol):
    """Checkpoints from which a run can resume, and the directory into which they are fetched.

    Attributes:
        directory: of the run that resumes.
        with_local: whether its local checkpoints belong to the same run, and are whole.
    """

    directory: Path
    with_local: bool

    @property
    def steps(self) -> Collection[int]:
        """The steps of the checkpoints."""

    def fetch(self, step: int, ranks: Ranks, is_resumed: bool = True) -> list[str]:
        """Fetch a checkpoint, and with `is_resumed` also the log of the run. All ranks call it.
        Return what is wrong with it, one line per file."""

    def report_without_checkpoint(self) -> None:
        """Log, on rank 0, that there is none, if an earlier run has been there. Raises RunFailure if
        there are some, but none can be used."""


class RemoteRun:
    """A run in another place than its disk. This one is of runs that are on their disk only; an
    extension has a subclass. All ranks call its methods together, unless they say otherwise.

    Args:
        settings: resume, output_dir and keep_last, and where the other place is.
        ranks: the ranks. A subclass tells them which nodes share the disk of output_dir.
    """

    def __init__(self, settings: CheckpointConfig, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks

    def checkpoints(self) -> RemoteCheckpoints | None:
        """Return those from which the run can resume; None if it resumes from none of this place."""
        return None

    def final_model(self, step: int) -> str | None:
        """Return where the final model of a run that has ended after `step` is, if it is there. One
        rank calls it."""
        return None

    def open(self, directory: Path, resumed: Checkpoint | None) -> None:
        """Begin to upload the run in a directory."""

    def reopen(self, resumed: Checkpoint) -> None:
        """Begin to upload what an ended run has not uploaded, if there is something: see `complete`."""

    def complete(self) -> None:
        """Upload what `reopen` has found."""

    def take_newer(
        self, resumed: Checkpoint | None, find: Callable[[], Checkpoint | None]
    ) -> Checkpoint | None:
        """Return `resumed`, or what `find` finds if there is a newer checkpoint than at the start."""
        return resumed

    def hooks(self) -> SaveHooks:
        """Return what a writer of checkpoints must call and ask."""
        return SaveHooks()

    def parts(self) -> list[Any]:
        """Return parts of the run, after all others but the summary."""
        return []

    def fetch(self, step: int) -> None:
        """Fetch a checkpoint of this run, of which each disk has only a part."""

    def put_outcome(self, step: int, has_log: bool) -> None:
        """Upload the log, the report and the status of a run that has ended in any way, after `step`.
        It does not raise, and each rank may call it alone. `has_log`: see `run.result.at_end`."""


def open_remote(settings: CheckpointConfig, ranks: Ranks) -> RemoteRun:
    """Return the other place of a run. All ranks call it, before anything slow starts.

    Raises:
        UserError: it cannot be used.
    """
    remote: RemoteRun = (door.remote_run(settings) or RemoteRun)(settings, ranks)
    return remote
