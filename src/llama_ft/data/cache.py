"""Where built things are kept, and how a finished folder appears there: whole, or not at all."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from llama_ft.errors import RunFailure, reason
from llama_ft.runtime.console import log

BUILDING, CHECKSUMS = ".building-", "checksums.json"
SECONDS_TO_GIVE_UP = 86_400.0


def cache_dir() -> Path:
    """Return the folder of the demo and of tokenized data.

    It is LLAMA_FT_CACHE, else XDG_CACHE_HOME/llama_ft, else ~/.cache/llama_ft.
    """
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama_ft"
    return Path(os.environ.get("LLAMA_FT_CACHE") or ours)


def build_once(target: Path, build: Callable[[Path], object], verify: bool = True) -> Path:
    """Return folder `target`, built by `build(temporary_folder)` when it is not there yet or is corrupted.

    The temporary folder is a sibling that is renamed when finished, so that nobody ever sees half a folder. When
    another process finishes first, its folder is taken and ours is thrown away. What killed builders have left behind
    is removed after a day.

    Args:
        target: the folder wanted.
        build: fills an empty folder.
        verify: compare the files of a finished folder with their checksums, which reads all of them.

    Raises:
        RunFailure: the cache cannot be written, or its disk is full.
    """
    corrupted = _corrupted_file(target) if verify and target.exists() else None
    if corrupted is None and target.exists():
        return target
    temporary = target.with_name(f"{BUILDING}{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        if corrupted is not None:
            log.warning(f"{target}: {corrupted} is missing or corrupted. The directory is deleted and built again.")
            shutil.rmtree(target, ignore_errors=True)  # another process may delete it at the same time
        temporary.mkdir(parents=True)
        _remove_leftovers(target.parent)
        build(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        checksums = {str(file.relative_to(temporary)): _checksum(file) for file in files}
        (temporary / CHECKSUMS).write_text(json.dumps(checksums, indent=2))
        for file in (*files, temporary / CHECKSUMS):  # a folder's name must not reach the disk before what is in it
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        try:
            temporary.rename(target)
        except OSError:
            if _corrupted_file(target):  # otherwise another process was faster, and its folder is as good
                raise
    except OSError as error:
        raise RunFailure(
            f"{target}: cannot be built: {reason(error)}. The incomplete files were removed.\n"
            "Set the environment variable LLAMA_FT_CACHE to another directory."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of builders that are gone: those unchanged for a day."""
    for leftover in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):  # its builder has just finished, or it is another user's
            if time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.iterdir())) > SECONDS_TO_GIVE_UP:
                shutil.rmtree(leftover, ignore_errors=True)


def _checksum(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()  # 6 GB/s, SHA-256: 0.9


def _corrupted_file(folder: Path) -> str | None:
    """Find a file that is not as it was written, or missing. Files that others have put there do not matter."""
    name = CHECKSUMS
    try:
        checksums = json.loads((folder / CHECKSUMS).read_bytes())
        for name, checksum in checksums.items():
            if _checksum(folder / name) != checksum:
                return name
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return name
    return None if checksums else CHECKSUMS
