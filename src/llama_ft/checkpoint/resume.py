"""Finding the checkpoint a run resumes from: the newest valid one. And is it still the same run?"""

import dataclasses
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llama_ft import __version__
from llama_ft.checkpoint import reader
from llama_ft.checkpoint.reader import Checkpoint, checkpoint_errors, complete_checkpoints, step_folder
from llama_ft.config import CheckpointConfig, Config, TrainConfig
from llama_ft.config.messages import show, subject
from llama_ft.config.settings import SETTINGS
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Runtime, log

SECONDS_BETWEEN_MEETINGS = 30.0
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors")
BATCH_SETTINGS = ("batch_size_training", "gradient_accumulation_steps")
# Where and how fast the same thing is computed, and what is written down about it. Everything else that differs makes
# another run.
SECTIONS_THAT_MAY_DIFFER = {"fsdp", "checkpoint", "tracking", "memory", "profile"}
MAY_DIFFER = {
    "model_name", "dataset", "validation",  # the same if they hold the same
    *BATCH_SETTINGS,  # see global_batch
    "tokenizer_name", "trust_remote_code", "chat_template", "dataset_split", "dataset_format", "skip_bad_rows",
    "show_samples", "tokenize_processes", "attn_implementation", "use_liger", "compile", "device",
    "device_memory_fraction", "accumulate_unsharded", "activation_checkpointing", "activation_checkpointing_k",
    "activation_offload", "stop_after", "collective_timeout", "run_validation", "val_batch_size", "eval_steps",
    "max_eval_step", "log_steps", "sample_tokens", "early_stopping_patience", "early_stopping_min_delta",
}  # fmt: skip


def find_checkpoint(settings: CheckpointConfig, runtime: Runtime) -> Checkpoint | None:
    """The checkpoint to resume from, its files compared with their checksums, the ranks sharing the work.

    Args:
        settings: resume and output_dir; None without --resume, or with --resume auto and no checkpoint. An attempt
            that torchrun has started again resumes from what the one before it wrote, whatever they say.
        runtime: all ranks call it together.

    Raises:
        UserError: --resume names no checkpoint.
        RunFailure: the checkpoint it names is corrupted, or all that --resume auto could take are.
    """
    if not (candidates := runtime.broadcast_from_rank0(partial(_candidates, settings, runtime.earlier_run))):
        return None
    checkpoint = first_valid(candidates, partial(_shared_errors, runtime))
    log.info(f"Going on from {checkpoint.folder}, after step {checkpoint.step}")
    then, now = checkpoint.trainer["versions"], versions()
    if changed := [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]:
        log.warning(f"Other versions than the checkpoint's: {', '.join(changed)}. The last digits may differ.")
    return checkpoint


def first_valid(candidates: list[Path], errors_of: Callable[[Path], list[str]] = checkpoint_errors) -> Checkpoint:
    """Open the first checkpoint all of whose bytes are what was written; a RunFailure if all are corrupted."""
    for folder in candidates:
        if not (errors := errors_of(folder)):
            return Checkpoint(folder)
        if folder != candidates[-1]:
            log.warning("\n".join([f"{folder} is damaged and not used:", *errors]))
    raise RunFailure("\n".join([f"{folder}: damaged, and no other checkpoint is left to try.", *errors]))


def _candidates(settings: CheckpointConfig, earlier_run: Path | None) -> list[Path]:
    """The checkpoints to try in order."""
    if earlier_run is not None and complete_checkpoints(earlier_run):
        return complete_checkpoints(earlier_run)
    if settings.resume is None:
        return []
    if settings.resume == "auto":
        return complete_checkpoints(Path(str(settings.output_dir)).expanduser())
    folder = Path(settings.resume).expanduser()
    if (folder / reader.TRAINER_FILE).exists() or (folder / reader.CHECKSUMS_FILE).exists():
        return [folder]
    if not (found := complete_checkpoints(folder)):
        raise UserError(f"--resume {folder}: no checkpoint there; expected output/<run>/checkpoints/step-..., or auto.")
    return found


