"""Open a run: its directory, its trackers, and its parts."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_ft import checkpoint, door, models, observe
from llama_ft.config import to_yaml
from llama_ft.config.attempts import describe_attempts
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.plan.spare_memory import use_spare_memory
from llama_ft.run import result
from llama_ft.run.inputs import RunInputs
from llama_ft.run.parts import Part
from llama_ft.run.parts.save_requests import SaveRequests
from llama_ft.run.parts.slow_ranks import SlowRanks
from llama_ft.run.parts.snapshots import MemorySnapshot
from llama_ft.run.parts.summary import Summary
from llama_ft.run.parts.tracked_model import TrackedModel
from llama_ft.run.setup import Setup, take_newer
from llama_ft.run.training_run import TrainingRun
from llama_ft.runtime import log


def run_parts(setup: Setup, inputs: RunInputs) -> list[Part]:
    """Return what the run does in addition to training, in order: the core's parts, and those of
    extensions. Uploads and the summary follow, see `open_run`. Errors in settings are raised here,
    before the model is loaded. All ranks call it together.

    Args:
        setup: what is known before.
        inputs: the result of `resolve_inputs`.
    """
    ranks = setup.ranks
    config = inputs.config
    parts = list[Part]()
    if ranks.world_size > 1:
        parts.append(SlowRanks(ranks))
    if config.memory.memory_snapshot:
        parts.append(MemorySnapshot())
    parts.append(SaveRequests(ranks))
    # before the uploads of model/, to which they may add files
    parts += [make_part(setup, inputs) for make_part in door.parts(config)]
    if config.checkpoint.save_model:
        parts.append(TrackedModel())
    return parts


@contextmanager
def open_run(
    setup: Setup, inputs: RunInputs, built: models.BuiltModel, parts: Sequence[Part]
) -> Iterator[TrainingRun]:
    """Create the run's directory (nothing is written before) and start the trackers.

    Args:
        setup: what was known before.
        inputs: the result of `resolve_inputs`.
        built: the loaded model; its FSDP units are for the report.
        parts: the result of `run_parts`, and your own.
    """
    ranks = setup.ranks
    config = inputs.config
    name = config.model.model_name
    directory = checkpoint.create_run_directory(config.checkpoint, name, ranks, setup.resumed)
    log.info(f"Run directory: {directory}")
    resumed = setup.resumed
    setup.remote.open(directory, resumed)
    setup = take_newer(setup, config, inputs.description, inputs.batches)
    setup = dataclasses.replace(setup, config=config)
    resumed = setup.resumed
    step = resumed.step if resumed else 0
    at_end = result.at_end(directory, setup.remote, ranks)
    ranks.begin_run(directory, step, at_end, setup.global_batch)
    description = checkpoint.describe_run(config) | inputs.description
    attempts = checkpoint.attempts_of(resumed, description, ranks)
    description["attempts"] = attempts
    inputs = dataclasses.replace(inputs, description=description)
    if ranks.is_main:
        text = to_yaml(config, _about_config(directory, attempts))
        (directory / "config.yaml").write_text(text)
        bad_samples = inputs.dataset.bad_samples
        if bad_samples is not None:
            shutil.copyfile(bad_samples, directory / BAD_SAMPLES_FILE)
    planned = setup.preflight.report(directory, ranks)
    share = None if planned is None else planned.share
    built.keeps_units = None if planned is None else planned.keeps_units
    use_spare_memory(share, built, config, inputs.dataset.longest_example, ranks)
    parts = [*parts, *setup.remote.parts(), Summary(setup.recipes, setup.started_at)]

    def saved(step: int) -> None:
        for part in parts:
            part.saved(run, step)

    hooks = dataclasses.replace(setup.remote.hooks(), saved=saved)
    writer = checkpoint.CheckpointWriter(directory, config.checkpoint, description, ranks, hooks)
    run_log = _open_log(setup, directory, attempts, inputs.batches.total_steps)
    run = TrainingRun(setup, inputs, built, writer, run_log, parts)
    with run.log:
        for part in parts:
            part.opened(run)
        yield run


def _open_log(
    setup: Setup, directory: Path, attempts: Sequence[dict[str, Any]], total_steps: int
) -> observe.RunLog:
    """Open metrics.jsonl and the trackers, which get the settings and their changes by resumes."""
    resumed = None
    if setup.resumed is not None:
        trackers = setup.resumed.trainer["trackers"]
        resumed = observe.ResumedLog(setup.resumed.step, setup.resumed.run, trackers)
    changes = describe_attempts(attempts)
    settings = dataclasses.asdict(setup.config) | ({"resumes": changes} if changes else {})
    return observe.RunLog(
        directory, setup.config.tracking, settings, total_steps, setup.ranks.rank, resumed
    )


def _about_config(directory: Path, attempts: Sequence[dict[str, Any]]) -> str:
    """Return the comment of config.yaml: how to use it, and what held before a resume."""
    repeats = f"--config {directory}/config.yaml repeats this run"
    changes = describe_attempts(attempts)
    if not changes:
        return repeats
    return "\n".join(
        [f"{repeats} with the settings of its last steps. Resumes have changed,", *changes]
    )
