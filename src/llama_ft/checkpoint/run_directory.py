"""The directory of a run, made as late as possible: a run that is refused writes nothing."""

import fcntl
import itertools
import os
import re
import shutil
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from llama_ft.checkpoint.reader import TRAINER_FILE, Checkpoint, complete_checkpoints, step_folder
from llama_ft.config import CheckpointConfig, run_entries
from llama_ft.config.paths import RUN_MARKER, foreign_entries
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime, log

SECONDS_FOR_ANOTHER_TO_END = 10.0  # the ranks of a run that was stopped a moment ago


def create_run_directory(
    checkpoint: CheckpointConfig, model_name: str, runtime: Runtime, resumed: Checkpoint | None = None
) -> Path:
    """Rank 0 creates output_dir and every rank gets its path. An attempt that torchrun has started again uses the
    directory of the one before it.

    Args:
        checkpoint: output_dir, or None for output/<model>-<date-time>, or the directory of the run that is resumed;
            overwrite removes what an earlier run wrote in it and nothing else.
        model_name: a folder or hub name, for the default.
        runtime: the ranks.
        resumed: the checkpoint the run resumes from. In its own run's directory, newer checkpoints are set aside.

    Raises:
        UserError: it holds a run or files that may be other people's, or cannot be created.
    """

    def create() -> Path:
        if runtime.earlier_run is not None:
            folder = runtime.earlier_run
        elif checkpoint.output_dir:
            folder = Path(checkpoint.output_dir).expanduser()
        elif resumed is not None:
            folder = resumed.run
        else:
            name = re.sub(r"[^\w.-]+", "-", Path(model_name).name or "model")
            folder = Path("output") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        is_own = resumed is not None and folder.resolve() == resumed.run.resolve()
        if not is_own and (foreign := foreign_entries(folder)):
            raise UserError(f"--output_dir {folder}: {foreign}")
        try:
            runtime.lock = _lock(folder)
            if runtime.explainer is not None and (end := runtime.explainer.last_end(folder)):
                log.warning(end)
            if resumed is not None and is_own:
                _set_newer_aside(resumed)
            else:
                _remove_earlier_run(folder, checkpoint, checkpoint.overwrite or folder == runtime.earlier_run)
                if resumed is not None:
                    _branch_off(resumed, folder)
        except OSError as error:
            raise UserError(f"--output_dir {folder}: cannot be written ({error.strerror}).") from error
        return folder

    return runtime.broadcast_from_rank0(create)


def _lock(folder: Path) -> IO[str] | None:
    """Mark a directory as a run's, and keep other processes out of it for as long as this one lives, whatever ends it.
    Ranks outlive a torchrun that is killed with -9, and would go on writing there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / RUN_MARKER, "a+")
    deadline = time.monotonic() + SECONDS_FOR_ANOTHER_TO_END
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip()
                raise UserError(
                    f"--output_dir {folder}: another process is at work there ({holder}). End it."
                ) from error
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _remove_earlier_run(folder: Path, settings: CheckpointConfig, may_remove: bool) -> None:
    """Remove what an earlier run wrote, looked at again: another run may have begun there since the settings were
    checked. --resume auto also starts from scratch after a run that was ended before its first checkpoint."""
    held = run_entries(folder)
    if held and not may_remove and (settings.resume != "auto" or (folder / "model").exists()):
        raise UserError(f"--output_dir {folder}: already holds a run or its result. --overwrite replaces it.")
    if held:
        log.info(f"Removing {', '.join(path.name for path in held)} of the earlier run in {folder}")
    for path in held:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _set_newer_aside(resumed: Checkpoint) -> None:
    """Rename what the resumed run will write again; nothing is deleted."""
    newer = [it for it in complete_checkpoints(resumed.run) if int(it.name.removeprefix("step-")) > resumed.step]
    for path in (*newer, resumed.run / "model"):
        if path.exists():
            names = (path.with_name(f"set-aside-{n}-{path.name}") for n in itertools.count(1))
            target = next(name for name in names if not name.exists())
            path.rename(target)
            log.warning(f"{path} is newer than the checkpoint the run resumes from; it is kept as {target.name}.")


def _branch_off(resumed: Checkpoint, folder: Path) -> None:
    """Make another directory a run of its own from the first moment: it gets what was logged, the best checkpoint and
    the one that is resumed, without copying what can be linked."""
    if (resumed.run / "metrics.jsonl").exists():
        shutil.copy(resumed.run / "metrics.jsonl", folder / "metrics.jsonl")
    best = step_folder(resumed.run, int(resumed.trainer["progress"]["best"]["step"]))
    for source in dict.fromkeys((best, resumed.folder)):
        if (source / TRAINER_FILE).exists():
            target = step_folder(folder, int(source.name.removeprefix("step-")))
            aside = target.with_name(f".writing-{target.name}")
            shutil.copytree(source, aside, copy_function=_link)
            aside.rename(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
