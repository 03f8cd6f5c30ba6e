"""The cache directory. A directory in it appears complete or not at all."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llama_ft.errors import RunFailure, reason

BUILDING = ".building-"
SIZES = "sizes.json"  # in each complete directory: the files that belong to it -> bytes
SECONDS_TO_GIVE_UP = 86_400.0


def cache_dir() -> Path:
    """Return the directory of the demo and of tokenized data.

    It is LLAMA_FT_CACHE, else XDG_CACHE_HOME/llama_ft, else ~/.cache/llama_ft.
    """
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama_ft"
    return Path(os.environ.get("LLAMA_FT_CACHE") or ours)


def build_once(target: Path, build: Callable[[Path], object]) -> Path:
    """Return the directory `target`. If it does not exist or lacks a file,
    `build(temporary_directory)` makes it.

    The temporary directory is next to `target` and is renamed when it is complete, so no process
    ever sees an incomplete one. If another process finishes first, its directory is used. Temporary
    directories of killed processes are deleted after a day.

    Args:
        target: the directory to return.
        build: fills an empty directory.

    Raises:
        RunFailure: the cache cannot be written, or its disk is full.
    """
    exists = target.exists()  # before the next line: another process may finish in between
    if exists and _is_complete(target):
        return target
    temporary = target.with_name(f"{BUILDING}{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        if exists:
            # another process may delete it at the same time
            shutil.rmtree(target, ignore_errors=True)
        temporary.mkdir(parents=True)
        _remove_leftovers(target.parent)
        build(temporary)
        (temporary / SIZES).write_text(json.dumps(_sizes(temporary)))
        # the files must reach the disk before the directory's new name
        for name in (*_sizes(temporary), SIZES):
            with open(temporary / name, "rb") as opened:
                os.fsync(opened.fileno())
        try:
            temporary.rename(target)
        except OSError:
            # otherwise another process was faster, and its directory is used
            if not _is_complete(target):
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
    """Delete temporary directories that have not changed for a day: the process that made them is
    gone."""
    for leftover in folder.glob(f"{BUILDING}*"):
        with suppress(OSError):  # it was just renamed, or belongs to another user
            if (
                time.time() - max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
                > SECONDS_TO_GIVE_UP
            ):
                shutil.rmtree(leftover, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the files in a directory and its subdirectories -> bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != SIZES]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _is_complete(folder: Path) -> bool:
    """Return whether a directory still has all its files: on some clusters, old files are deleted
    one by one."""
    listed = folder / SIZES
    return listed.exists() and json.loads(listed.read_bytes()).items() <= _sizes(folder).items()
