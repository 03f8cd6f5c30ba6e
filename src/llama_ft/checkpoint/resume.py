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
from llama_ft.config import CheckpointConfig, Config, TrainConfig, check_device
from llama_ft.config.messages import show, subject
from llama_ft.config.settings import SETTINGS
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Runtime, advise_precision, log

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors")
# Where and how fast the same thing is computed, and what is written down about it. Everything else that differs makes
# another run.
SECTIONS_THAT_MAY_DIFFER = {"fsdp", "checkpoint", "tracking", "memory", "profile"}
MAY_DIFFER = {
    "model_name", "dataset", "validation",  # the same if they hold the same
    "batch_size_training", "gradient_accumulation_steps",  # see global_batch
    "tokenizer_name", "trust_remote_code", "chat_template", "dataset_split", "dataset_format", "skip_bad_rows",
    "columns", "repair_chats", "max_samples",
    "show_samples", "tokenize_processes", "attn_implementation", "use_liger", "compile", "device",
    "device_memory_fraction", "accumulate_unsharded", "activation_checkpointing", "activation_checkpointing_k",
    "activation_offload", "stop_after", "collective_timeout", "run_validation", "val_batch_size", "eval_steps",
    "max_eval_step", "max_train_time", "log_steps", "sample_tokens", "sample_prompts", "sample_steps",
    "early_stopping_patience", "early_stopping_min_delta",
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
    log.info(f"Resuming from {checkpoint.folder}, after step {checkpoint.step}")
    return checkpoint


def first_valid(candidates: list[Path], errors_of: Callable[[Path], list[str]] = checkpoint_errors) -> Checkpoint:
    """Open the first checkpoint all of whose bytes are what was written; a RunFailure if all are corrupted."""
    for folder in candidates:
        if not (errors := errors_of(folder)):
            return Checkpoint(folder)
        if folder != candidates[-1]:
            log.warning("\n".join([f"{folder} is corrupted and not used:", *errors]))
    raise RunFailure("\n".join([f"{folder} is corrupted:", *errors, "Use another checkpoint, or start a new run."]))


def _candidates(settings: CheckpointConfig, earlier_run: Path | None) -> list[Path]:
    """The checkpoints to try in order."""
    if earlier_run is not None and (found := complete_checkpoints(earlier_run)):
        return found
    if settings.resume is None:
        return []
    folder = Path(str(settings.output_dir) if settings.resume == "auto" else settings.resume).expanduser()
    if (folder / reader.TRAINER_FILE).exists() or (folder / reader.CHECKSUMS_FILE).exists():
        return [folder]
    if not (found := complete_checkpoints(folder)) and settings.resume != "auto":
        raise UserError(f"--resume {folder}: no checkpoint there; expected output/<run>/checkpoints/step-..., or auto.")
    return found


def _shared_errors(runtime: Runtime, folder: Path) -> list[str]:
    """What is wrong with a checkpoint, known to all ranks. They meet every half minute: with fewer files than ranks, or
    a slow disk, no rank may be taken for one that hangs."""
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(checkpoint_errors, folder, runtime.rank, runtime.world_size)
        while not runtime.all_gather_floats(mine.done()).all():
            wait([mine], timeout=30.0)
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
    before = {name: value for section in saved["config"].values() for name, value in section.items()}
    then, contents, changed = saved["contents"], now.get("contents", {}), {}
    for section, settings in now["config"].items():
        for name, value in settings.items():
            old, setting = before.get(name, SETTINGS[name].default), SETTINGS[name]
            is_other = name in contents and name in then and contents[name] != then[name]
            may_differ = name in MAY_DIFFER or section in SECTIONS_THAT_MAY_DIFFER
            if name not in allowed and (is_other or (old != value and not may_differ)):
                was = f"was {show(old)}" if old != value else "and its content, tokenizer or chat template has changed"
                changed[name] = f"{subject(name, {name: places.get(setting.dotted, '')})} is {show(value)}, {was}"
    if changed:
        heading = "--resume: these settings differ from those of the saved run:"
        allow = "If the trained parameters and the optimizer stay the same, allow it with:"
        raise UserError("\n".join([heading, *changed.values(), allow, f"--resume_allow_changes {','.join(changed)}"]))


def result_step(config: Config, step: int, best_step: int) -> int:
    """The step whose weights a run that ends after `step` has as its result: with early stopping `best_step`, the one
    with the best validation loss, unless that is 0."""
    return best_step if config.train.early_stopping_patience and config.checkpoint.save_model and best_step else step


def open_best(step: int, run: Path, resumed: Checkpoint | None, runtime: Runtime) -> Checkpoint:
    """The checkpoint of a run's `step`, the one with the best validation loss, or else its newest valid one. A branch
    may have left the best one in the run that was resumed. All ranks call it together."""
    best = [step_folder(it, step) for it in ([run, resumed.run] if resumed else [run])]
    last = [resumed.folder] if resumed else []
    candidates = runtime.broadcast_from_rank0(lambda: [*filter(Path.is_dir, best), *complete_checkpoints(run), *last])
    return first_valid(candidates, partial(_shared_errors, runtime))


def finished_result(resumed: Checkpoint, settings: CheckpointConfig) -> Path | None:
    """Where the result of the run is that is to be resumed, if it came to its end and nothing is to be changed."""
    result, output_dir = resumed.run / "model", Path(settings.output_dir or resumed.run).expanduser()
    is_newest = complete_checkpoints(resumed.run)[0].name == resumed.folder.name
    ended = resumed.trainer["ends_run"] and is_newest and output_dir.resolve() == resumed.run.resolve()
    return result if ended and result.is_dir() and not settings.resume_allow_changes else None


def describe_run(config: Config) -> dict[str, Any]:
    """What every trainer.json says about the run: its resolved configuration, and the versions of what computes."""
    own = {"llama_ft": __version__, "python": platform.python_version()}
    return {"versions": own | {name: version(name) for name in LIBRARIES}, "config": dataclasses.asdict(config)}


def global_batch(settings: TrainConfig, resumed: Checkpoint | None, world_size: int) -> int:
    """Packed sequences, or samples, of an optimizer step. A resumed run keeps its own on any number of ranks, and with
    another batch size or accumulation, and then has smaller, or more, micro-batches."""
    asked = settings.batch_size_training * settings.gradient_accumulation_steps * world_size
    if resumed is None or (kept := int(resumed.trainer["global_batch"])) == asked:
        return asked
    log.info(f"--resume: the global batch stays {kept}, as in the resumed run, although the settings ask for {asked}.")
    return kept


def resolve_precision(
    requested: Config, sources: dict[str, str], runtime: Runtime, resumed: Checkpoint | None
) -> Config:
    """Choose the precision of the demo, and on a CPU of any model on the demo's data, by the machine, unless it was
    asked for; a resumed run keeps its own. Rank 0 decides for all ranks."""
    check_device(requested, sources, runtime.device.type)
    is_small = requested.data.dataset == "demo" and runtime.device.type == "cpu"
    is_free = "train.precision" not in sources and (is_small or requested.model.model_name == "demo")
    wanted = resumed.trainer["config"]["train"]["precision"] if resumed and is_free else requested.train.precision
    is_free = is_free and resumed is None
    precision, note = runtime.broadcast_from_rank0(lambda: advise_precision(wanted, is_free, runtime.device))
    if note:
        log.info(note)
    return dataclasses.replace(requested, train=dataclasses.replace(requested.train, precision=precision))
