"""The directory of a run. A new run creates it as late as possible. A run that continues another
locks it at its start, and removes it if it is rejected: a rejected run leaves nothing."""

import errno
import itertools
import json
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from llama_ft.checkpoint.reader import Checkpoint, complete_checkpoints, read_bytes, run_of, step_of
from llama_ft.config import CheckpointConfig, replaced_entries, run_entries
from llama_ft.config.data_names import is_url
from llama_ft.config.home import expanded
from llama_ft.config.objectives import PASS_FILES
from llama_ft.config.paths import (
    RUN_DIRECTORIES,
    RUN_ENTRIES,
    RUN_MARKER,
    foreign_entries,
)
from llama_ft.errors import RunFailure, UserError
from llama_ft.processes import TEMPORARY_FILE
from llama_ft.runtime import Ranks, log
from llama_ft.runtime.run_lock import RunLock, holder_is_ending

BEST_FILE = "checkpoints/best.json"
LOCK_WAIT_SECONDS = 10.0  # the ranks of a run that has just been stopped
# for a run that says that it is ending: it saves its last checkpoint, or its final model
ENDING_WAIT_SECONDS = 3600.0
SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_TRIES = 0.2
NO_LOCKS = (
    "its file system has no locks (flock), so llama_ft cannot see whether another run uses the directory. "
    "Start no second run there: the first one would stop."
)


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
        RunFailure: another run has saved a checkpoint there since this one started.
    """

    name = re.sub(r"[^\w.-]+", "-", Path(model_name).name or "model")
    moment = ranks.broadcast_from_rank0(lambda: f"{datetime.now():%Y%m%d-%H%M%S}")

    def plan() -> Path:
        default = Path("output") / f"{name}-{moment}"
        if resumed is not None and (resumed.run / RUN_MARKER).is_file():
            default = resumed.run
        return planned_directory(checkpoint, ranks) or default

    folder = ranks.on_each_disk(plan)
    was_locked = ranks.on_each_disk(lambda: ranks.lock is not None and ranks.lock.holds(folder))
    lock_directory(folder, ranks)

    def prepare() -> None:
        _set_odd_entries_aside(folder)
        _report_death(folder, ranks)
        for leftover in folder.glob(".*.tmp"):
            if TEMPORARY_FILE.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
        if resumed is not None and folder.resolve() == resumed.run.resolve():
            _set_newer_aside(resumed)
            return
        if not ranks.shares_disk and (not checkpoint.overwrite or ranks.earlier is not None):
            for path in complete_checkpoints(folder):
                set_aside(path, "was not uploaded completely")
        _keep_unseen_checkpoints(folder, checkpoint, ranks, was_locked)
        _remove_earlier_run(folder, checkpoint, ranks.earlier is not None)

    ranks.on_each_disk(prepare)
    return folder


@contextmanager
def removed_if_unused(ranks: Ranks) -> Iterator[None]:
    """Remove the directory that was created to lock it if the block raises an error before the run
    has begun: a rejected run leaves nothing."""
    try:
        yield
    except BaseException:
        if ranks.lock is not None and ranks.status is None:
            ranks.lock.remove_unused()
        raise


def planned_directory(settings: CheckpointConfig, ranks: Ranks) -> Path | None:
    """Return the run's directory, as the settings or an earlier attempt of this launch name it on
    this node; None if neither does."""
    if settings.output_dir is not None:
        return expanded(settings.output_dir)
    return ranks.earlier_run


def unfinished_directory(
    settings: CheckpointConfig, ranks: Ranks, resumed: Checkpoint | None
) -> Path | None:
    """Return the directory, locked, in which an attempt of this run may have ended before its first
    checkpoint."""
    continues = settings.resume == "auto" or ranks.earlier is not None
    return planned_directory(settings, ranks) if continues and resumed is None else None


def lock_continued_run(settings: CheckpointConfig, ranks: Ranks) -> None:
    """Lock the directory of the run that the settings continue or replace, before its checkpoints
    are listed: the run that held it may have saved one since. All ranks call it; a new run locks its
    directory when it creates it.

    Raises:
        UserError: another run has the directory, or holds files of other programs.
    """
    directory = ranks.broadcast_from_rank0(lambda: _continued_directory(settings, ranks))
    if directory is None:
        return
    directory = planned_directory(settings, ranks) or directory  # it can differ per node
    named = expanded(settings.resume or "/").resolve()
    is_own = settings.resume == "auto" or named.is_relative_to(directory.resolve())
    replaces = settings.overwrite and not is_own and ranks.earlier is None
    seen = ranks.on_each_disk(partial(complete_checkpoints, directory))
    lock_directory(directory, ranks)
    saved = ranks.on_each_disk(partial(complete_checkpoints, directory))
    new = [path for path in saved if path not in seen]
    if replaces and new:
        raise UserError(
            f"--overwrite: {new[0]} was saved while this run waited for the directory. "
            "To delete it, too, start again. To continue from it: --resume auto."
        )


def _continued_directory(settings: CheckpointConfig, ranks: Ranks) -> Path | None:
    planned = planned_directory(settings, ranks)
    if settings.resume == "auto" or ranks.earlier is not None:
        return planned
    if settings.resume is not None and not is_url(settings.resume):
        named = expanded(settings.resume)
        run = named if (named / RUN_MARKER).is_file() else run_of(named)
        is_own = planned is None or planned.resolve() == run.resolve()
        if is_own and (run / RUN_MARKER).is_file():
            return run
    replaces = planned is not None and settings.overwrite and (planned / RUN_MARKER).is_file()
    return planned if replaces else None


def lock_directory(folder: Path, ranks: Ranks) -> None:
    """Create and lock the directory of a run, on the leader of each disk, unless it is locked
    already. All ranks call it, and wait for the run that has it if that is about to end.

    Raises:
        UserError: another run has the directory, or holds files of other programs.
    """
    started = time.monotonic()
    logged = -SECONDS_BETWEEN_LINES

    def try_once() -> str:
        """Return who has the directory, or an empty text."""
        if ranks.lock is not None and ranks.lock.holds(folder):
            return ""
        _check_foreign(folder)
        lock_or_holder = RunLock.try_to_lock(folder)
        if isinstance(lock_or_holder, RunLock):
            if not lock_or_holder.is_exclusive:
                log.warning(f"{folder}: {NO_LOCKS}")
            ranks.take_lock(lock_or_holder)
            return ""
        holder = lock_or_holder
        limit = ENDING_WAIT_SECONDS if holder_is_ending(holder) else LOCK_WAIT_SECONDS
        if time.monotonic() - started > limit:
            raise UserError(f"{folder}: in use by another process ({holder}). End it.")
        return holder

    # The ranks meet after each try: the watchdog would report those that only wait.
    while holders := [holder for holder in ranks.from_each_disk(try_once).values() if holder]:
        if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
            logged = time.monotonic()
            log.info(f"{folder} is in use by another process ({holders[0]}). Waiting for its end.")
        threading.Event().wait(SECONDS_BETWEEN_TRIES)  # not time.sleep, see Ranks


def _check_foreign(folder: Path) -> None:
    foreign = foreign_entries(folder)
    if foreign:
        raise UserError(f"--output_dir {folder}: {foreign}")


def _report_death(folder: Path, ranks: Ranks) -> None:
    """Log that the earlier run in a directory, which is locked now, could not write how it ended."""
    if ranks.lock is None or not ranks.lock.is_exclusive:
        return  # it may live
    try:
        status = json.loads(read_bytes(folder / "status.json"))
        has_died = status["state"] == "running"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # missing, or corrupted
        return
    if has_died:
        log.info(
            f"The earlier run in {folder} ended without a message after step {status.get('step')}, or later: "
            "it was killed, or its machine was lost."
        )


def _keep_unseen_checkpoints(
    folder: Path, settings: CheckpointConfig, ranks: Ranks, was_locked: bool
) -> None:
    """Raise RunFailure if a run would delete complete checkpoints that it has not seen at its start.
    With --resume auto it would resume from any that it has seen."""
    is_restarted = ranks.earlier is not None
    may_remove = settings.overwrite or settings.resume == "auto" or is_restarted
    has_seen = was_locked and settings.resume != "auto" and not is_restarted
    is_link = (folder / "checkpoints").is_symlink()  # it is unlinked, and nothing is lost
    checkpoints = [] if is_link else complete_checkpoints(folder)
    if checkpoints and may_remove and not has_seen:
        raise RunFailure(
            f"{folder}: another run has saved {checkpoints[0].name} there since this one started.\n"
            "Nothing was deleted. To continue from it, start again with --resume auto."
        )


def _remove_earlier_run(folder: Path, settings: CheckpointConfig, is_restarted: bool) -> None:
    """Delete the files of an earlier run. They are checked again, because another run may have
    started since the settings were checked. With --resume auto, delete a run that ended before its
    first checkpoint, but not what it has computed before step 1: this run uses it."""
    may_remove = settings.overwrite or is_restarted
    if (
        run_entries(folder)
        and not may_remove
        and (settings.resume != "auto" or (folder / "model").exists())
    ):
        raise UserError(
            f"--output_dir {folder}: already holds a run or its final model. --overwrite replaces it."
        )
    held = replaced_entries(folder)
    if is_restarted or not settings.overwrite:
        held = [path for path in held if path.name not in PASS_FILES]
    if held:
        log.info(f"Removing the previous run in {folder}: {', '.join(path.name for path in held)}")
    for path in held:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _set_odd_entries_aside(folder: Path) -> None:
    """Rename what has the name of a file of a run but is a directory, a pipe or a link to itself, and
    files with the name of a directory. A run has written none of them."""
    for name in (*RUN_ENTRIES, BEST_FILE):
        path = folder / name
        is_directory = name in RUN_DIRECTORIES
        try:
            mode = path.stat().st_mode
            is_odd = not (stat.S_ISDIR(mode) if is_directory else stat.S_ISREG(mode))
        except OSError as error:
            is_odd = error.errno == errno.ELOOP
        with suppress(OSError):  # nothing is lost with an empty directory
            if is_odd:
                path.rmdir()
                continue
        if is_odd:
            set_aside(path, f"is not a {'directory' if is_directory else 'file'}")


def _set_newer_aside(resumed: Checkpoint) -> None:
    """Rename newer checkpoints, which the resumed run will write again. Nothing is deleted."""
    newer = [path for path in complete_checkpoints(resumed.run) if step_of(path) > resumed.step]
    for path in (*newer, resumed.run / "model"):
        if path.exists():
            set_aside(path, "is newer than the checkpoint the run resumes from")


def set_aside(path: Path, why: str) -> None:
    """Rename a directory that the run will write again, and log `why`."""
    names = (path.with_name(f"set-aside-{n}-{path.name}") for n in itertools.count(1))
    target = path.rename(next(name for name in names if not name.exists()))
    log.warning(f"{path} {why}; it is kept as {target.name}.")
