"""The directory of a run. It is created as late as possible, so that a rejected run writes
nothing."""

import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from llama_ft.checkpoint.reader import Checkpoint, complete_checkpoints
from llama_ft.config import CheckpointConfig, run_entries
from llama_ft.config.paths import RUN_MARKER, foreign_entries
from llama_ft.errors import UserError
from llama_ft.processes import TEMPORARY_FILE
from llama_ft.runtime import Ranks, log

LOCK_WAIT_SECONDS = 10.0  # the ranks of a run that has just been stopped


def create_run_directory(
    checkpoint: CheckpointConfig,
    model_name: str,
    ranks: Ranks,
    resumed: Checkpoint | None = None,
) -> Path:
    """Create output_dir on rank 0, or on each disk, and return its path on all ranks. If torchrun
    has restarted the ranks, return the directory of the previous attempt.

    Args:
        checkpoint: output_dir; None: the directory of the resumed run, or
            output/<model>-<date-time>, also if the checkpoint was moved out of its run. overwrite
            deletes files of an earlier run in it, and nothing else.
        model_name: a directory or Hub name, for the default of output_dir.
        ranks: the ranks.
        resumed: the checkpoint to resume from. Newer checkpoints in the same directory are moved to
            set-aside-*.

    Raises:
        UserError: it holds a run or files of other programs, or another process is using it.
    """

    name = re.sub(r"[^\w.-]+", "-", Path(model_name).name or "model")
    moment = ranks.broadcast_from_rank0(lambda: f"{datetime.now():%Y%m%d-%H%M%S}")

    def create() -> Path:
        default = Path("output") / f"{name}-{moment}"
        if resumed is not None and (resumed.run / RUN_MARKER).is_file():
            default = resumed.run
        folder = planned_directory(checkpoint, ranks) or default
        is_own = resumed is not None and folder.resolve() == resumed.run.resolve()
        if not is_own:
            _check_foreign(folder)
        held = None if ranks.lock is None else Path(ranks.lock.name).resolve()
        if held != (folder / RUN_MARKER).resolve():  # else it was locked to fetch a checkpoint
            ranks.lock = _lock(folder)
        if ranks.lock is not None:
            _report_death(folder)
        for leftover in folder.glob(".*.tmp"):
            if TEMPORARY_FILE.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        if resumed is not None and is_own:
            _set_newer_aside(resumed)
        else:
            if not ranks.shares_disk and not checkpoint.overwrite:
                for path in complete_checkpoints(folder):
                    set_aside(path, "was not uploaded completely")
            _remove_earlier_run(
                folder, checkpoint, checkpoint.overwrite or ranks.earlier is not None
            )
        return folder

    return ranks.on_each_disk(create)


def planned_directory(settings: CheckpointConfig, ranks: Ranks) -> Path | None:
    """Return the run's directory, as the settings or an earlier attempt of this launch name it on
    this node; None if neither does."""
    if settings.output_dir is not None:
        return Path(settings.output_dir).expanduser()
    return ranks.earlier_run


def claim_directory(folder: Path, ranks: Ranks) -> None:
    """Create and lock the directory of a run, on the leader of a disk, before a checkpoint is
    fetched into it. Raises the errors of `create_run_directory`."""
    _check_foreign(folder)
    ranks.lock = _lock(folder)


def _check_foreign(folder: Path) -> None:
    foreign = foreign_entries(folder)
    if foreign:
        raise UserError(f"--output_dir {folder}: {foreign}")


def _lock(folder: Path) -> IO[str] | None:
    """Mark a directory as a run's, and lock it while this process lives. (If torchrun is killed
    with -9, its ranks live on and continue to write there.)"""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / RUN_MARKER
    if marker.is_symlink():  # it would be emptied
        raise UserError(f"{marker}: is a link. Remove it, or choose another output_dir.")
    file = open(marker, "a+")
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    is_locked = False
    while not is_locked:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                holder = marker.read_text().strip()
                raise UserError(
                    f"{folder}: in use by another process ({holder}). End it."
                ) from error
            time.sleep(0.2)
        except OSError:  # the file system has no locks
            return None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def _report_death(folder: Path) -> None:
    """Log that the earlier run in a directory, which is locked now, could not write how it ended."""
    try:
        status = json.loads((folder / "status.json").read_text())
        has_died = status["state"] == "running"
    except (OSError, ValueError, LookupError, TypeError):  # missing, or corrupted
        return
    if has_died:
        log.info(
            f"The earlier run in {folder} ended without a message after step {status.get('step')}, or later: "
            "it was killed, or its machine was lost."
        )


def _remove_earlier_run(folder: Path, settings: CheckpointConfig, may_remove: bool) -> None:
    """Delete the files of an earlier run. They are checked again, because another run may have
    started since the settings were checked. With --resume auto, delete a run that ended before its
    first checkpoint."""
    held = run_entries(folder)
    if held and not may_remove and (settings.resume != "auto" or (folder / "model").exists()):
        raise UserError(
            f"--output_dir {folder}: already holds a run or its final model. --overwrite replaces it."
        )
    if held:
        log.info(f"Removing the previous run in {folder}: {', '.join(path.name for path in held)}")
    for path in held:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _set_newer_aside(resumed: Checkpoint) -> None:
    """Rename newer checkpoints, which the resumed run will write again. Nothing is deleted."""
    newer = [
        path
        for path in complete_checkpoints(resumed.run)
        if int(path.name.removeprefix("step-")) > resumed.step
    ]
    for path in (*newer, resumed.run / "model"):
        if path.exists():
            set_aside(path, "is newer than the checkpoint the run resumes from")


def set_aside(path: Path, why: str) -> None:
    """Rename a directory that the run will write again, and log `why`."""
    names = (path.with_name(f"set-aside-{n}-{path.name}") for n in itertools.count(1))
    target = path.rename(next(name for name in names if not name.exists()))
    log.warning(f"{path} {why}; it is kept as {target.name}.")
