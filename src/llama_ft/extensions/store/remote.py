"""A run in an object store, as the core knows it."""

from collections.abc import Callable
from pathlib import Path

from llama_ft.checkpoint import Checkpoint, RemoteRun, SaveHooks
from llama_ft.config import CheckpointConfig
from llama_ft.extensions.store.disks import find_disks
from llama_ft.extensions.store.fetch import StoredRun, fetch_to_each_disk, find_stored, open_store
from llama_ft.extensions.store.object_store import is_uploaded
from llama_ft.extensions.store.part import UploadedRun
from llama_ft.extensions.store.uploads import Uploads
from llama_ft.run import Part
from llama_ft.runtime import Ranks


class RunInStore(RemoteRun):
    """The store of --save_to, and the one that --resume names.

    Attributes:
        store: of --save_to; None without.
        uploads: into it, once the run is open.
    """

    def __init__(self, settings: CheckpointConfig, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.store = open_store(settings, ranks)
        self.uploads: Uploads | None = None
        self._directory: Path | None = None
        find_disks(settings, ranks)

    def checkpoints(self) -> StoredRun | None:
        """See RemoteRun."""
        return find_stored(self.settings, self.store, self.ranks)

    def final_model(self, step: int) -> str | None:
        """See RemoteRun."""
        if self.store is None or not is_uploaded(self.store, step):
            return None
        return f"{self.store.url}/model"

    def open(self, directory: Path, resumed: Checkpoint | None) -> None:
        """See RemoteRun."""
        self._directory = directory
        if self.store is not None:
            step = resumed.step if resumed is not None else 0
            keep_last = self.settings.keep_last
            self.uploads = Uploads(self.store, directory, keep_last, step, self.ranks)

    def reopen(self, resumed: Checkpoint) -> None:
        """See RemoteRun."""
        if self.ranks.broadcast_from_rank0(lambda: self.final_model(resumed.step)) is None:
            self.open(resumed.run, resumed)

    def complete(self) -> None:
        """See RemoteRun."""
        if self.uploads is not None:
            self.uploads.add_missing()
            self.uploads.finish()
            self.uploads.put_model()

    def take_newer(
        self, resumed: Checkpoint | None, find: Callable[[], Checkpoint | None]
    ) -> Checkpoint | None:
        """See RemoteRun."""
        return resumed if self.uploads is None else self.uploads.take_newer(resumed, find)

    def hooks(self) -> SaveHooks:
        """See RemoteRun."""
        return SaveHooks() if self.uploads is None else self.uploads.hooks()

    def parts(self) -> list[Part]:
        """See RemoteRun."""
        return [] if self.uploads is None else [UploadedRun(self.uploads)]

    def fetch(self, step: int) -> None:
        """See RemoteRun."""
        if self.store is not None and self._directory is not None:
            fetch_to_each_disk(self.store, self._directory, step, self.ranks)

    def put_outcome(self, step: int, has_log: bool) -> None:
        """See RemoteRun."""
        if self.uploads is not None:
            self.uploads.put_outcome(step, has_log)
