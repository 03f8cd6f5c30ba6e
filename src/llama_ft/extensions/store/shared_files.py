"""Files that the checkpoints of a run share, such as the answers that an objective has generated: a
checkpoint that is resumed on an empty disk needs them. Each is uploaded once, under its name in the
run's directory, and the commit object of a checkpoint lists those that were there.

    rollouts/000001/samples.safetensors      uploaded with the first checkpoint after it
    checkpoints/step-000002/commit.json      lists it, and so do those of later checkpoints
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from llama_ft.config.objectives import FOLDERS
from llama_ft.extensions.store.object_store import (
    ObjectStore,
    StoredFile,
    stored_file,
    with_retries,
)

LISTINGS = 10  # training replaces files meanwhile: answers by those with rewards


class _Stamp(NamedTuple):
    """What differs between a file and the one that replaces it, even within a tick of the clock: both
    exist at the same time, under other names, so their inodes differ."""

    bytes: int
    mtime_ns: int
    inode: int


class SharedFiles:
    """Those of a run. Rank 0 has them. A file that has not changed since the last checkpoint is neither
    read again nor looked for in the store.

    Args:
        store: of --save_to.
        directory: of the run.
        given_up: ends the attempts to upload.
    """

    def __init__(self, store: ObjectStore, directory: Path, given_up: threading.Event) -> None:
        self._store = store
        self._directory = directory
        self._given_up = given_up
        self._stored = dict[str, StoredFile]()
        self._stamps = dict[str, _Stamp]()  # of local files that are in the store
        self._seen = set[str]()  # in listings of the store, with their sizes
        self._put_here = set[str]()

    def add_stored(self, files: Mapping[str, StoredFile]) -> None:
        """Add files that are in the store already."""
        self._stored.update(files)

    def put(self) -> dict[str, StoredFile]:
        """Upload what the store lacks, and return all of the files. Raises errors of the store."""
        for _ in range(LISTINGS - 1):
            try:
                return self._put_all()
            except FileNotFoundError:  # one is gone since it was listed
                continue
        return self._put_all()

    def check_sizes(self, files: Mapping[str, StoredFile]) -> None:
        """Raise RuntimeError if a file is incomplete in the store."""
        new = files.keys() - self._seen
        folders = {str(PurePosixPath(name).parent) for name in new}
        if not self._seen:  # a run that resumes: one listing of all
            folders = {name.partition("/")[0] for name in new}
        sizes = dict[str, int]()
        for folder in sorted(folders):
            sizes |= self._store.sizes(folder)
        check_sizes({name: files[name] for name in new}, sizes)
        self._seen |= new

    def prune(self, commits: Iterable[Mapping[str, StoredFile]]) -> None:
        """Delete what the run has deleted since it was uploaded, and no checkpoint lists."""
        listed = {name for files in commits for name in files}
        for name in sorted(self._put_here - listed):
            if not (self._directory / name).exists():
                self._store.delete(name)
                self._put_here.discard(name)
                self._seen.discard(name)
                self._stored.pop(name, None)
                self._stamps.pop(name, None)

    def _put_all(self) -> dict[str, StoredFile]:
        files = {}
        for name in self._names():
            path = self._directory / name
            stamp = _stamp_of(path)
            if self._stamps.get(name) != stamp:
                self._put(path, name)
                self._stamps[name] = stamp  # of before: a change meanwhile is found the next time
            files[name] = self._stored[name]
        return files

    def _put(self, path: Path, name: str) -> None:
        """Upload a file, if the store has no such content under its name."""
        described = stored_file(path)
        if self._stored.get(name) == described:
            return
        self._put_here.add(name)
        self._seen.discard(name)
        self._stored.pop(name, None)  # an upload may end in the middle
        with_retries(partial(self._store.put_file, path, name), self._given_up)
        self._stored[name] = described

    def _names(self) -> Iterator[str]:
        """Yield the names of the files. Those that begin with a dot are not complete."""
        for top in FOLDERS:
            for folder, folders, files in os.walk(self._directory / top):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(files):
                    if not name.startswith("."):
                        yield str((Path(folder) / name).relative_to(self._directory))


def _stamp_of(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def check_sizes(files: Mapping[str, StoredFile], sizes: Mapping[str, int]) -> None:
    """Raise RuntimeError if a file has another size in a listing of the store."""
    for name, file in files.items():
        if sizes.get(name) != file.bytes:
            raise RuntimeError(f"{name} is incomplete in the store")


def find_missing(directory: Path, files: Mapping[str, StoredFile]) -> list[str]:
    """Return the files that a run's directory lacks or has otherwise."""
    missing = []
    for name, expected in files.items():
        path = directory / name
        if not path.is_file() or stored_file(path) != expected:
            missing.append(name)
    return missing


def put_in_place(aside: Path, names: Iterable[str], directory: Path) -> None:
    """Move fetched files into a run's directory. A folder appears there when it is complete."""
    by_folder = defaultdict[PurePosixPath, list[str]](list)
    for name in names:
        by_folder[PurePosixPath(name).parent].append(name)
    for folder, own in sorted(by_folder.items()):
        target = directory / folder
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.replace(aside / folder, target)
            continue
        for name in own:
            # an outer folder may have been moved with it
            if (aside / name).exists():
                os.replace(aside / name, directory / name)
