"""Where built things are kept, and how a finished folder appears there: whole, or not at all."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from llama_ft.errors import UserError


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
    another process finishes first, its folder is taken and ours is thrown away.

    Args:
        target: the folder wanted.
        marker: file inside that `build` always writes; a folder that lacks it was damaged, and is built anew.
        build: fills an empty folder.

    Raises:
        UserError: the cache cannot be written.
    """
    if (target / marker).exists():
        return target
    temporary = target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{target.parent}: the cache folder cannot be written ({error.strerror}).\n"
            "The environment variable LLAMA_FT_CACHE names another place."
        ) from None
    try:
        build(temporary)
        _move_into_place(temporary, target, marker)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _move_into_place(temporary: Path, target: Path, marker: str) -> None:
    """Rename, unless a finished folder is there by now."""
    if target.exists() and not (target / marker).exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        temporary.rename(target)
    except OSError:
        if not (target / marker).exists():  # otherwise another process was faster, and its folder is as good
            raise
