"""What is known before training: settings, ranks, and the checkpoint to resume from."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llama_ft import checkpoint, data, models, observe, runtime, training
from llama_ft.config import Config, as_fraction, differences, parse_duration
from llama_ft.config.paths import PROMPT_FORMAT, unusual_output_dir
from llama_ft.errors import RunFailure, UserError
from llama_ft.export import check_export
from llama_ft.plan.oom_report import explain_errors
from llama_ft.plan.preflight import Preflight, resolve_checkpointing
from llama_ft.plan.types import Recipe
from llama_ft.run.evaluation import Evaluation
from llama_ft.run.result import end_run
from llama_ft.runtime import Ranks, log


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, checked: see `Setup.check_inputs`.

    Attributes:
        tokenizer: of the run.
        dataset: the tokenized data.
        description: for trainer.json; a resumed run must have the same.
        evaluation: of the model: losses and answers.
    """

    tokenizer: PreTrainedTokenizerBase
    dataset: data.TokenizedData
    description: dict[str, Any]
    evaluation: Evaluation


@dataclass(frozen=True)
class Setup:
    """The start of a run on this rank; see `start_run`.

    The settings change while the run starts: `choose_kernels` and `plan_memory` return them with
    auto replaced by a choice.

    Attributes:
        config: the settings of the command line and YAML, with precision and dataset_format.
        origins: dotted name -> the flag or the YAML line that set it.
        ranks: all processes of the run.
        memory: measures each phase.
        resumed: the checkpoint that the run resumes from; None for a new run.
        unfinished: directory of an attempt of this run that ended before its first checkpoint, if
            there was one: its reference and its teacher's probabilities are used.
        store: of --save_to; None without.
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
    store: checkpoint.ObjectStore | None
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

    def choose_kernels(self, config: Config, model_config: PretrainedConfig) -> Config:
        """Log the fused kernels, and return the settings with use_liger resolved. A resumed run
        keeps its choice."""
        wanted = config.model.use_liger
        if wanted == "auto" and self.resumed is not None:
            wanted = self.resumed.trainer["config"]["model"]["use_liger"]
        compiles = config.model.compile
        choose = partial(models.choose_liger, wanted, model_config, compiles, self.ranks.target)
        use_liger, message = self.ranks.broadcast_from_rank0(choose)
        if message:
            log.info(message)
        model = dataclasses.replace(config.model, use_liger=use_liger)
        return dataclasses.replace(config, model=model)

    def check_inputs(
        self,
        config: Config,
        folder: Path,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        new_tokens: models.NewTokens | None,
        dataset: data.TokenizedData,
    ) -> RunInputs:
        """Check that sample prompts can be answered, that the final model can be saved, and that a
        resumed run has the same model and data."""
        log.info("\n".join(dataset.summary))
        for warning in (*dataset.warnings, *dataset.leaks):
            log.warning(warning)
        if dataset.images is not None:
            training.check_image_settings(config, dataset.images)
        elif config.train.sample_images:
            raise UserError("--sample_images: no sample has images. Leave it out.")
        elif models.trains_images(config.model):
            raise UserError(
                "--train_vision and --freeze_LLM_only: no sample has images. Leave them out."
            )
        vocabulary = new_tokens.rows if new_tokens else models.vocabulary_size(model_config)
        report = dataset.report
        prompts = training.sample_prompts(
            config.train, report.chat_sample, report.chat_tools, dataset.prompt_format
        )
        training.check_sample_prompts(prompts, tokenizer, vocabulary, dataset.images)
        if tokenizer.chat_template and any(isinstance(one.prompt, str) for one in prompts):
            log.info(f"sample prompts: {data.AS_TEXT}")
        if self.ranks.is_main:
            check_export(model_config, tokenizer, folder)
        description = {
            "batches": data.BATCHES_VERSION[config.data.batching_strategy],
            "split": data.SPLIT_VERSION if as_fraction(config.data.validation) else None,
            "global_batch": self.global_batch,
            "contents": {"model_name": models.fingerprint(folder), **dataset.fingerprints()},
            "chat_template": tokenizer.chat_template,
            PROMPT_FORMAT: dataset.prompt_format,
            "new_tokens": new_tokens and dataclasses.asdict(new_tokens),
            "leaks": list(dataset.leaks),
        }
        check_same_run(self.resumed, config, description, self.origins)
        scores = training.AnswerScores(config.train, dataset.validations, tokenizer, dataset.images)
        return RunInputs(tokenizer, dataset, description, Evaluation(tokenizer, prompts, scores))

    def check_batches(
        self, config: Config, batches: data.TrainingBatches, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Log the number of steps, advice and samples."""
        log.info(batches.describe())
        check_not_beyond(self.resumed, batches)
        asked = config.train.warmup_steps
        warmup = training.warmup_steps(config.train, batches.total_steps)
        if asked > warmup:
            log.warning(
                f"warmup_steps {asked} is too long for {batches.total_steps} steps; using {warmup}."
            )
        names_dataset = "data.dataset" in self.origins
        for advice in training.advice(config, names_dataset, self.global_batch, batches.size):
            log.warning(advice)
        output_dir = config.checkpoint.output_dir
        if self.ranks.is_main and output_dir is not None:
            unusual = unusual_output_dir(output_dir, config.model.model_name)
            if unusual:
                log.warning(unusual)
        if config.data.show_samples:
            data.show_samples(batches.first_samples(), tokenizer, config.data.show_samples)

    def plan_memory(
        self,
        config: Config,
        folder: Path,
        new_tokens: models.NewTokens | None,
        dataset: data.TokenizedData,
        batches: data.TrainingBatches,
    ) -> Config:
        """Start to plan the memory in another process. Wait for it only if it chooses
        activation_checkpointing. Return the settings with the choice."""
        return self.preflight.start(config, folder, new_tokens, dataset, batches, self.ranks)


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
    uploads: checkpoint.Uploads | None,
) -> Setup:
    """Return the setup with `resumed` replaced if the store of --save_to holds a newer checkpoint by
    now. Nothing before depends on its step. All ranks call it.

    Raises:
        UserError: it is of other settings or inputs, or after the last step.
        RunFailure: it is of another global batch, for which other batches must be planned.
    """
    resumed = setup.resumed
    if uploads is not None:
        find = partial(checkpoint.find_checkpoint, config.checkpoint, setup.ranks, setup.store)
        resumed = uploads.take_newer(resumed, find)
    if resumed is None or resumed is setup.resumed:
        return dataclasses.replace(setup, resumed=resumed)
    check_same_run(resumed, config, inputs, setup.origins)
    check_not_beyond(resumed, batches)
    if checkpoint.global_batch(config.train, resumed, setup.ranks) != setup.global_batch:
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
    # it forks, so before any thread starts
    preflight = Preflight(recipe, off=not config.memory.plan_memory)
    timeout = parse_duration(config.train.collective_timeout)
    fraction = config.train.device_memory_fraction
    degree = models.shard_degree(fsdp)
    device = config.train.device
    with (
        runtime.start(device, degree, fsdp.fsdp_cpu_offload, fraction, timeout) as ranks,
        observe.MemoryMonitor(ranks) as memory,
        explain_errors(config, ranks, memory, planner),
        checkpoint.removed_if_unused(ranks),
    ):
        runtime.set_quiet(config.tracking.quiet)
        store = checkpoint.open_store(config.checkpoint, ranks)
        checkpoint.find_disks(config.checkpoint, ranks)
        resumed = checkpoint.find_checkpoint(config.checkpoint, ranks, store)
        config = checkpoint.resolve_precision(config, origins, ranks, resumed)
        config = training.resolve_format(config)
        log.info("\n  ".join(["Settings that differ from the defaults:", *differences(config)]))
        config = resolve_checkpointing(config, ranks.target.device)
        check_same_run(resumed, config, {}, origins)
        is_finished = end_if_finished(resumed, config, ranks, store)
        global_batch = 0
        layout = ""
        if not is_finished:
            global_batch = checkpoint.global_batch(config.train, resumed, ranks)
            is_packed = config.data.batching_strategy == "packing"
            layout = ranks.describe(
                config.train.batch_size_training,
                config.train.gradient_accumulation_steps,
                global_batch,
                unit="packed sequence" if is_packed else "sample",
            )
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
            store=store,
            is_finished=is_finished,
            global_batch=global_batch,
            layout=layout,
            preflight=preflight,
            recipes=planner.parent,
            started_at=time.monotonic(),
        )


def end_if_finished(
    resumed: checkpoint.Checkpoint | None,
    config: Config,
    ranks: Ranks,
    store: checkpoint.ObjectStore | None,
) -> bool:
    """Return whether the run to resume is complete, and if so, log where its final model is. An
    upload that was interrupted is finished."""
    if resumed is None:
        return False
    find = partial(checkpoint.finished_result, resumed, config, store)
    result = ranks.broadcast_from_rank0(find)
    if result is None:
        return False
    log.info(f"This run was finished after step {resumed.step}; its final model is {result}")
    missing = None
    if store is not None:
        step = resumed.step
        is_uploaded = ranks.broadcast_from_rank0(lambda: checkpoint.is_uploaded(store, step))
        missing = None if is_uploaded else store
    uploads = checkpoint.open_uploads(missing, resumed.run, config.checkpoint, resumed, ranks)
    at_end = partial(end_run, resumed.run, uploads, ranks)
    ranks.begin_run(resumed.run, resumed.step, at_end)
    if uploads is not None:
        uploads.add_missing()
        uploads.finish()
        uploads.put_model()
    return True
