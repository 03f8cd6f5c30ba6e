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

BUILDING = ".building-"
SIZES = "sizes.json"  # in each complete directory: the files that belong to it -> [bytes, xxh3]
SECONDS_TO_GIVE_UP = 86_400.0


def cache_dir() -> Path:
    """Return the directory of the demo and of tokenized data.

    It is LLAMA_FT_CACHE, else XDG_CACHE_HOME/llama_ft, else ~/.cache/llama_ft.
    """
    # An empty variable counts as not set, as the XDG Base Directory Specification says.
    if own := os.environ.get("LLAMA_FT_CACHE"):
        return Path(own)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "llama_ft"
    return Path.home() / ".cache" / "llama_ft"  # without a home, see environment.ensure_home


def build_once(target: Path, build: Callable[[Path], object], verify: bool = True) -> Path:
    """Return the directory `target`. If it does not exist or is corrupted,
    `build(temporary_directory)` makes it.

    The temporary directory is next to `target` and is renamed when it is complete, so no process
    ever sees an incomplete one. If another process finishes first, its directory is used. Temporary
    directories of killed processes are deleted after a day.

    Args:
        target: the directory to return.
        build: fills an empty directory.
        verify: compare the files of an existing directory with their checksums, which reads all of
            them. Otherwise only their sizes are compared.

    Raises:
        RunFailure: the cache cannot be written, or its disk is full.
    """
    exists = target.exists()  # before the next lines: another process may finish in between
    if exists:
        damaged = _damaged_file(target, verify)
        if damaged is None:
            return target
        log.warning(f"{target}: {damaged} is corrupted or missing. The directory is built again.")
    temporary = target.with_name(f"{BUILDING}{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        if exists:
            # another process may delete it at the same time
            shutil.rmtree(target, ignore_errors=True)
        temporary.mkdir(parents=True)
        _remove_leftovers(target.parent)
        build(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        sizes = {
            str(file.relative_to(temporary)): [file.stat().st_size, checksum(file)]
            for file in files
        }
        (temporary / SIZES).write_text(json.dumps(sizes, indent=2))
        # the files must reach the disk before the directory's new name
        for file in (*files, temporary / SIZES):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        try:
            # Atomic within a file system. It fails if `target` is there and not empty.
            temporary.rename(target)
        except OSError:
            # otherwise another process was faster, and its directory is used
            if _damaged_file(target, verify=False):
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
            # The time of a directory does not change when a file in it grows.
            paths = [leftover, *leftover.iterdir()]
            last_change = max(path.stat().st_mtime for path in paths)
            if time.time() - last_change > SECONDS_TO_GIVE_UP:
                shutil.rmtree(leftover, ignore_errors=True)


def checksum(file: Path) -> str:
    """Return a checksum of a file's content, xxh3 of 128 bits: it finds damage, not forgery."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def _damaged_file(folder: Path, verify: bool) -> str | None:
    """Return the name of a file that is missing or has changed since the directory was built, or
    None. For `verify` see `build_once`.

    Disks flip bits, and some clusters delete old files one by one. Files that were added are
    ignored.
    """
    try:
        recorded = json.loads((folder / SIZES).read_bytes())
        expected = dict[str, tuple[int, str]]()
        for name, (size, digest) in recorded.items():
            expected[str(name)] = (int(size), str(digest))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return SIZES
    for name, (size, digest) in expected.items():
        file = folder / name
        try:
            is_whole = file.stat().st_size == size
            if is_whole and verify:
                is_whole = checksum(file) == digest
        except (OSError, ValueError):  # ValueError: a corrupted name with a null byte
            is_whole = False
        if not is_whole:
            return name
    return None if expected else SIZES
