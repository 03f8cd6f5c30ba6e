"""Where built things are kept, and how a finished folder appears there: whole, or not at all."""

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_ft.errors import RunFailure, UserError

BUILDING = ".building-"
SECONDS_TO_LOCK, SECONDS_TO_GIVE_UP = 60.0, 86_400.0


def cache_dir() -> Path:
    """Return the folder of the demo and of tokenized data.

    It is LLAMA_FT_CACHE, else XDG_CACHE_HOME/llama_ft, else ~/.cache/llama_ft.
    """
    if own := os.environ.get("LLAMA_FT_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "llama_ft"
    return Path.home() / ".cache" / "llama_ft"


def build_once(target: Path, marker: str, build: Callable[[Path], object]) -> Path:
    """Return folder `target`, built by `build(temporary_folder)` when it is not there yet.

    The temporary folder is a sibling that is renamed when finished, so that nobody ever sees half a folder. When
    another process finishes first, its folder is taken and ours is thrown away. What killed builders have left behind
    is removed.

    Args:
        target: the folder wanted.
        marker: file inside that `build` always writes; a folder that lacks it was damaged, and is built anew.
        build: fills an empty folder.

    Raises:
        UserError: the cache cannot be written.
        RunFailure: its disk is full.
    """
    if (target / marker).exists():
        return target
    temporary = target.parent / f"{BUILDING}{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{target.parent}: the cache folder cannot be written ({error.strerror}).\n"
            "The environment variable LLAMA_FT_CACHE names another place."
        ) from None
    try:
        with _locked(temporary):
            _remove_leftovers(target.parent)
            build(temporary)
            for file in temporary.iterdir():
                _sync(file)
            _move_into_place(temporary, target, marker)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = sum(file.stat().st_size for file in temporary.iterdir())
        raise RunFailure(
            f"{target.parent}: the disk is full; {written / 2**20:,.0f} MiB were written, and are removed.\n"
            "The environment variable LLAMA_FT_CACHE names another place for the cache."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold a lock on a folder that the kernel takes back from a process that is killed.

    Yields:
        False: another process has it. None: the file system knows no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours: bool | None = True
    except OSError as error:
        is_ours = False if error.errno == errno.EWOULDBLOCK else None
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of builders that are gone. Where there are no locks, it is those unchanged for a day."""
    for leftover in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):  # its builder has just finished, or it is another user's
            age = time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if age < SECONDS_TO_LOCK:
                continue
            with _locked(leftover) as is_ours:
                if is_ours or (is_ours is None and age > SECONDS_TO_GIVE_UP):
                    shutil.rmtree(leftover, ignore_errors=True)


def _sync(file: Path) -> None:
    """The name of a folder must not reach the disk before what is in it."""
    if file.is_file():
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def _move_into_place(temporary: Path, target: Path, marker: str) -> None:
    """Rename, unless a finished folder is there by now."""
    if target.exists() and not (target / marker).exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        temporary.rename(target)
    except OSError:
        if not (target / marker).exists():  # otherwise another process was faster, and its folder is as good
            raise
