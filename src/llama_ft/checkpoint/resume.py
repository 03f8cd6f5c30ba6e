"""Finding the checkpoint a run goes on from: the newest that is sound. And is it still the same run?"""

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama_ft import __version__
from llama_ft.checkpoint.reader import TRAINER_FILE, Checkpoint, complete_checkpoints, damage
from llama_ft.config import CheckpointConfig, Config, TrainConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Runtime, log

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors")


def find_checkpoint(settings: CheckpointConfig, runtime: Runtime) -> Checkpoint | None:
    """The checkpoint to go on from, its files compared with their checksums, the ranks sharing the work.

    Args:
        settings: resume and output_dir. An attempt that torchrun has started again goes on with what the one before
            it wrote, whatever they say.
        runtime: all ranks call it together.

    Returns:
        None where there is nothing to go on from: no --resume, or --resume auto and no checkpoint.

    Raises:
        UserError: --resume names no checkpoint.
        RunFailure: the checkpoint it names is damaged, or all that --resume auto could take are.
    """
    candidates, may_fall_back = runtime.from_main(lambda: _candidates(settings, runtime.earlier_run))
    for folder in candidates:
        complaints = _damage(folder, runtime)
        if not complaints:
            checkpoint = Checkpoint(folder)
            log.info(f"Going on from {folder}, after step {checkpoint.step}")
            return checkpoint
        listed = "\n".join(complaints)
        if not may_fall_back:
            raise RunFailure(f"--resume {folder}: the checkpoint is damaged.\n{listed}")
        log.warning(f"{folder} is damaged and not used:\n{listed}")
    if candidates:
        raise RunFailure(
            f"--resume: every checkpoint in {candidates[0].parent} is damaged.\nAnother --output_dir begins anew."
        )
    return None


def _candidates(settings: CheckpointConfig, earlier_run: Path | None) -> tuple[list[Path], bool]:
    """The checkpoints to try in order, and whether to try the next where one is damaged."""
    if earlier_run is not None and complete_checkpoints(earlier_run):
        return complete_checkpoints(earlier_run), True
    if settings.resume is None:
        return [], True
    if settings.resume == "auto":
        return complete_checkpoints(Path(str(settings.output_dir)).expanduser()), True
    folder = Path(settings.resume).expanduser()
    if (folder / TRAINER_FILE).exists():
        return [folder], False
    if not complete_checkpoints(folder):
        raise UserError(f"--resume {folder}: no checkpoint there; expected output/<run>/checkpoints/step-..., or auto.")
    return complete_checkpoints(folder), True


def _damage(folder: Path, runtime: Runtime) -> list[str]:
    """What is wrong with a checkpoint, known to all ranks."""
    everyone: list[list[str]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(everyone, damage(folder, runtime.rank, runtime.world_size))
    return [line for lines in everyone for line in lines]


def finished_result(resumed: Checkpoint, settings: CheckpointConfig) -> Path | None:
    """Where the result of the run is that is to be resumed, if it came to its end and nothing is to be changed."""
    own_run = settings.output_dir is None or Path(settings.output_dir).expanduser().resolve() == resumed.run.resolve()
    result = resumed.run / "model"
    if resumed.trainer["ends_run"] and own_run and not settings.resume_allow_changes and result.is_dir():
        return result
    return None


def describe_run(
    config: Config, contents: Mapping[str, str], resumed: Checkpoint | None, world_size: int
) -> dict[str, Any]:
    """What every trainer.json says about the run: what tells it from another one, and what it was made with.

    Args:
        config: the resolved configuration.
        contents: model_name, dataset -> a checksum of what they hold.
        resumed: the checkpoint the run goes on from.
        world_size: number of ranks.

    Raises:
        UserError: the settings were changed and ask for another global batch than the resumed run's.
    """
    return {
        "global_batch": _global_batch(config.train, resumed, world_size),
        "contents": dict(contents),
        "versions": {"llama_ft": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
        "config": dataclasses.asdict(config),
    }


def _global_batch(settings: TrainConfig, resumed: Checkpoint | None, world_size: int) -> int:
    """Rows of an optimizer step. A resumed run keeps its own on any number of ranks, which then have smaller, or more,
    micro-batches."""
    asked = settings.batch_size_training * settings.gradient_accumulation_steps * world_size
    if resumed is None:
        return asked
    kept = int(resumed.trainer["global_batch"])
    before = resumed.trainer["config"]["train"]
    names = ("batch_size_training", "gradient_accumulation_steps")
    if asked != kept and any(before[name] != getattr(settings, name) for name in names):
        raise UserError(
            f"--resume: {' x '.join(f'{name} {getattr(settings, name)}' for name in names)} x {world_size} ranks are "
            f"{asked} rows a step, and the run has had {kept}.\nLeave both as they were ({before[names[0]]} and "
            f"{before[names[1]]}): the {kept} rows are then shared out over the ranks there are."
        )
    if asked != kept:
        log.info(f"The global batch stays at {kept} rows, shared out over {world_size} ranks")
    return kept
