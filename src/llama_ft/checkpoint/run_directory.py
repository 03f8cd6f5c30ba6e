"""The directory of a run, made as late as possible: a run that is refused writes nothing."""

import re
import shutil
from datetime import datetime
from pathlib import Path

from llama_ft.config import CheckpointConfig, run_entries
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime, log


def create_run_directory(checkpoint: CheckpointConfig, model_name: str, runtime: Runtime) -> Path:
    """Rank 0 creates output_dir and every rank gets its path.

    Args:
        checkpoint: output_dir, or None for output/<model>-<date-time>; overwrite removes what an earlier run wrote in
            it and nothing else.
        model_name: a folder or hub name, for the default.
        runtime: the ranks.

    Raises:
        UserError: it holds a run, or cannot be created.
    """
    return runtime.from_main(lambda: _create(checkpoint.output_dir, checkpoint.overwrite, model_name))


def _create(asked: str | None, overwrite: bool, model_name: str) -> Path:
    folder = Path(asked).expanduser() if asked else _default(model_name)
    held = run_entries(folder)  # looked at before anything slow began, but another run may have begun there since
    if held and not overwrite:
        raise UserError(f"--output_dir {folder}: already holds a run.\nChoose another output_dir, or --overwrite it.")
    if held:
        log.info(f"--overwrite: removing {', '.join(path.name for path in held)} of the earlier run in {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in held:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written ({error.strerror}).") from error
    return folder


def _default(model_name: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", Path(model_name).name or "model")
    return Path("output") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
