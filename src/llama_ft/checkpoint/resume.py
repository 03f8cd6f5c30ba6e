"""Find the checkpoint to resume from, the newest valid one, and check that its settings match."""

import dataclasses
import itertools
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_ft import __version__, door
from llama_ft.checkpoint import reader
from llama_ft.checkpoint.reader import (
    Checkpoint,
    checkpoint_errors,
    complete_checkpoints,
    step_folder,
    step_of,
)
from llama_ft.checkpoint.remote import RemoteCheckpoints, RemoteRun
from llama_ft.checkpoint.run_directory import lock_continued_run
from llama_ft.config import CheckpointConfig, Config, check_device
from llama_ft.config.home import expanded
from llama_ft.config.reading.load import with_present_names
from llama_ft.config.settings.settings import SETTINGS
from llama_ft.config.wording.messages import describe_setting, format_value
from llama_ft.errors import RunFailure, UserError
from llama_ft.runtime import Ranks, advise_precision, log

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors")
# Settings of where and how fast a run computes, of its logs, and of extensions. A difference in any
# other setting would make it a different run.
SECTIONS_THAT_MAY_DIFFER = {
    *("fsdp", "checkpoint", "tracking", "memory", "profile"),
    *door.settings_sections(),
}
# The content that these name is compared, after the model was found and the data were tokenized.
COMPARED_BY_CONTENT = {
    "model_name", "dataset", "validation", "tokenizer_name", "chat_template", "dataset_split", "dataset_format",
    "skip_bad_rows", "columns", "repair_chats", "max_samples", "deduplicate", "rollouts", "reward_threshold",
}  # fmt: skip
MAY_DIFFER = COMPARED_BY_CONTENT | {
    "batch_size_training", "gradient_accumulation_steps",  # see global_batch
    "trust_remote_code",
    "show_samples", "tokenize_processes", "attn_implementation", "use_liger", "compile", "device",
    "device_memory_fraction", "accumulate_unsharded", "activation_checkpointing", "activation_checkpointing_k",
    "activation_offload", "tiled_mlp", "stop_after", "collective_timeout", "run_validation", "val_batch_size",
    "eval_steps",
    "max_eval_step", "max_train_time", "log_steps", "sample_tokens", "sample_prompts", "sample_steps",
    "early_stopping_patience", "early_stopping_min_delta", "validation_output", "best_by", "score", "score_tokens",
    "score_samples", "score_answers", "score_batch_size", "eval_tasks", "eval_tasks_limit",
}  # fmt: skip
NEW_RUN = (
    "start a new run from the weights:\n"
    "recipes/export.py RUN FOLDER writes them, --model_name FOLDER or --from_peft_checkpoint FOLDER reads them."
)
BATCHES_DIFFER = (
    "--resume: the checkpoint is from a version of llama_ft that puts other samples into a step, so "
    "the remaining steps would see other batches.\n"
    "Finish the run with that version. If other batches are acceptable, allow them with:\n"
    "--resume_allow_changes batching_strategy"
)


