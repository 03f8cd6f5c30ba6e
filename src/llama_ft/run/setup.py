"""What is known before training: settings, ranks, and the checkpoint to resume from."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from llama_ft import checkpoint, data, models, observe, runtime, training
from llama_ft.config import Config, differences, parse_duration
from llama_ft.errors import RunFailure, UserError
from llama_ft.libraries.versions import untested_versions
from llama_ft.plan.oom_report import explain_errors
from llama_ft.plan.preflight import Preflight, resolve_checkpointing
from llama_ft.plan.types import Recipe
from llama_ft.run.result import at_end
from llama_ft.runtime import Ranks, log


@dataclass(frozen=True)
class Setup:
    """The start of a run on this rank; see `start_run`.

    Attributes:
        config: the settings of the command line and YAML, with precision and dataset_format.
            `resolve_inputs` replaces each auto by a choice.
        origins: dotted name -> the flag or the YAML line that set it.
        ranks: all processes of the run.
        memory: measures each phase.
        resumed: the checkpoint that the run resumes from; None for a new run.
        unfinished: directory of an attempt of this run that ended before its first checkpoint, if
            there was one: its reference and its teacher's probabilities are used.
        remote: where the run is in addition to its disk, such as in the store of --save_to.
        is_finished: the run to resume is already complete, so there is nothing to do.
        global_batch: packed sequences, or samples, of an optimizer step over all ranks.
        layout: a line about the ranks and the batch size.
        preflight: plans the memory in another process.
        recipes: the directory of the recipes.
        started_at: time.monotonic() at the start.
    """

    config: Config
    origins: dict[str, str]
    ranks: Ranks
    memory: observe.MemoryMonitor
    resumed: checkpoint.Checkpoint | None
    unfinished: Path | None
    remote: checkpoint.RemoteRun
    is_finished: bool
    global_batch: int
    layout: str
    preflight: Preflight
    recipes: Path
    started_at: float

    @property
    def resumed_folders(self) -> tuple[Path, ...]:
        """Directories of the checkpoint and of the run that are resumed; none for a new run."""
        return () if self.resumed is None else (self.resumed.folder, self.resumed.run)

    def choose_kernels(self, model_config: PretrainedConfig) -> Config:
        """Log the fused kernels, and return the settings with use_liger resolved. A resumed run
        keeps its choice."""
        config = self.config
        use_liger = config.model.use_liger
        if use_liger == "auto" and self.resumed is not None:
            use_liger = self.resumed.trainer["config"]["model"]["use_liger"]
        compiles = config.model.compile
        choose = partial(models.choose_liger, use_liger, model_config, compiles, self.ranks.target)
        use_liger, message = self.ranks.broadcast_from_rank0(choose)
        if message:
            log.info(message)
        model = dataclasses.replace(config.model, use_liger=use_liger)
        return dataclasses.replace(config, model=model)


def check_not_beyond(resumed: checkpoint.Checkpoint | None, batches: data.TrainingBatches) -> None:
    """Raise a UserError if the checkpoint is after the last step of the run."""
    if resumed is not None and resumed.step > batches.total_steps:
        raise UserError(
            f"--resume {resumed.folder}: the checkpoint is after step {resumed.step}, but this run ends "
            f"after step {batches.total_steps}. Raise --num_epochs or --max_train_step."
        )


def check_same_run(
    resumed: checkpoint.Checkpoint | None,
    config: Config,
    inputs: Mapping[str, Any],
    origins: dict[str, str],
) -> None:
    """Raise a UserError if the settings or the inputs would make the resumed run another run."""
    if resumed is not None:
        now = checkpoint.describe_run(config) | dict(inputs)
        allowed = config.checkpoint.resume_allow_changes
        checkpoint.check_same_run(resumed.trainer, now, allowed, origins)


def take_newer(
    setup: Setup,
    config: Config,
    inputs: Mapping[str, Any],
    batches: data.TrainingBatches,
) -> Setup:
    """Return the setup with `resumed` replaced if its `remote` holds a newer checkpoint by now.
    Nothing before depends on its step. All ranks call it.

    Raises:
        UserError: it is of other settings or inputs, or after the last step.
        RunFailure: it is of another global batch, for which other batches must be planned.
    """
    find = partial(checkpoint.find_checkpoint, config.checkpoint, setup.ranks, setup.remote)
    resumed = setup.remote.take_newer(setup.resumed, find)
    if resumed is None or resumed is setup.resumed:
        return dataclasses.replace(setup, resumed=resumed)
    check_same_run(resumed, config, inputs, setup.origins)
    check_not_beyond(resumed, batches)
    if checkpoint.global_batch(config, resumed, setup.ranks) != setup.global_batch:
        raise RunFailure(
            f"{resumed.folder}: was uploaded while this run was starting, and has another global batch "
            f"than {setup.global_batch}. Start the same command again."
        )
    return dataclasses.replace(setup, resumed=resumed)


@contextmanager
def start_run(
    config: Config, origins: dict[str, str], recipe: Recipe, planner: Path
) -> Iterator[Setup]:
    """Start the ranks, and find the checkpoint to resume from.

    Args:
        config: the settings of the command line and YAML.
        origins: dotted name -> the flag or the YAML line that set it.
        recipe: the functions that the planner runs on fake tensors.
        planner: path of recipes/plan.py.
    """
    fsdp = config.fsdp
    preflight = Preflight(recipe, off=not config.memory.plan_memory)  # it forks: before threads
    timeout = parse_duration(config.train.collective_timeout)
    fraction = config.train.device_memory_fraction
    degree = models.shard_degree(fsdp)
    parallel = fsdp.sequence_parallel_size
    device = config.train.device
    with (
        runtime.start(device, degree, fsdp.fsdp_cpu_offload, fraction, timeout, parallel) as ranks,
        observe.MemoryMonitor(ranks) as memory,
        explain_errors(config, ranks, memory, planner),
        checkpoint.removed_if_unused(ranks),
    ):
        runtime.set_quiet(config.tracking.quiet)
        if untested := untested_versions():
            log.warning(untested)
        remote = checkpoint.open_remote(config.checkpoint, ranks)
        resumed = checkpoint.find_checkpoint(config.checkpoint, ranks, remote)
        config = checkpoint.resolve_precision(config, origins, ranks, resumed)
        config = training.resolve_format(config)
        log.info("\n  ".join(["Settings that differ from the defaults:", *differences(config)]))
        config = resolve_checkpointing(config, ranks.target.device)
        check_same_run(resumed, config, {}, origins)
        is_finished = end_if_finished(resumed, config, ranks, remote)
        global_batch = 0
        layout = ""
        if not is_finished:
            global_batch = checkpoint.global_batch(config, resumed, ranks)
            layout = _describe_layout(config, global_batch, ranks)
            log.info(layout)
            if ranks.is_main:
                observe.check_trackers(config.tracking, config.checkpoint.output_dir)
        yield Setup(
            config=config,
            origins=origins,
            ranks=ranks,
            memory=memory,
            resumed=resumed,
            unfinished=checkpoint.unfinished_directory(config.checkpoint, ranks, resumed),
            remote=remote,
            is_finished=is_finished,
            global_batch=global_batch,
            layout=layout,
            preflight=preflight,
            recipes=planner.parent,
            started_at=time.monotonic(),
        )


def _describe_layout(config: Config, global_batch: int, ranks: Ranks) -> str:
    is_packed = config.data.batching_strategy == "packing"
    generated = config.preference.entry.generated_steps(config)
    return ranks.describe(
        config.train.batch_size_training,
        config.train.gradient_accumulation_steps,
        global_batch,
        unit="packed sequence" if is_packed else "sample",
        setting="" if generated is None else generated.setting,
    )


def end_if_finished(
    resumed: checkpoint.Checkpoint | None,
    config: Config,
    ranks: Ranks,
    remote: checkpoint.RemoteRun,
) -> bool:
    """Return whether the run to resume is complete, and if so, log where its final model is. An
    upload that was interrupted is finished."""
    if resumed is None:
        return False
    find = partial(checkpoint.finished_result, resumed, config, remote)
    result = ranks.broadcast_from_rank0(find)
    if result is None:
        return False
    log.info(f"This run was finished after step {resumed.step}; its final model is {result}")
    remote.reopen(resumed)
    ranks.begin_run(resumed.run, resumed.step, at_end(resumed.run, remote, ranks))
    remote.complete()
    return True
