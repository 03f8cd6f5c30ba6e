"""Directory, logs, checkpoints and evaluation of a run. The recipe computes losses, gradients and
updates."""

import dataclasses
import math
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, data, models, observe, runtime, training
from llama_ft.config import Config, parse_duration, to_yaml
from llama_ft.config.attempts import describe_attempts
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.batches.prefetch import StepBatches
from llama_ft.plan.spare_memory import use_spare_memory
from llama_ft.run.save_requests import SaveRequests
from llama_ft.run.setup import Setup, end_run, take_newer
from llama_ft.runtime import log
from llama_ft.runtime.ends.exit import Stop
from llama_ft.training.objectives.base import Objective
from llama_ft.training.step import StepOutcome

PICTURES_SHOWN = 4  # per answer in the report
Metrics = dict[str, Any]  # key of metrics.jsonl -> number, or a list with one number per rank


class TrainingRun:
    """A run whose directory is open on this rank, see `open_run`.

    Args:
        setup: what was known before, with all choices made in its `config`.
        inputs: the result of `Setup.check_inputs`, and the run's attempts.
        dataset: the tokenized data.
        batches: the plan of all steps.
        model: loaded, on this rank's device.
        scores: of generated answers, for --score.
        directory: of the run, created.
        uploads: to --save_to; None without.

    Attributes:
        config, ranks, memory, resumed, dataset, batches, directory: as above and in `Setup`.
        facts: further contents of the report, in facts.json.
        writer: of checkpoints.
        log: metrics.jsonl, trackers and progress.
        throughput: the time of each step.
        state: the progress, which checkpoints save.
        stop: the request to stop the run, or None.
        unread: steps whose loss was not read yet.
        metrics: of the newest step.
        weights_of: the step of the model's weights after training.
        ended: why training has ended, for the summary.
    """

    def __init__(
        self,
        setup: Setup,
        inputs: dict[str, Any],
        dataset: data.TokenizedData,
        batches: data.TrainingBatches,
        model: PreTrainedModel,
        scores: training.AnswerScores,
        directory: Path,
        uploads: checkpoint.Uploads | None = None,
    ) -> None:
        config = setup.config
        self.config = config
        self.ranks = setup.ranks
        self.memory = setup.memory
        self.resumed = setup.resumed
        self.dataset = dataset
        self.batches = batches
        self.directory = directory
        self.uploads = uploads
        self._scores = scores
        self.state = training.TrainState(config.train)
        self.metrics: Metrics = {}
        resumed_log = None
        if self.resumed is not None:
            saved = self.resumed.trainer
            self.state.load_state_dict(saved["progress"])
            self.metrics = saved["metrics"]
            resumed_log = observe.ResumedLog(
                step=self.resumed.step,
                directory=self.resumed.run,
                tracker_ids=saved["trackers"],
            )
        self._description = checkpoint.describe_run(config) | inputs
        self._started_at = setup.started_at
        self._first_step_at = math.inf  # of this launch, in seconds
        last_step = batches.total_steps
        self._snapshot_step = min(self.state.step + observe.SNAPSHOT_STEPS, last_step)
        self.stop: Stop | None = None
        self.unread = training.PendingMetrics(self.ranks.device)
        self.weights_of = self.state.step
        self.ended = "no further step"
        self.facts = observe.RunMetadata(directory, self.ranks.is_main)
        self.facts.add(
            environment=observe.environment(self._description["versions"], setup.layout),
            data=dataset.facts(),
            attempts=self._description["attempts"],
            total_steps=last_step,
        )
        hooks = checkpoint.SaveHooks() if uploads is None else uploads.hooks()
        self.writer = checkpoint.CheckpointWriter(
            directory, config.checkpoint, self._description, self.ranks, hooks
        )
        if uploads is not None:
            uploads.add_missing()
        dtype = runtime.PRECISIONS[config.train.precision].compute
        self._save_requests = SaveRequests(directory, self.ranks)
        self.throughput = observe.ThroughputMeter(
            model, config.profile, dtype, directory, self.facts, self.ranks
        )
        self._own_work = observe.OwnWork(model, self.ranks)
        self._waited_seconds = 0.0  # for the batches of the current step
        self._slow_ranks = observe.SlowRanks(self.ranks)
        changes = describe_attempts(self._description["attempts"])
        settings = dataclasses.asdict(config) | ({"resumes": changes} if changes else {})
        self.log = observe.RunLog(
            directory, config.tracking, settings, last_step, self.ranks.rank, resumed_log
        )

    # Training

    def restore(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Load weights, optimizer and random number generators of the checkpoint to resume from, if
        there is one."""
        if self.resumed is not None:
            checkpoint.restore(self.resumed, model, optimizer, self.ranks)

    @contextmanager
    def training(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The block of the training loop: steps are logged and measured, and signals wait for the
        end of a step."""
        self.memory.begin_training(model, optimizer, self.facts)
        saves = self.writer.is_due(self.state.step, ends_epoch=False, ends_run=True)
        with (
            self.log.training(),
            self.writer,
            self.ranks.signals.between_steps(self.config.train.stop_after, saves),
            self.throughput,
        ):
            yield

    @property
    def remaining_steps(self) -> Generator[StepBatches, None, None]:
        """Return the batches of the remaining steps, on this rank."""
        last = self.batches.total_steps
        if self.state.best.should_stop:
            last = self.state.step
        return self.batches.steps(self.state.step + 1, last, self.state.position)

    def begin_step(
        self, step: StepBatches, waited_seconds: float, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Start to measure a step. `waited_seconds` is how long training waited for its batches."""
        lengths = [length for batch in step.batches for length in batch.example_lengths]
        targets = sum(batch.target_tokens for batch in step.batches)
        self.throughput.begin_step(step.step, lengths, targets, waited_seconds)
        self._waited_seconds = waited_seconds
        self._own_work.begin_step(waited_seconds)
        self._first_step_at = min(self._first_step_at, time.monotonic())
        if step.step == 1:
            log.info(data.describe_first_batch(step.batches[0], tokenizer))

    def _gather_numbers(self, step: StepBatches) -> dict[str, torch.Tensor]:
        """Return the numbers of all ranks by name, float64 [ranks], with one all-gather between
        hosts."""
        numbers = {
            "tokens": sum(batch.tokens for batch in step.batches),  # without padding
            "flops": self.throughput.flops,  # model FLOPs for these tokens
            "host_peak_bytes": self.memory.host_peak_bytes,  # highest so far
            "device_peak_bytes": self.memory.device_peak_bytes,
            "stop_asked": self.ranks.signals.asked(),  # see StopSignals
            "save_failed": self.writer.has_failed,  # 1: the pending checkpoint was not written
            "save_requested": self._save_requests.read(),
            "seconds": time.monotonic() - self._first_step_at,  # of this launch
            "own_work": self._own_work.seconds(),  # seconds in which the rank itself worked
            "waited": self._waited_seconds,  # seconds of them in which it waited for its batches
        }
        gathered = self.ranks.all_gather_floats(*numbers.values())
        return dict(zip(numbers, gathered.unbind(1), strict=True))

    def end_step(self, outcome: StepOutcome) -> None:
        """Count a step whose weights are updated, gather the numbers of all ranks, and set what is
        due after it."""
        settings = self.config.train
        step = outcome.batches
        numbers = self._gather_numbers(step)
        tokens = numbers["tokens"].sum().item()
        flops = numbers["flops"].sum().item()
        self.memory.end_step()
        self.throughput.end_step(step.step, tokens, flops)
        if self.ranks.world_size > 1:
            self._slow_ranks.add(numbers["own_work"], numbers["waited"], numbers["flops"])
        self.state.step = step.step
        self.state.position = step.position
        self.state.target_tokens += step.target_tokens
        if self.config.memory.memory_snapshot and step.step == self._snapshot_step:
            name = f"step-{step.step}"
            file = observe.write_snapshot(self.directory, self.ranks.rank, name)
            log.info(f"Memory snapshot: {file}")
        time_is_up = False
        if settings.max_train_time is not None:
            seconds = numbers["seconds"][0].item()  # all ranks use rank 0's clock
            time_is_up = seconds >= parse_duration(settings.max_train_time)
        is_last = time_is_up or step.step == self.batches.total_steps
        self.stop = self.ranks.signals.agreed(numbers["stop_asked"])
        ends_run = is_last or self.stop is not None
        if ends_run:
            self._announce_end()
        evaluates = training.is_due(step.step, settings.eval_steps, step.ends_epoch or is_last)
        answers = training.is_due(step.step, settings.sample_steps, False)
        is_save_requested = bool(numbers["save_requested"].any())
        if is_save_requested:
            log.info(f"A checkpoint of step {step.step} was requested.")
        is_save_due = self.writer.is_due(step.step, step.ends_epoch, ends_run)
        outcome.numbers = numbers
        outcome.is_last = is_last
        outcome.time_is_up = time_is_up
        outcome.is_stopping = self.stop is not None
        outcome.save_failed = bool(numbers["save_failed"].any())
        outcome.evaluation = evaluates and bool(self.dataset.validations)
        outcome.answers = answers and not is_last
        outcome.save = is_save_requested or is_save_due
        is_logged_anyway = outcome.evaluation or is_last
        outcome.is_logged = training.is_due(step.step, settings.log_steps, is_logged_anyway)

    def step_metrics(self, outcome: StepOutcome, lr: float) -> Metrics:
        """Return the metrics of a step that are known before its loss is read. Entries that the
        recipe adds, numbers or tensors of one number, are logged like these. Rank 0 logs its own."""
        numbers = outcome.numbers
        peaks = torch.stack([numbers["host_peak_bytes"], numbers["device_peak_bytes"]], dim=1)
        self.metrics = {
            "epoch": outcome.batches.epochs_seen,
            "tokens": self.state.target_tokens,
            "train/lr": lr,
            **observe.memory_metrics(peaks),
            **self.state.scale.metrics(),
        }
        outcome.metrics = self.metrics
        return self.metrics

    def read_losses(self, outcome: StepOutcome) -> list[StepOutcome]:
        """Return the steps whose loss is known now, with it in their metrics. On a GPU that is the
        step before, unless this step's loss is needed.

        Raises:
            RunFailure: a loss or a gradient norm is not finite.
        """
        steps = self.unread.push(outcome)
        for step in steps:
            training.read_loss_or_stop(step, self.writer.finish, self.ranks)
            step.metrics.update(self.throughput.metrics(step.step))
            for name, value in step.metrics.items():
                if isinstance(value, torch.Tensor):  # of the recipe; its step has ended
                    step.metrics[name] = value.item()
        self.ranks.record_step(outcome.step)
        return steps

    def log_steps(self, steps: Sequence[StepOutcome]) -> None:
        """Log the steps that are due by log_steps, the last step, and those with an evaluation."""
        for step in steps:
            if step.is_logged:
                self.log.log_step(step.step, step.metrics | self.writer.timings())

    def evaluate(
        self,
        built: models.BuiltModel,
        objective: Objective,
        outcome: StepOutcome | None = None,
    ) -> Metrics:
        """Return the validation loss and related metrics, also of each validation set with a name.
        All ranks call it together.

        A signal abandons the evaluation. After a step, the result is then empty and the step's
        checkpoint can be saved.

        Args:
            built: the model, in training or evaluation mode.
            objective: of the run.
            outcome: of the step after which it is due; None before step 1.

        Raises:
            Stopped: a signal has arrived before step 1.
        """
        self.memory.enter("evaluation")
        settings = self.config.train
        layout = dataclasses.replace(self.batches.layout, micro_batch=settings.val_batch_size)
        sets = self.dataset.validations
        try:
            sums = {
                name: training.loss_sums(
                    built, objective, samples, layout, settings.max_eval_step, self.ranks
                )
                for name, samples in sets.items()
            }
            scores = self._scores.score(built.model, layout.pad_token_id, self.ranks)
        except runtime.Stopped as stopped:
            self._abandon("The evaluation", stopped, outcome)
            return {}
        metrics = training.evaluation_metrics(sums, scores, objective.counts_tokens)
        step = 0 if outcome is None else outcome.step
        for name, score in scores.items():
            title = f"step {step}, {name}" if name else f"step {step}"
            self._keep_answers(title, score.samples, "scored")
        self.throughput.pause()
        result = {f"eval/{name}": value for name, value in metrics.items()}
        self.state.best.check(result)
        return result

    def show_answers(
        self,
        when: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        outcome: StepOutcome | None = None,
    ) -> None:
        """Log the model's answers to the sample prompts and keep them for the report, under the
        heading `when`. A signal abandons them, as in `evaluate`."""
        self.memory.enter("evaluation")
        report = self.dataset.report
        asked = training.sample_prompts(
            self.config.train, report.chat_sample, report.chat_tools, self.dataset.prompt_format
        )
        length = self.config.train.sample_tokens
        pad = self.batches.layout.pad_token_id
        try:
            answers = training.answer_prompts(
                model, tokenizer, asked, length, pad, self.ranks, self.dataset.images
            )
        except runtime.Stopped as stopped:
            self._abandon("The generation of sample answers", stopped, outcome)
            return
        training.log_answers(when, answers)
        self._keep_answers(when, answers, "samples")
        self.throughput.pause()

    def _keep_answers(self, when: str, answers: list[dict[str, Any]], kind: str) -> None:
        """Keep answers for the report, with small pictures of their images. A picture is stored
        once, although each evaluation shows it."""
        kept = []
        pictures = {}
        for answer in answers if self.ranks.is_main else ():
            urls = map(data.thumbnail, answer.get("images", ())[:PICTURES_SHOWN])
            named = {xxhash.xxh3_64_hexdigest(url.encode()): url for url in urls if url}
            pictures.update(named)
            kept.append({**answer, "images": list(named)} if named else answer)
        if pictures:
            self.facts.add_pictures(pictures)
        self.facts.add_samples(when, kept, kind)

    def _abandon(self, what: str, stopped: runtime.Stopped, outcome: StepOutcome | None) -> None:
        """Log that `what` was abandoned. Before step 1 and after the last step there is nothing to
        save, so the run ends here."""
        log.info(f"{what} was abandoned.")
        self.stop = stopped.stop
        if outcome is None:
            raise self.stopped()

    def save_is_due(self, outcome: StepOutcome, is_best: bool) -> bool:
        """Return whether to save after this step: if the settings say so, or after the best
        validation loss so far. Raises the error of a failed save."""
        if outcome.save_failed:
            self.writer.finish()
        is_kept_as_best = is_best and self.config.checkpoint.save_model
        return self._is_save_asked(outcome) or is_kept_as_best

    def save(
        self,
        outcome: StepOutcome,
        is_best: bool,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Start to write a checkpoint. Training continues after a copy in host memory is made. The
        last one is written before this returns."""
        self.memory.enter("save")
        description = {
            "progress": self.state.state_dict(),
            "ends_run": self._ends_run(outcome),
            "metrics": self.metrics,
            "trackers": self.log.tracker_ids,
        }
        best_value = self.state.best.value if is_best else None
        is_asked = self._is_save_asked(outcome)
        self.writer.save(
            outcome.step,
            model,
            optimizer,
            description,
            is_asked,
            best_value,
            is_final=self._ends_run(outcome) or self.stop is not None,
        )
        self.throughput.pause()

    def _ends_run(self, outcome: StepOutcome) -> bool:
        return outcome.is_last or self.state.best.should_stop

    def _is_save_asked(self, outcome: StepOutcome) -> bool:
        """Return whether the settings or a request to stop ask for a checkpoint."""
        ends_epoch = outcome.batches.ends_epoch
        ends_run = self._ends_run(outcome) or self.stop is not None
        return outcome.save or self.writer.is_due(outcome.step, ends_epoch, ends_run)

    def reason_to_end_early(self, outcome: StepOutcome) -> str | None:
        """Return why training ends before its last step, or None: early stopping, or
        max_train_time."""
        best = self.state.best
        if best.should_stop:
            return f"the {best.title} was best at step {best.step}"
        if outcome.time_is_up:
            return f"max_train_time {self.config.train.max_train_time} is over"
        return None

    def _announce_end(self) -> None:
        """Tell a successor, which waits for the directory, that its wait is worth it."""
        if self.ranks.lock is not None:
            self.ranks.lock.announce_end()

    def end(self, reason: str) -> None:
        """Keep why training has ended, for the summary."""
        self._announce_end()
        self.ended = f"step {self.state.step} of {self.batches.total_steps}: {reason}"

    def must_stop(self, is_over: bool) -> bool:
        """Return whether a request to stop ends the run now. If training is over, --stop_after
        leaves time for the export; a signal does not."""
        if self.stop is None:
            return False
        is_signal = self.stop.exit_code != 0
        return is_signal or not is_over

    def stopped(self) -> runtime.Stopped:
        """Return the exception that ends a run by a request to stop, after its checkpoint is
        written. After a signal, an upload has only the time that launchers leave."""
        assert self.stop is not None
        saved = self.writer.finish()
        is_signal = self.stop.exit_code != 0
        left = self.ranks.signals.seconds_left(checkpoint.upload_grace_seconds())
        self.writer.finish_uploads(left if is_signal else None)
        return runtime.Stopped(self.stop, self.state.step, saved)

    # After training

    def load_best_weights(self, model: PreTrainedModel) -> None:
        """With early stopping, load the weights with the best validation loss."""
        self.writer.finish()
        self.weights_of = self.state.step
        step = checkpoint.result_step(self.config, self.state.step, self.state.best.step)
        if step != self.state.step:
            if self.uploads is not None and not self.ranks.shares_disk:
                self.writer.finish_uploads()
                store = self.uploads.store
                checkpoint.fetch_to_each_disk(store, self.directory, step, self.ranks)
            kept = checkpoint.open_best(step, self.directory, self.resumed, self.ranks)
            checkpoint.restore_weights(kept, model)
            self.weights_of = kept.step

    def trainer_record(self) -> dict[str, Any]:
        """Return the description of the run for the model card; see export.write_model_card."""
        return {**self._outcome(), **self._description}

    def log_result(self, result: Path) -> None:
        """Upload the final model or adapter with the trackers that want it."""
        self.facts.add(weights_of=self.weights_of)
        # the other ranks wait for it
        seconds = parse_duration(self.config.train.collective_timeout) / 2
        self.log.log_result(result, self._outcome(), seconds)

    def finish_uploads(self) -> None:
        """With --save_to, wait for the checkpoints, and upload the final model or adapter. The
        report and the status follow when they are written."""
        self.writer.finish()
        self.writer.finish_uploads()
        if self.uploads is not None:
            self.uploads.put_model()

    def log_summary(self, recipes: Path) -> None:
        """Log the results, the files and the next commands. `recipes` is the recipes' directory."""
        if not self.ranks.is_main:
            return
        best = self.state.best
        outcome = observe.RunOutcome(
            ended=self.ended,
            seconds=time.monotonic() - self._started_at,
            best_of=best.title,
            best_value=best.value,
            best_step=best.step,
            weights_of=self.weights_of,
            leaks=self.dataset.leaks,
            has_validation=bool(self.dataset.validations),
            uploads=self.uploads.describe() if self.uploads is not None else "",
        )
        runtime.console.print(observe.summary(self.config, self.directory, recipes, outcome))

    def _outcome(self) -> dict[str, Any]:
        return {
            "step": self.state.step,
            "metrics": self.metrics,
            "weights_of": self.weights_of,
            "best_step": self.state.best.step,
        }


@contextmanager
def open_run(
    setup: Setup,
    config: Config,
    inputs: dict[str, Any],
    dataset: data.TokenizedData,
    batches: data.TrainingBatches,
    built: models.BuiltModel,
    scores: training.AnswerScores,
) -> Iterator[TrainingRun]:
    """Create the run's directory (nothing is written before) and start the trackers.

    Args:
        setup: what was known before.
        config: the settings, with all choices made.
        inputs: the result of `Setup.check_inputs`.
        dataset: the tokenized data.
        batches: the plan of all steps.
        built: the loaded model; its FSDP units are for the report.
        scores: of generated answers, for --score.
    """
    ranks = setup.ranks
    name = config.model.model_name
    directory = checkpoint.create_run_directory(config.checkpoint, name, ranks, setup.resumed)
    log.info(f"Run directory: {directory}")
    resumed = setup.resumed
    uploads = checkpoint.open_uploads(setup.store, directory, config.checkpoint, resumed, ranks)
    setup = take_newer(setup, config, inputs, batches, uploads)
    resumed = setup.resumed
    at_end = partial(end_run, directory, uploads, ranks)
    step = resumed.step if resumed else 0
    ranks.begin_run(directory, step, at_end, setup.global_batch)
    attempts = checkpoint.attempts_of(resumed, checkpoint.describe_run(config) | inputs, ranks)
    inputs = inputs | {"attempts": attempts}
    if ranks.is_main:
        text = to_yaml(config, _about_config(directory, attempts))
        (directory / "config.yaml").write_text(text)
        if dataset.bad_samples is not None:
            shutil.copyfile(dataset.bad_samples, directory / BAD_SAMPLES_FILE)
    planned_share = setup.preflight.report(directory, ranks)
    use_spare_memory(planned_share, built, config, dataset.longest_example, ranks)
    setup = dataclasses.replace(setup, config=config)
    run = TrainingRun(setup, inputs, dataset, batches, built.model, scores, directory, uploads)
    run.facts.add(units=[dataclasses.asdict(unit) for unit in built.units])
    with run.log:
        yield run


def _about_config(directory: Path, attempts: Sequence[dict[str, Any]]) -> str:
    """Return the comment of config.yaml: how to use it, and what held before a resume."""
    repeats = f"--config {directory}/config.yaml repeats this run"
    changes = describe_attempts(attempts)
    if not changes:
        return repeats
    return "\n".join(
        [f"{repeats} with the settings of its last steps. Resumes have changed,", *changes]
    )