def _shared_errors(runtime: Runtime, folder: Path) -> list[str]:
    """What is wrong with a checkpoint, known to all ranks. They meet every half minute: with fewer files than ranks, or
    a slow disk, no rank may be taken for one that hangs."""
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(checkpoint_errors, folder, runtime.rank, runtime.world_size)
        while True:
            wait([mine], timeout=SECONDS_BETWEEN_MEETINGS)
            if runtime.all_gather_floats(mine.done()).all():
                break
    everyone: list[list[str]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(everyone, mine.result())
    return [line for lines in everyone for line in lines]


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: list[str], places: Mapping[str, str]
) -> None:
    """Refuse to resume a run with settings that would make it another one.

    Args:
        saved: what trainer.json says about the run: `config`, the resolved configuration as dicts by section, and
            `contents`, model_name, dataset, validation -> a checksum of what they hold.
        now: the same of the run that resumes; what they hold may not be known yet.
        allowed: settings that may differ all the same.
        places: dotted name -> where it was set.

    Raises:
        UserError: naming all that differ, old and new.
    """
    before, after = (
        {name: value for section in config.values() for name, value in section.items()}
        for config in (saved["config"], now["config"])
    )
    then, contents = saved["contents"], now.get("contents", {})
    by_field = {name: places[setting.dotted] for name, setting in SETTINGS.items() if setting.dotted in places}
    changed = {}
    for name, value in after.items():
        old = before.get(name, SETTINGS[name].default)
        is_other = name in contents and name in then and contents[name] != then[name]
        may_differ = name in MAY_DIFFER or SETTINGS[name].section in SECTIONS_THAT_MAY_DIFFER
        if name not in allowed and (is_other or (old != value and not may_differ)):
            was = f"was {show(old)}" if old != value else "and its content, tokenizer or chat template has changed"
            changed[name] = f"{subject(name, by_field)} is {show(value)}, {was}"
    if changed:
        heading = "--resume: this would be another run than the one that was saved:"
        allow = f"If the trained parameters stay the same, this allows it:\n--resume_allow_changes {','.join(changed)}"
        raise UserError("\n".join([heading, *changed.values(), allow]))


def result_step(config: Config, step: int, best_step: int) -> int:
    """The step whose weights a run that ends after `step` has as its result: with early stopping `best_step`, the one
    with the best validation loss, unless that is 0."""
    uses_best = config.train.early_stopping_patience and config.checkpoint.save_model and best_step
    return best_step if uses_best else step


def open_best(step: int, run: Path, runtime: Runtime) -> Checkpoint | None:
    """The checkpoint of a run's `step`, the one with the best validation loss; if it is not valid, a warning and None.
    All ranks call it together."""
    folder = step_folder(run, step)
    if not (errors := _shared_errors(runtime, folder)):
        return Checkpoint(folder)
    log.warning(f"{folder}, the best checkpoint, cannot be used: {'; '.join(errors)}. The last weights are used.")
    return None


def finished_result(resumed: Checkpoint, settings: CheckpointConfig) -> Path | None:
    """Where the result of the run is that is to be resumed, if it came to its end and nothing is to be changed."""
    result, output_dir = resumed.run / "model", Path(settings.output_dir or resumed.run).expanduser()
    is_newest = complete_checkpoints(resumed.run)[0].name == resumed.folder.name
    ended = resumed.trainer["ends_run"] and is_newest and output_dir.resolve() == resumed.run.resolve()
    return result if ended and result.is_dir() and not settings.resume_allow_changes else None


def check_steps_left(resumed: Checkpoint, total: int) -> None:
    """Refuse to resume beyond the `total` steps of the run, which may have been changed."""
    if resumed.step > total:
        raise UserError(f"--resume {resumed.folder}: {resumed.step} steps are done, and the run is to have {total}.")


def describe_run(config: Config) -> dict[str, Any]:
    """What every trainer.json says about the run: its resolved configuration, and versions."""
    return {"versions": versions(), "config": dataclasses.asdict(config)}


def versions() -> dict[str, str]:
    """Of this program, Python and the libraries that compute."""
    own = {"llama_ft": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}


def global_batch(settings: TrainConfig, resumed: Checkpoint | None, world_size: int) -> int:
    """Packed sequences, or samples, of an optimizer step. A resumed run keeps its own on any number of ranks, which
    then have smaller, or more, micro-batches.

    Raises:
        UserError: the settings were changed and ask for another global batch than the resumed run's.
    """
    asked = settings.batch_size_training * settings.gradient_accumulation_steps * world_size
    if resumed is None:
        return asked
    kept, before = int(resumed.trainer["global_batch"]), resumed.trainer["config"]["train"]
    if asked != kept and any(before[name] != getattr(settings, name) for name in BATCH_SETTINGS):
        was = ", ".join(f"{name} {before[name]}" for name in BATCH_SETTINGS)
        raise UserError(f"--resume: the global batch would be {asked}, and the run has had {kept}. Leave {was}.")
    return kept
