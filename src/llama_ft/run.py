"""Settings, logs, checkpoints and evaluation of a run. The recipe computes losses, gradients and
updates."""

import dataclasses
import math
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, data, models, observe, report, runtime, training
from llama_ft.config import Config, differences, parse_duration, to_yaml
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.prefetch import StepBatches
from llama_ft.errors import UserError
from llama_ft.plan.oom_report import explain_errors
from llama_ft.plan.predict import BuildModel
from llama_ft.plan.preflight import Preflight, settle_checkpointing
from llama_ft.runtime import Runtime, log
from llama_ft.runtime.exit import Stop
from llama_ft.training.objective import LossSum, Objective
from llama_ft.training.step import StepResult


class RankNumbers(NamedTuple):
    """Numbers of every rank in one step, float64 [ranks] unless noted."""

    tokens: torch.Tensor  # input tokens without padding
    flops: torch.Tensor  # model FLOPs for these tokens
    peak_bytes: torch.Tensor  # highest host and device memory so far, [ranks, 2]
    stop_asked: torch.Tensor  # the rank's request to stop; see StopSignals
    save_failed: torch.Tensor  # 1 if the rank could not write the pending checkpoint
    seconds: torch.Tensor  # since the first step of this launch


class Due(NamedTuple):
    """Actions after a step, the same on all ranks."""

    evaluation: bool
    answers: bool  # sample answers to sample_prompts
    save: bool  # requested by the settings
    stop: Stop | None  # the request to stop the run, or None
    is_last: bool


