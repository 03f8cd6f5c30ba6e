"""Requests for a checkpoint without a stop: SIGUSR1 to a rank, or a file `save` in the run's
directory."""

from pathlib import Path

from llama_ft.errors import reason
from llama_ft.runtime import Ranks, log

SAVE_FILE = "save"


class SaveRequests:
    """What this rank was asked for. Rank 0 looks for the file, once per step."""

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self._event = ranks.signals.save_requested
        self._file: Path | None = directory / SAVE_FILE if ranks.is_main else None

    def read(self) -> bool:
        """Return whether there was a request since the last call. The file is removed then."""
        if self._file is not None and self._file.is_file():
            try:
                self._file.unlink()
            except OSError as error:  # it would ask again after every step
                log.warning(f"{self._file} cannot be removed ({reason(error)}): it is ignored.")
                self._file = None
            else:
                self._event.set()
        is_requested = self._event.is_set()
        self._event.clear()
        return is_requested
