"""checkpoints/step-000100/: trained parameters and optimizer state, each rank's own shards, complete or absent.

Written under another name, synced to disk, then renamed: a directory called step-... is whole, and the newest one is
the latest checkpoint. torch.distributed.checkpoint writes the tensors; trainer.json beside them says where the run was.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from llama_ft.errors import RunFailure
from llama_ft.runtime import Runtime

TRAINER_FILE = "trainer.json"
BEST_FILE = "best.json"
FULL_DISK_BYTES = 2**20
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)


class CheckpointWriter:
    """Writes and finds the checkpoints of one run.

    Args:
        output_dir: the run's directory.
        runtime: all ranks write together.
    """

    def __init__(self, output_dir: Path, runtime: Runtime) -> None:
        self.folder = output_dir / "checkpoints"
        self._runtime = runtime
        self.last: Path | None = None
        self._kept_as_best: int | None = None  # a checkpoint that only its validation loss keeps

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Mapping[str, Any]) -> None:
        """Write checkpoints/step-<step>; does nothing if it is there. All ranks call it.

        Args:
            step: optimizer steps done.
            model: its trained parameters are written, its frozen ones are not.
            optimizer: its state is written.
            trainer: position and counters, for trainer.json.

        Raises:
            RunFailure: it could not be written; earlier checkpoints are untouched.
        """
        final = self.path(step)
        aside = self.folder / f".writing-{final.name}"
        if self.last == final:
            return
        if self._runtime.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        state = {
            "model": get_model_state_dict(model, options=TRAINED_ONLY),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=TRAINED_ONLY),
        }
        try:
            aside.mkdir(parents=True, exist_ok=True)  # on every rank: disks may be local to a node
            dcp.save(state, storage_writer=dcp.FileSystemWriter(aside, sync_files=True))
            if self._runtime.is_main:
                with open(aside / TRAINER_FILE, "w") as file:
                    json.dump({"step": step, **trainer}, file)
                    file.flush()
                    os.fsync(file.fileno())
                _sync_directory(aside)
                os.replace(aside, final)
                _sync_directory(self.folder)
        except (OSError, CheckpointException) as error:
            cause = _cause(error, shutil.disk_usage(self.folder.parent).free)
            shutil.rmtree(aside, ignore_errors=True)
            kept = f"The last complete one is {self.last}." if self.last else "There is no earlier one."
            raise RunFailure(f"{final}: the checkpoint could not be written ({cause}).\n{kept}") from error
        dist.barrier()
        self.last = final

    def save_best(
        self, step: int, loss: float, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Mapping[str, Any]
    ) -> None:
        """Save the checkpoint with the best validation loss so far and record it in checkpoints/best.json; the one kept
        as best until now is deleted once this one is complete, unless save_steps had asked for it too."""
        previous = self._kept_as_best
        self.save(step, model, optimizer, trainer)
        self._kept_as_best = step
        if self._runtime.is_main:
            aside = self.folder / f".{BEST_FILE}"
            aside.write_text(json.dumps({"checkpoint": self.path(step).name, "step": step, "eval/loss": loss}) + "\n")
            os.replace(aside, self.folder / BEST_FILE)
            if previous is not None:
                self._remove(previous)

    def keep(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Mapping[str, Any]) -> None:
        """Save a checkpoint that is not deleted when a better one comes."""
        self.save(step, model, optimizer, trainer)
        if self._kept_as_best == step:
            self._kept_as_best = None

    def _remove(self, step: int) -> None:
        """It is renamed first: a half-deleted directory must not look like a whole checkpoint."""
        doomed = self.folder / f".removing-{self.path(step).name}"
        os.replace(self.path(step), doomed)
        shutil.rmtree(doomed)

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Put the trained parameters of a checkpoint of this run back into the model, each rank its shards."""
        state = {"model": get_model_state_dict(model, options=TRAINED_ONLY)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.path(step)))
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))


def _sync_directory(folder: Path) -> None:
    """Make a directory's entries durable, as fsync of the files alone does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: OSError | CheckpointException, free_bytes: int) -> str:
    """The innermost reason: torch wraps a full disk in a CheckpointException over all ranks, and its archive writer
    reports a position it did not expect instead."""
    if free_bytes < FULL_DISK_BYTES:
        return f"no space left on device: {free_bytes / 2**20:.1f} MiB are free"
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
