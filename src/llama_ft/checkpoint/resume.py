"""Finding the checkpoint a run goes on from: the newest that is sound. And is it still the same run?"""

import dataclasses
import platform
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama_ft import __version__
from llama_ft.checkpoint.reader import (
    CHECKSUMS_FILE,
    TRAINER_FILE,
    Checkpoint,
    checkpoint_errors,
    complete_checkpoints,
    step_folder,
)
from llama_ft.config import CheckpointConfig, Config, TrainConfig
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Runtime, log

SECONDS_BETWEEN_MEETINGS = 30.0
EXACT_WITH = ("llama_ft", "torch", "transformers", "peft", "bitsandbytes")
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
    candidates, may_fall_back = runtime.broadcast_from_rank0(lambda: _candidates(settings, runtime.earlier_run))
    for folder in candidates:
        problems = _damage(folder, runtime)
        if not problems:
            checkpoint = Checkpoint(folder)
            log.info(f"Going on from {folder}, after step {checkpoint.step}")
            _tell_versions(checkpoint)
            return checkpoint
        listed = "\n".join(problems)
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
    if (folder / TRAINER_FILE).exists() or (folder / CHECKSUMS_FILE).exists():
        return [folder], False
    if not complete_checkpoints(folder):
        raise UserError(f"--resume {folder}: no checkpoint there; expected output/<run>/checkpoints/step-..., or auto.")
    return complete_checkpoints(folder), True


def _damage(folder: Path, runtime: Runtime) -> list[str]:
    """What is wrong with a checkpoint, known to all ranks. They meet every half minute: with fewer files than ranks, or
    a slow disk, nobody is to be taken for one that hangs."""
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(checkpoint_errors, folder, runtime.rank, runtime.world_size)
        while True:
            wait([mine], timeout=SECONDS_BETWEEN_MEETINGS)
            if runtime.all_gather_floats(mine.done()).all():
                break
    everyone: list[list[str]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(everyone, mine.result())
    return [line for lines in everyone for line in lines]


def _tell_versions(checkpoint: Checkpoint) -> None:
    """Bit for bit is promised with the same libraries only."""
    now, then = versions(), checkpoint.trainer["versions"]
    changed = [f"{name} {then[name]} -> {now[name]}" for name in EXACT_WITH if then.get(name) != now[name]]
    if changed:
        log.warning(
            f"{checkpoint.folder} was written with other versions ({', '.join(changed)}): the last digits may differ."
        )


def result_step(config: Config, step: int, best_step: int) -> int:
    """The step whose weights a run that ends after `step` has as its result: with early stopping `best_step`, the one
    with the best validation loss, unless that is 0."""
    takes_best = config.train.early_stopping_patience and config.checkpoint.save_model and best_step
    return best_step if takes_best else step


def open_best(step: int, run: Path, runtime: Runtime) -> Checkpoint | None:
    """The checkpoint with the best validation loss, if it is there and sound; a warning if not.

    Args:
        step: its step.
        run: the run's directory.
        runtime: all ranks call it together.
    """
    folder = step_folder(run, step)
    problems = _damage(folder, runtime)
    if problems:
        log.warning(
            f"{folder}, the best checkpoint, cannot be used: {'; '.join(problems)}. The last weights are taken."
        )
        return None
    return Checkpoint(folder)


def finished_result(resumed: Checkpoint, settings: CheckpointConfig) -> Path | None:
    """Where the result of the run is that is to be resumed, if it came to its end and nothing is to be changed."""
    own_run = settings.output_dir is None or Path(settings.output_dir).expanduser().resolve() == resumed.run.resolve()
    result = resumed.run / "model"
    newest = complete_checkpoints(resumed.run)[0].name == resumed.folder.name
    if resumed.trainer["ends_run"] and newest and own_run and not settings.resume_allow_changes and result.is_dir():
        return result
    return None


def check_steps_left(resumed: Checkpoint, total: int) -> None:
    """Refuse to go on from a step beyond the run's end, which may have been moved.

    Args:
        resumed: the checkpoint.
        total: optimizer steps of the run.
    """
    if resumed.step > total:
        raise UserError(
            f"--resume {resumed.folder}: {resumed.step} steps are done, and the run is to have {total}.\nGo on from an "
            "earlier checkpoint, or make a model of this one with recipes/export.py."
        )


def describe_run(config: Config) -> dict[str, Any]:
    """What every trainer.json says about the run: what tells it from another one, and what it was made with.

    Args:
        config: the resolved configuration.
    """
    return {"versions": versions(), "config": dataclasses.asdict(config)}


def versions() -> dict[str, str]:
    """Of this program, Python and the libraries that compute."""
    own = {"llama_ft": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}


def global_batch(settings: TrainConfig, resumed: Checkpoint | None, world_size: int) -> int:
    """Packs, or rows, of an optimizer step. A resumed run keeps its own on any number of ranks, which then have
    smaller, or more, micro-batches.

    Args:
        settings: batch_size_training and gradient_accumulation_steps.
        resumed: the checkpoint the run goes on from.
        world_size: number of ranks.

    Raises:
        UserError: the settings were changed and ask for another global batch than the resumed run's.
    """
    asked = settings.batch_size_training * settings.gradient_accumulation_steps * world_size
    if resumed is None:
        return asked
    kept = int(resumed.trainer["global_batch"])
    before = resumed.trainer["config"]["train"]
    names = ("batch_size_training", "gradient_accumulation_steps")
    unit = "packs" if resumed.trainer["config"]["data"]["batching_strategy"] == "packing" else "rows"
    if asked != kept and any(before[name] != getattr(settings, name) for name in names):
        raise UserError(
            f"--resume: {' x '.join(f'{name} {getattr(settings, name)}' for name in names)} x {world_size} ranks are "
            f"{asked} {unit} a step, and the run has had {kept}.\nLeave both as they were ({before[names[0]]} and "
            f"{before[names[1]]}): the {kept} {unit} are then shared out over the ranks there are."
        )
    return kept
