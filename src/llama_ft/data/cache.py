"""The cache directory. A directory in it appears complete or not at all."""

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
    """Return the directory of the demo and of tokenized data.

    It is LLAMA_FT_CACHE, else XDG_CACHE_HOME/llama_ft, else ~/.cache/llama_ft.
    """
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama_ft"
    return Path(os.environ.get("LLAMA_FT_CACHE") or ours)


def build_once(target: Path, build: Callable[[Path], object], verify: bool = True) -> Path:
    """Return the directory `target`. If it does not exist or is corrupted, `build(temporary_directory)` makes it.

    The temporary directory is next to `target` and is renamed when it is complete, so no process ever sees an
    incomplete one. If another process finishes first, its directory is used. Temporary directories of killed processes
    are deleted after a day.

    Args:
        target: the directory to return.
        build: fills an empty directory.
        verify: compare the files of an existing directory with their checksums, which reads all of them.

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
        for file in (*files, temporary / CHECKSUMS):  # the files must reach the disk before the directory's new name
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        try:
            temporary.rename(target)
        except OSError:
            if _corrupted_file(target):  # otherwise another process was faster, and its directory is used
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
    """Delete temporary directories that have not changed for a day: the process that made them is gone."""
    for leftover in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):  # it was just renamed, or belongs to another user
            if time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.iterdir())) > SECONDS_TO_GIVE_UP:
                shutil.rmtree(leftover, ignore_errors=True)


def _checksum(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()  # 6 GB/s; SHA-256 reaches 0.9 GB/s


def _corrupted_file(folder: Path) -> str | None:
    """Return a file that is missing or has a wrong checksum, or None. Additional files are ignored."""
    name = CHECKSUMS
    try:
        checksums = json.loads((folder / CHECKSUMS).read_bytes())
        for name, checksum in checksums.items():
            if _checksum(folder / name) != checksum:
                return name
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return name
    return None if checksums else CHECKSUMS
