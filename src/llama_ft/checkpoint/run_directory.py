"""The directory of a run, made as late as possible: a run that is refused writes nothing."""

import itertools
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from llama_ft.checkpoint.reader import TRAINER_FILE, Checkpoint, complete_checkpoints, step_folder
from llama_ft.config import CheckpointConfig, run_entries
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime, log


def create_run_directory(
    checkpoint: CheckpointConfig,
    model_name: str,
    runtime: Runtime,
    resumed: Checkpoint | None = None,
) -> Path:
    """Rank 0 creates output_dir and every rank gets its path. An attempt that torchrun has started again takes the
    directory of the one before it.

    Args:
        checkpoint: output_dir, or None for output/<model>-<date-time>, or the directory of the run that is resumed;
            overwrite removes what an earlier run wrote in it and nothing else.
        model_name: a folder or hub name, for the default.
        runtime: the ranks.
        resumed: the checkpoint the run goes on from. In its own run's directory, newer checkpoints are set aside.

    Raises:
        UserError: it holds a run, or cannot be created.
    """
    return runtime.from_main(lambda: _create(checkpoint, model_name, resumed, runtime.earlier_run))


def _create(settings: CheckpointConfig, model_name: str, resumed: Checkpoint | None, earlier: Path | None) -> Path:
    own_run = resumed.run if resumed else None
    if earlier is not None:
        folder = earlier
    elif settings.output_dir:
        folder = Path(settings.output_dir).expanduser()
    else:
        folder = own_run or _default(model_name)
    if resumed is not None and folder.resolve() == resumed.run.resolve():
        _set_newer_aside(resumed)
        return folder
    held = run_entries(folder)  # looked at before anything slow began, but another run may have begun there since
    if held and not settings.overwrite and earlier is None:
        _check_nothing_is_lost(folder, settings)
    if held:
        reason = "--overwrite" if settings.overwrite and earlier is None else "No checkpoint to go on from"
        log.info(f"{reason}: removing {', '.join(path.name for path in held)} of the earlier run in {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in held:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        if resumed is not None:
            _branch_off(resumed, folder)
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written ({error.strerror}).") from error
    return folder


def _check_nothing_is_lost(folder: Path, settings: CheckpointConfig) -> None:
    """--resume auto begins anew in the directory of a run that was ended before its first checkpoint."""
    if settings.resume != "auto":
        raise UserError(f"--output_dir {folder}: already holds a run.\nChoose another output_dir, or --overwrite it.")
    if (folder / "model").exists():
        raise UserError(
            f"--resume auto: {folder} holds a result but no checkpoint to go on from.\nChoose another output_dir, or "
            "begin anew with --overwrite and without --resume."
        )


def _set_newer_aside(resumed: Checkpoint) -> None:
    """Give what the resumed run will write again another name; nothing is deleted."""
    newer = [it for it in complete_checkpoints(resumed.run) if int(it.name.removeprefix("step-")) > resumed.step]
    for path in (*newer, resumed.run / "model"):
        if path.exists():
            names = (path.with_name(f"set-aside-{n}-{path.name}") for n in itertools.count(1))
            target = next(name for name in names if not name.exists())
            path.rename(target)
            log.warning(f"{path} is newer than the checkpoint the run goes on from; it is kept as {target.name}.")


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


def _default(model_name: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(model_name).name or "model")
    return Path("output") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
