"""Try the disk of --output_dir from every rank: what a run does there to be safe."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llama_ft.errors import reason
from llama_ft.processes import flush_directory
from llama_ft.runtime import Ranks


@dataclass(frozen=True)
class DiskTrial:
    """What one rank found.

    Attributes:
        problem: why the directory cannot be used by this rank; "" if it can.
        is_locked_for_others: a lock of rank 0 keeps this rank out. True on rank 0.
        free_bytes: of the disk.
        bytes_per_second: of writing a file, synced. All ranks write at the same time.
    """

    problem: str
    is_locked_for_others: bool = True
    free_bytes: int = 0
    bytes_per_second: float = 0.0


def try_disk(ranks: Ranks, output_dir: Path, nbytes: int) -> DiskTrial:
    """Try a directory, which may not exist yet. All ranks must call it together. What it creates is
    removed."""
    new = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]

    def begin() -> tuple[Path | None, str]:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".check-", dir=output_dir)).absolute(), ""
        except OSError as error:
            return None, f"cannot be written ({reason(error)})"

    folder, problem = ranks.broadcast_from_rank0(begin)
    if folder is None:
        _remove_empty(ranks, new)
        return DiskTrial(problem)
    lock = (folder / "lock").open("w") if ranks.is_main else None
    if lock is not None:
        _lock(lock.fileno())
    dist.barrier()
    try:
        trial = _try_as_rank(ranks, folder, nbytes)
        dist.barrier()
    finally:
        if lock is not None:
            lock.close()
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(ranks, new)
    return trial


def _remove_empty(ranks: Ranks, folders: list[Path]) -> None:
    """Remove directories that the trial has made, innermost first."""
    if ranks.is_main:
        for folder in folders:
            with suppress(OSError):  # not there, or in use by now
                folder.rmdir()


def _try_as_rank(ranks: Ranks, folder: Path, nbytes: int) -> DiskTrial:
    if not folder.is_dir():
        return DiskTrial("is not the same directory as on rank 0: it must be on shared storage")
    file = folder / f"rank-{ranks.rank}"
    renamed = file.with_name(f"{file.name}-complete")
    try:
        is_locked = ranks.is_main or _is_locked(folder / "lock")
        content = os.urandom(2**20)
        started = time.perf_counter()
        with file.open("wb") as output:
            for _ in range(max(1, nbytes // len(content))):
                output.write(content)
            output.flush()
            os.fsync(output.fileno())
        seconds = time.perf_counter() - started
        written = file.stat().st_size
        os.rename(file, renamed)
        flush_directory(folder)  # a checkpoint is complete once its new name is on the disk
        if renamed.stat().st_size != written:
            return DiskTrial("a renamed file has another size")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return DiskTrial(f"cannot be used ({reason(error)})")
    return DiskTrial("", is_locked, free, written / seconds)


def _lock(descriptor: int) -> bool:
    """Lock an open file. Returns False if another process has locked it, or if the file system has
    no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    """Return whether another process holds the lock. A file system without locks holds none."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