class Run:
    """A run on this rank, created by `start_run`. The recipe calls its methods in a fixed order:
    `save_due`, `save` and `should_stop` use what `end_step` and `evaluate` have recorded.

    Attributes:
        config: the settings, with resolved values such as auto.
        resumed: the checkpoint that the run resumes from; None for a new run.
        is_finished: the run to resume is already complete, so there is nothing to do.
        global_batch: packed sequences, or samples, of an optimizer step over all ranks.
    """

    def __init__(
        self,
        config: Config,
        sources: dict[str, str],
        job: Runtime,
        memory: observe.MemoryMonitor,
        resumed: checkpoint.Checkpoint | None,
        preflight: Preflight,
    ) -> None:
        self.config = config
        self.job = job
        self.memory = memory
        self.resumed = resumed
        self.state = training.TrainState(config.train)
        self._sources = sources
        self._preflight = preflight
        self._started_at = time.monotonic()
        self._info = checkpoint.describe_run(config)
        self._check_same_run()
        result = checkpoint.finished_result(resumed, config.checkpoint) if resumed else None
        self.is_finished = result is not None
        if resumed is not None and result is not None:
            log.info(
                f"This run was finished after step {resumed.step}; its final model is {result}"
            )
            job.begin_run(resumed.run, resumed.step)
            return
        settings = config.train
        self.global_batch = checkpoint.global_batch(settings, resumed, job.world_size)
        sizes = (
            settings.batch_size_training,
            settings.gradient_accumulation_steps,
            self.global_batch,
        )
        self._layout = job.describe(
            *sizes, "pack" if config.data.batching_strategy == "packing" else "row"
        )
        log.info(self._layout)
        if job.is_main:
            observe.check_trackers(config.tracking, config.checkpoint.output_dir)

    # Before training

    def choose_kernels(self, model_config: PretrainedConfig) -> Config:
        """Log the fused kernels, and return the settings with use_liger resolved. A resumed run
        keeps its choice."""
        model = self.config.model
        asked = self.config.model.use_liger
        if asked == "auto" and self.resumed is not None:
            asked = self.resumed.trainer["config"]["model"]["use_liger"]
        choose = partial(models.choose_liger, asked, model_config, model.compile, self.job.device)
        use_liger, fused = self.job.broadcast_from_rank0(choose)
        if fused:
            log.info(fused)
        self.config = dataclasses.replace(
            self.config, model=dataclasses.replace(model, use_liger=use_liger)
        )
        self._info["config"] = dataclasses.asdict(self.config)
        return self.config

    def check_inputs(
        self,
        folder: Path,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        new_tokens: models.NewTokens | None,
        dataset: data.TokenizedData,
    ) -> None:
        """Check that the final model can be saved, and that a resumed run has the same model and
        data."""
        log.info("\n".join(dataset.summary))
        if self.job.is_main:
            checkpoint.check_export(model_config, tokenizer, folder)
        self._info |= {
            "global_batch": self.global_batch,
            "contents": {"model_name": models.fingerprint(folder), **dataset.fingerprints()},
            "chat_template": tokenizer.chat_template,
            "new_tokens": new_tokens and dataclasses.asdict(new_tokens),
        }
        self._check_same_run()

    def check_batches(
        self, batches: data.TrainingBatches, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Log the number of steps, advice and samples."""
        log.info(batches.describe())
        if self.resumed is not None and self.resumed.step > batches.total_steps:
            done = (
                f"{self.resumed.step} steps are done, and the run is to have {batches.total_steps}"
            )
            raise UserError(f"--resume {self.resumed.folder}: {done}.")
        asked = self.config.train.warmup_steps
        warmup = training.warmup_steps(self.config.train, batches.total_steps)
        if asked > warmup:
            log.warning(
                f"warmup_steps is {asked}, and the run has {batches.total_steps} steps: {warmup} are taken."
            )
        for advice in training.advice(
            self.config, "data.dataset" in self._sources, self.global_batch, batches.size
        ):
            log.warning(advice)
        if self.config.data.show_samples:
            data.show_samples(batches.first_rows(), tokenizer, self.config.data.show_samples)

    def plan_memory(
        self,
        folder: Path,
        new_tokens: models.NewTokens | None,
        dataset: data.TokenizedData,
        batches: data.TrainingBatches,
    ) -> Config:
        """Start to plan the memory in another process. Wait for it only if it chooses
        activation_checkpointing."""
        self.config = self._preflight.ask(
            self.config, folder, new_tokens, dataset, batches, self.job
        )
        self._info["config"] = dataclasses.asdict(self.config)
        return self.config

    @contextmanager
    def open(
        self,
        dataset: data.TokenizedData,
        batches: data.TrainingBatches,
        units: Sequence[models.Unit],
    ) -> Iterator[None]:
        """Create the run's directory (nothing is written before) and start the trackers."""
        config = self.config
        job = self.job
        resumed = self.resumed
        self.dataset = dataset
        self.batches = batches
        self.directory = folder = checkpoint.create_run_directory(
            config.checkpoint, config.model.model_name, job, resumed
        )
        log.info(f"Run directory: {folder}")
        job.begin_run(
            folder, resumed.step if resumed else 0, at_end=partial(report.write_or_warn, folder)
        )
        if job.is_main:
            text = to_yaml(config, f"--config {folder}/config.yaml repeats this run")
            (folder / "config.yaml").write_text(text)
            if dataset.bad_samples is not None:
                shutil.copyfile(dataset.bad_samples, folder / BAD_SAMPLES_FILE)
        self._preflight.tell(folder)
        self.facts = observe.RunMetadata(folder, job.is_main)
        environment = observe.environment(self._info["versions"], self._layout)
        self.facts.add(
            environment=environment, data=dataset.facts(), total_steps=batches.total_steps
        )
        self.facts.add(units=[dataclasses.asdict(unit) for unit in units])
        self.writer = checkpoint.CheckpointWriter(folder, config.checkpoint, self._info, job)
        resolved = dataclasses.asdict(config)
        earlier = dict[str, Any]()
        if resumed is not None:
            ids = resumed.trainer["trackers"]
            earlier = {"resume_step": resumed.step, "resumed_dir": resumed.run, "tracker_ids": ids}
        with observe.RunLog(
            folder, config.tracking, resolved, batches.total_steps, job.rank, **earlier
        ) as self.log:
            yield

    def _check_same_run(self) -> None:
        if self.resumed is not None:
            allowed = self.config.checkpoint.resume_allow_changes
            checkpoint.check_same_run(self.resumed.trainer, self._info, allowed, self._sources)

    # Training

    def restore(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Load the checkpoint to resume from, if there is one."""
        self._pending = training.PendingMetrics(self.job.device)
        self._metrics = dict[str, Any]()
        self._is_best = False
        if self.resumed is not None:
            self.state.load_state_dict(self.resumed.trainer["progress"])
            checkpoint.restore(self.resumed, model, optimizer, self.job)
            self._metrics = self.resumed.trainer["metrics"]
        self._snapshot_step = self.state.step + observe.SNAPSHOT_STEPS
        self._first_step_at = math.inf
        self._ended = "no further step"

    @contextmanager
    def training(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The block of the training loop: steps are logged and measured, and signals wait for the
        end of a step."""
        config = self.config
        job = self.job
        dtype = runtime.PRECISIONS[config.train.precision].compute
        self._throughput = observe.ThroughputMeter(
            model, config.profile, dtype, self.directory, self.facts, job
        )
        self.memory.begin_training(model, optimizer, self.facts)
        signals = job.signals.between_steps(config.train.stop_after)
        with self.log.training(), self.writer, signals, self._throughput:
            yield

    @property
    def remaining_steps(self) -> Generator[StepBatches, None, None]:
        """Return the batches of the remaining steps, on this rank."""
        last = self.state.step if self.state.best.should_stop else self.batches.total_steps
        return self.batches.steps(self.state.step + 1, last, self.state.position)

    def begin_step(
        self, step: StepBatches, waited_seconds: float, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Start to measure a step. `waited_seconds` is how long training waited for its batches."""
        lengths = [length for batch in step.batches for length in batch.row_lengths]
        targets = sum(batch.target_tokens for batch in step.batches)
        self._throughput.begin_step(step.step, lengths, targets, waited_seconds)
        self._first_step_at = min(self._first_step_at, time.monotonic())
        if step.step == 1:
            log.info(data.describe_first_batch(step.batches[0], tokenizer))

    def gather(self, step: StepBatches) -> RankNumbers:
        """Return the numbers of all ranks, with one all-gather between hosts."""
        gathered = self.job.all_gather_floats(
            sum(batch.tokens for batch in step.batches),
            self._throughput.flops,
            self.memory.host_peak_bytes,
            self.memory.device_peak_bytes,
            self.job.signals.asked(),
            self.writer.has_failed,
            time.monotonic() - self._first_step_at,
        )
        tokens, flops, _, _, asked, failed, seconds = gathered.unbind(1)
        return RankNumbers(tokens, flops, gathered[:, 2:4], asked, failed, seconds)

    def failed(self, step: StepBatches, result: StepResult) -> torch.Tensor:
        """Return, on the device, not 0 if the weights must not be updated: the loss or the gradient
        norm is not finite. With fp16 this synchronizes with the device, because overflowing
        gradients lower the loss scale."""
        scale = self.state.scale
        self._is_skipped = scale.is_used and scale.note(step.step, *result.read())
        return result.failed if self._is_skipped else self._pending.failed_with(result)

    def end_step(
        self,
        step: StepBatches,
        result: StepResult,
        losses: Sequence[LossSum],
        numbers: RankNumbers,
        lr: float,
    ) -> Due:
        """Record a step whose weights are updated. On a GPU its loss is read and logged after the
        next step was queued, unless it is needed now."""
        config = self.config
        state = self.state
        self.memory.end_step()
        self._throughput.end_step(
            step.step, numbers.tokens.sum().item(), numbers.flops.sum().item()
        )
        state.step = step.step
        state.position = step.position
        state.target_tokens += step.target_tokens
        self._metrics = {
            "epoch": step.epochs_seen,
            "tokens": state.target_tokens,
            "train/lr": lr,
            **observe.memory_metrics(numbers.peak_bytes),
            **state.scale.metrics(),
        }
        # all ranks use rank 0's clock
        longest = config.train.max_train_time
        seconds = numbers.seconds[0].item()
        self._time_is_up = longest is not None and seconds >= parse_duration(longest)
        is_last = self._time_is_up or step.step == self.batches.total_steps
        stop = self.job.signals.agreed(numbers.stop_asked)
        self._ends_epoch = step.ends_epoch
        self._is_best = False
        self._save_failed = bool(numbers.save_failed.any())
        evaluation = self.dataset.validation is not None
        evaluation &= training.is_due(
            step.step, config.train.eval_steps, step.ends_epoch or is_last
        )
        answers = not is_last and training.is_due(step.step, config.train.sample_steps, False)
        due = Due(evaluation, answers, self._save_asked(is_last or stop is not None), stop, is_last)
        newest = training.Step(
            step.step, result, losses, step.batches, self._metrics, self._is_skipped
        )
        for read in self._pending.take(
            newest, needed=any((evaluation, due.save, is_last, stop is not None))
        ):
            training.stop_if_not_finite(read, self.writer.finish, self.job)
            read.metrics.update(self._throughput.metrics(read.step))
            is_logged_later = evaluation and read is newest
            if not is_logged_later and training.is_due(
                read.step, config.train.log_steps, read is newest and is_last
            ):
                self.log.log_step(read.step, read.metrics | self.writer.timings())
        self.job.note_step(step.step)
        if config.memory.memory_snapshot and step.step == min(
            self._snapshot_step, self.batches.total_steps
        ):
            log.info(
                f"Memory snapshot: {observe.write_snapshot(self.directory, self.job.rank, f'step-{step.step}')}"
            )
        return due

    def evaluate(self, model: PreTrainedModel, objective: Objective, pad: int) -> None:
        """Compute and log the validation loss."""
        self.memory.enter("evaluation")
        settings = self.config.train
        samples = self.dataset.validation
        pack_length = self.batches.pack_length
        assert samples is not None
        loss, _, more = training.mean_loss(
            model, objective, samples, settings, pad, pack_length, self.job
        )
        self._metrics |= {
            "eval/loss": loss,
            **{f"eval/{name}": value for name, value in more.items()},
        }
        if objective.counts_tokens:
            self._metrics["eval/perplexity"] = training.perplexity(loss)
        self._is_best = self.state.step > 0 and self.state.best.update(loss, self.state.step)
        self.log.log_step(self.state.step, self._metrics | self.writer.timings())
        self._throughput.pause()

    def save_due(self, due: Due) -> bool:
        """Return whether to save after this step: if the settings say so, or after the best
        validation loss so far."""
        if self._save_failed:
            self.writer.finish()  # raises the error of a failed save
        self._ends_run = due.is_last or self.state.best.should_stop
        self._asked = due.save or self._save_asked(self._ends_run)
        return self._asked or (self._is_best and self.config.checkpoint.save_model)

    def save(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Start to write a checkpoint. Training continues after a copy in host memory is made."""
        record: dict[str, Any] = {"progress": self.state.state_dict(), "ends_run": self._ends_run}
        record |= {"metrics": self._metrics, "trackers": self.log.tracker_ids}
        self.memory.enter("save")
        best_loss = self.state.best.loss if self._is_best else None
        self.writer.save(self.state.step, model, optimizer, record, self._asked, best_loss)
        self._throughput.pause()

    def should_stop(self, due: Due) -> bool:
        """Return whether early stopping or max_train_time ends training here.

        Raises:
            Stopped: the run was asked to stop, and its checkpoint is written.
        """
        if (best := self.state.best).should_stop:
            reason = f"the validation loss was best at step {best.step}"
        else:
            reason = (
                f"max_train_time {self.config.train.max_train_time} is over"
                if self._time_is_up
                else ""
            )
        if reason:
            self.facts.add(stopped_early=reason)
        if reason or due.is_last:
            self._ended = f"step {self.state.step} of {self.batches.total_steps}: {reason or 'all steps are done'}"
            return True
        if due.stop is not None:
            self.writer.finish()
            raise runtime.Stopped(due.stop, self.state.step, self.writer.last)
        return False

    def _save_asked(self, ends_run: bool) -> bool:
        return self.writer.is_due(self.state.step, self._ends_epoch, ends_run)

    # After training

    def take_best_weights(self, model: PreTrainedModel) -> None:
        """With early stopping, load the weights with the best validation loss."""
        self.writer.finish()
        best = self.state.best
        self._weights_of = self.state.step
        if (
            step := checkpoint.result_step(self.config, self.state.step, best.step)
        ) != self.state.step:
            kept = checkpoint.open_best(step, self.directory, self.resumed, self.job)
            checkpoint.restore_weights(kept, model)
            self._weights_of = kept.step

    def show_answers(
        self, when: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pad: int
    ) -> None:
        """Log the model's answers to the sample prompts and keep them for the report, under the
        heading `when`."""
        self.memory.enter("evaluation")
        chats = training.sample_chats(self.config.train, self.dataset.report.chat_sample)
        length = self.config.train.sample_tokens
        shown = training.show_answers(when, model, tokenizer, chats, length, pad, self.job)
        self.facts.add_samples(when, shown)
        self._throughput.pause()

    def trainer_record(self) -> dict[str, Any]:
        """Return the description of the run for the model card; see checkpoint.write_model_card."""
        return {**self._outcome(), **self._info}

    def log_result(self, result: Path) -> None:
        """Upload the final model or adapter with the trackers that want it."""
        self.facts.add(weights_of=self._weights_of)
        # other ranks wait for it
        seconds = parse_duration(self.config.train.collective_timeout) / 2
        self.log.log_result(result, self._outcome(), seconds)

    def log_summary(self, recipes: Path) -> None:
        """Log the results, the files and the next commands. `recipes` is the recipes' directory."""
        if self.job.is_main:
            best = self.state.best
            seconds = time.monotonic() - self._started_at
            about = (
                self._ended,
                seconds,
                (best.loss, best.step),
                self._weights_of,
                self.dataset.validation is not None,
            )
            runtime.console.print(observe.summary(self.config, self.directory, recipes, *about))

    def _outcome(self) -> dict[str, Any]:
        weights = {"weights_of": self._weights_of, "best_step": self.state.best.step}
        return {"step": self.state.step, "metrics": self._metrics, **weights}


@contextmanager
def start_run(
    requested: Config, sources: dict[str, str], build_model: BuildModel, planner: Path
) -> Iterator[Run]:
    """Start the ranks, and find the checkpoint to resume from.

    Args:
        requested: the settings of the command line and YAML.
        sources: dotted name -> the flag or the YAML line that set it.
        build_model: the recipe's function; the planner runs it on fake tensors.
        planner: path of recipes/plan.py.
    """
    settings = requested.train
    fsdp = requested.fsdp
    # it forks, so before any thread starts
    preflight = Preflight(build_model, off=requested.memory.no_plan)
    timeout = parse_duration(settings.collective_timeout)
    fraction = settings.device_memory_fraction
    degree = models.shard_degree(fsdp)
    with (
        runtime.start(settings.device, degree, fsdp.fsdp_cpu_offload, fraction, timeout) as job,
        observe.MemoryMonitor(job) as memory,
        explain_errors(requested, job, memory, planner),
    ):
        runtime.set_quiet(requested.tracking.quiet)
        resumed = checkpoint.find_checkpoint(requested.checkpoint, job)
        config = training.settle_format(
            checkpoint.resolve_precision(requested, sources, job, resumed)
        )
        log.info("\n  ".join(["Settings that differ from the defaults:", *differences(config)]))
        run = Run(
            settle_checkpointing(config, job.device.type), sources, job, memory, resumed, preflight
        )
        yield run