def find_checkpoint(
    settings: CheckpointConfig, ranks: Ranks, remote: RemoteRun | None = None
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None without --resume, or with --resume auto if there
    is none. The run's directory is locked first: nobody else changes its checkpoints from then on.
    If the checkpoint is only in another place, it is fetched, together with the one that has the
    best validation loss.

    Args:
        settings: resume and output_dir. If torchrun has restarted the ranks, they resume from the
            checkpoints of the previous attempt, whatever these settings are.
        ranks: the ranks. All of them call it, and share the work of verifying checksums.
        remote: the result of `open_remote`; None: the disk has all checkpoints.

    Raises:
        UserError: --resume does not name a checkpoint, another process has the run's directory, or
            --save_to holds another run.
        RunFailure: the named checkpoint is corrupted, or with --resume auto all of them are.
    """
    lock_continued_run(settings, ranks)
    stored = remote.checkpoints() if remote is not None else None
    find = partial(_candidates, settings, ranks.earlier_run, stored)
    candidates = ranks.broadcast_from_rank0(find)
    if not candidates:
        if stored is not None:
            ranks.broadcast_from_rank0(stored.report_without_checkpoint)
        return None
    if stored is not None and not ranks.shares_disk:
        # the path of the directory can differ per node
        candidates = [step_folder(stored.directory, step_of(folder)) for folder in candidates]
    checkpoint = first_valid(candidates, partial(_errors_or_fetch, ranks, stored))
    if stored is not None:
        _fetch_best(checkpoint, stored, ranks)
    log.info(f"Resuming from {checkpoint.folder}, after step {checkpoint.step}")
    return checkpoint


def first_valid(
    candidates: list[Path], errors_of: Callable[[Path], list[str]] = checkpoint_errors
) -> Checkpoint:
    """Open the first checkpoint whose files all match their checksums. Raises RunFailure if all are
    corrupted."""
    for folder in candidates:
        errors = errors_of(folder)
        if not errors:
            return Checkpoint(folder)
        if folder != candidates[-1]:
            log.warning("\n".join([f"{folder} is corrupted and not used:", *errors]))
    advice = "Use another checkpoint, or start a new run."
    raise RunFailure("\n".join([f"{folder} is corrupted:", *errors, advice]))


def _candidates(
    settings: CheckpointConfig, earlier_run: Path | None, stored: RemoteCheckpoints | None
) -> list[Path]:
    """Return the checkpoints to try, in order; those of another place as the paths that they will get."""
    if stored is not None:
        folders = {step_folder(stored.directory, step) for step in stored.steps}
        if stored.with_local:
            folders |= {*complete_checkpoints(stored.directory)}
        return sorted(folders, key=step_of, reverse=True)
    checkpoints = [] if earlier_run is None else complete_checkpoints(earlier_run)
    if checkpoints:
        return checkpoints
    if settings.resume is None:
        return []
    named = str(settings.output_dir) if settings.resume == "auto" else settings.resume
    folder = expanded(named)
    own_files = (folder / reader.TRAINER_FILE, folder / reader.CHECKSUMS_FILE)
    if any(file.exists() for file in own_files):
        return [folder]
    checkpoints = complete_checkpoints(folder)
    if not checkpoints and settings.resume != "auto":
        raise UserError(
            f"--resume {folder}: no checkpoint there; expected output/<run>/checkpoints/step-..., or auto."
        )
    return checkpoints


def _shared_errors(ranks: Ranks, folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint, on all ranks. They meet every half minute, so that
    the watchdog does not report a rank that has no file to check or a slow disk."""
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(checkpoint_errors, folder, ranks.rank, ranks.world_size)
        while not ranks.all_gather_floats(mine.done()).all():
            wait([mine], timeout=30.0)
    return list(itertools.chain.from_iterable(ranks.gather(mine.result())))


def _errors_or_fetch(ranks: Ranks, stored: RemoteCheckpoints | None, folder: Path) -> list[str]:
    """Return what is wrong with a local checkpoint, on all ranks. If it is missing or corrupted,
    fetch it from the other place, and return what is wrong there."""
    errors = []
    is_whole = stored is None or ranks.shares_disk
    if is_whole and ranks.broadcast_from_rank0(folder.is_dir):
        errors = _shared_errors(ranks, folder)
        if not errors:
            return []
    if stored is None or step_of(folder) not in stored.steps:
        return errors
    stored_errors = stored.fetch(step_of(folder), ranks)
    return errors + stored_errors if stored_errors else []


def _fetch_best(resumed: Checkpoint, stored: RemoteCheckpoints, ranks: Ranks) -> None:
    """Fetch the checkpoint with the best validation loss, whose weights early stopping takes and
    which checkpoints/best.json names."""
    step = int(resumed.trainer["progress"]["best"]["step"])
    is_local = ranks.broadcast_from_rank0(step_folder(stored.directory, step).is_dir)
    is_whole = is_local and ranks.shares_disk
    if is_whole or step not in stored.steps:
        return
    errors = stored.fetch(step, ranks, is_resumed=False)
    if errors:
        log.warning("\n".join(["The checkpoint with the best validation loss is lost:", *errors]))


def check_same_run(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    allowed: list[str],
    origins: Mapping[str, str],
) -> None:
    """Raise a UserError if settings differ so that the resumed run would be another run.

    Args:
        saved: the run in trainer.json: `config`, the resolved configuration as dicts by section,
            `contents`: model_name, dataset, validation -> a checksum of their content, and
            `batches`: the entry of data.BATCHES_VERSION, and `split`: data.SPLIT_VERSION if
            a fraction of the samples is the validation set.
        now: the same for the resuming run; `contents` and `batches` may still be missing.
        allowed: names of settings that may differ.
        origins: dotted name -> where it was set.

    Raises:
        UserError: names all differing settings with their old and new values.
    """
    before = settings_by_name(with_present_names(saved["config"]))
    then = saved["contents"]
    contents = now.get("contents", {})
    changed = {}
    for section, settings in now["config"].items():
        for name, value in settings.items():
            old = before.get(name, SETTINGS[name].default)
            setting = SETTINGS[name]
            is_other = name in contents and name in then and contents[name] != then[name]
            may_differ = name in MAY_DIFFER or section in SECTIONS_THAT_MAY_DIFFER
            is_allowed = name in allowed and name != "optimizer"
            if not is_allowed and (is_other or (old != value and not may_differ)):
                was = "as before, but its content, tokenizer or chat template has changed"
                if is_other and saved.get("split") != now.get("split"):
                    was = "as before, but another version of llama_ft chose the validation samples"
                if old != value:
                    was = f"was {format_value(old)}"
                origin = origins.get(setting.dotted, "")
                described = describe_setting(name, {name: origin})
                changed[name] = f"{described} is {format_value(value)}, {was}"
    # Older checkpoints have `packing`: the version of packed batches, or None with padding.
    then_batches = saved.get("batches", saved.get("packing")) or 1
    sees_others = now.get("batches") not in (None, then_batches)
    if not changed and sees_others and "batching_strategy" not in allowed:
        raise UserError(BATCHES_DIFFER)
    if not changed:
        return
    lines = ["--resume: these settings differ from those of the saved run:", *changed.values()]
    if "optimizer" in changed:
        lines.append("The saved states do not fit another optimizer. To use one, " + NEW_RUN)
    else:
        lines.append("If the trained parameters and the optimizer stay the same, allow it with:")
        lines.append(f"--resume_allow_changes {','.join(changed)}")
    raise UserError("\n".join(lines))


def result_step(config: Config, step: int, best_step: int) -> int:
    """Return the step of the final weights: after early stopping `best_step`, the one with the best
    validation loss (0: there is none), otherwise `step`."""
    stops_early = config.train.early_stopping_patience and config.checkpoint.save_model
    return best_step if stops_early and best_step else step


def open_best(step: int, run: Path, resumed: Checkpoint | None, ranks: Ranks) -> Checkpoint:
    """Open the checkpoint of `step`, the one with the best validation loss, or else the newest
    valid one of a run. The best one may be in the directory of the run that was resumed. All ranks
    call it."""
    runs = [run, resumed.run] if resumed else [run]
    best = [step_folder(directory, step) for directory in runs]
    last = [resumed.folder] if resumed else []
    candidates = ranks.on_each_disk(
        lambda: [*filter(Path.is_dir, best), *complete_checkpoints(run), *last]
    )
    return first_valid(candidates, partial(_shared_errors, ranks))


def finished_result(
    resumed: Checkpoint, config: Config, remote: RemoteRun | None = None
) -> str | None:
    """Return where the final model of a finished run is if --resume would change nothing, or None.
    With another model or other data there is more to compare first, so the result is None. `remote`
    may have the model of a run whose disk is lost."""
    settings = config.checkpoint
    result = resumed.run / "model"
    output_dir = expanded(settings.output_dir or resumed.run)
    newest = next(iter(complete_checkpoints(resumed.run)), None)
    is_newest = newest is not None and newest.name == resumed.folder.name
    is_own = output_dir.resolve() == resumed.run.resolve()
    saved = settings_by_name(resumed.trainer["config"])
    now = settings_by_name(dataclasses.asdict(config))
    has_same_inputs = all(
        saved.get(name, SETTINGS[name].default) == now[name] for name in COMPARED_BY_CONTENT
    )
    ended = resumed.trainer["ends_run"] and is_newest and is_own and has_same_inputs
    if not ended or settings.resume_allow_changes:
        return None
    if result.is_dir():
        return str(result)
    return remote.final_model(resumed.step) if remote is not None else None


def settings_by_name(
    config: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return all settings of a configuration without their sections. Names are unique."""
    settings = dict[str, Any]()
    for section in config.values():
        settings |= section
    return settings


def describe_run(config: Config) -> dict[str, Any]:
    """Return the description of a run for trainer.json: its resolved configuration, and versions of
    the libraries."""
    own = {"llama_ft": __version__, "python": platform.python_version()}
    return {
        "versions": own | {name: version(name) for name in LIBRARIES},
        "config": dataclasses.asdict(config),
    }


def global_batch(config: Config, resumed: Checkpoint | None, ranks: Ranks) -> int:
    """Return the packed sequences, or samples, per optimizer step. A resumed run keeps its number,
    also if torchrun has started the ranks again before the first checkpoint: with other ranks,
    batch size or accumulation the number of micro-batches changes."""
    settings = config.train
    by_settings = (
        settings.batch_size_training * settings.gradient_accumulation_steps * ranks.data.size
    )
    if steps := config.preference.entry.generated_steps(config):
        by_settings = steps.samples
    size = by_settings
    if resumed is not None:
        size = int(resumed.trainer["global_batch"])
    elif ranks.earlier is not None:
        size = ranks.earlier.global_batch or by_settings
    if size == by_settings:
        return by_settings
    log.info(
        f"The global batch stays {size}, as in the resumed run, although the settings ask for {by_settings}."
    )
    return size


def resolve_precision(
    config: Config, origins: dict[str, str], ranks: Ranks, resumed: Checkpoint | None
) -> Config:
    """Choose the precision for this machine if the user did not: for the demo, and on a CPU for the
    demo's data. A resumed run keeps its own precision. Rank 0 decides for all ranks."""
    check_device(config, origins, ranks.device.type)
    is_small = config.data.dataset == "demo" and ranks.device.type == "cpu"
    is_free = "train.precision" not in origins and (is_small or config.model.model_name == "demo")
    setting = (
        resumed.trainer["config"]["train"]["precision"]
        if resumed and is_free
        else config.train.precision
    )
    is_free = is_free and resumed is None
    precision, note = ranks.broadcast_from_rank0(
        lambda: advise_precision(setting, is_free, ranks.device)
    )
    if note:
        log.info(note)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision))
