"""Directory, logs, checkpoints and evaluation of a run. The recipe computes losses, gradients and
updates."""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from llama_ft import checkpoint, data, models, observe, runtime, training
from llama_ft.checkpoint import reader
from llama_ft.data import StepBatches
from llama_ft.run.due import set_due
from llama_ft.run.inputs import RunInputs
from llama_ft.run.parts import Part, gather_numbers
from llama_ft.run.setup import Setup
from llama_ft.runtime import log
from llama_ft.runtime.ends.exit import Stop
from llama_ft.training import Objective, StepOutcome
from llama_ft.training.objectives.base import with_prepared_media

Metrics = dict[str, Any]  # key of metrics.jsonl -> number, or a list with one number per rank


class TrainingRun:
    """A run whose directory is open on this rank, see `open_run`.

    Args:
        setup: what was known before, with all choices made in its `config`.
        inputs: the result of `resolve_inputs`; its description is complete.
        built: the model, loaded.
        writer: of checkpoints.
        run_log: metrics.jsonl, trackers and progress.
        parts: what the run does in addition to training.

    Attributes:
        config, ranks, memory, resumed: see `Setup`.
        dataset, batches, built, writer, log: as above.
        remote: see `Setup`.
        directory, description: of the run; the latter for trainer.json.
        facts: further contents of the report, in facts.json.
        throughput: the time of each step.
        state: the progress, which checkpoints save.
        waited_seconds: how long the current step has waited for its batches.
        stop: the request to stop the run, or None.
        metrics: of the newest step.
        weights_of: the step of the model's weights after training.
        ended: why training has ended, for the summary.
        summary_lines: of parts, for the summary.
    """

    def __init__(
        self,
        setup: Setup,
        inputs: RunInputs,
        built: models.BuiltModel,
        writer: checkpoint.CheckpointWriter,
        run_log: observe.RunLog,
        parts: Sequence[Part],
    ) -> None:
        config = setup.config
        self.config = config
        self.ranks = setup.ranks
        self.memory = setup.memory
        self.resumed = setup.resumed
        self.remote = setup.remote
        self.dataset = inputs.dataset
        self._evaluation = inputs.evaluation
        self._tokenizer = inputs.tokenizer
        self.description = inputs.description
        self.batches = inputs.batches
        self.built = built
        self.writer = writer
        self.directory = writer.run
        self.log = run_log
        self._parts = parts
        self.state = training.TrainState(config.train)
        self.metrics: Metrics = {}
        if self.resumed is not None:
            self.state.load_state_dict(self.resumed.trainer["progress"])
            self.metrics = self.resumed.trainer["metrics"]
        self.waited_seconds = 0.0
        self._first_step_at = math.inf  # of this launch, in seconds
        self.stop: Stop | None = None
        self._unread = training.PendingMetrics(self.ranks.device)
        self.weights_of = self.state.step
        self.ended = "no further step"
        self.summary_lines = list[str]()
        self.facts = observe.RunMetadata(self.directory, self.ranks.is_main)
        dtype = runtime.PRECISIONS[config.train.precision].compute
        self.throughput = observe.ThroughputMeter(
            built.model, config.profile, dtype, self.directory, self.facts, self.ranks
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
            self._saving_if_stopped(model, optimizer),
        ):
            yield

    @contextmanager
    def _saving_if_stopped(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer
    ) -> Iterator[None]:
        """Save what was trained if a signal ends the block while an objective makes the batches of a
        step."""
        try:
            yield
        except runtime.Stopped as stopped:
            if stopped.agreed:  # it is saved
                raise
            self.stop = stopped.stop
            self.announce_end()
            self.log_steps(self.read_losses(None))
            step = self.state.step
            last = self.writer.finish()
            is_saved = last is not None and reader.step_of(last) == step
            if step and not is_saved and self.writer.is_due(step, ends_epoch=False, ends_run=True):
                description = self._description(ends_run=False)
                self.writer.save(step, model, optimizer, description, is_final=True)
            raise self._stopped() from stopped

    @property
    def remaining_steps(self) -> Generator[StepBatches, None, None]:
        """Return the batches of the remaining steps, on this rank."""
        last = self.batches.total_steps
        if self.state.best.should_stop:
            last = self.state.step
        steps = self.batches.steps(self.state.step + 1, last, self.state.position)
        return with_prepared_media(steps, self.built, self.ranks.device)

    def begin_step(self, step: StepBatches, waited_seconds: float) -> None:
        """Start to measure a step. `waited_seconds` is how long training waited for its batches."""
        lengths, targets = _work_of(step)
        processes = self.ranks.data.processes
        self.throughput.begin_step(step.step, lengths, targets, waited_seconds, processes)
        self.waited_seconds = waited_seconds
        for part in self._parts:
            part.before_step(self, step)
        self._first_step_at = min(self._first_step_at, time.monotonic())
        if step.step == 1:
            are_prompts = self.config.preference.entry.make_steps is not None
            log.info(data.describe_first_batch(step.batches[0], self._tokenizer, are_prompts))

    def end_step(self, outcome: StepOutcome, lr: float) -> Metrics:
        """Count a step whose weights are updated, gather the numbers of all ranks, and set what is
        due after it.

        Returns:
            The metrics of the step that are known before its loss is read. Entries that the recipe
            adds, numbers or tensors of one number, are logged like these. Rank 0 logs its own.
        """
        step = outcome.batches  # the objective may have made other batches than planned
        self.throughput.count(*_work_of(step), self.ranks.data.processes)
        own = {
            # without padding; processes that share a sequence share its tokens
            "tokens": sum(batch.tokens for batch in step.batches) / self.ranks.data.processes,
            "flops": self.throughput.flops,  # model FLOPs for these tokens
            "host_peak_bytes": self.memory.host_peak_bytes,  # highest so far
            "device_peak_bytes": self.memory.device_peak_bytes,
            "stop_asked": self.ranks.signals.request(),  # see StopSignals
            "save_failed": self.writer.has_failed,  # 1: the pending checkpoint was not written
            "seconds": time.monotonic() - self._first_step_at,  # of this launch
            "waited": self.waited_seconds,  # for the batches
        }
        numbers = gather_numbers(self, own, self._parts)
        tokens = numbers["tokens"].sum().item()
        flops = numbers["flops"].sum().item()
        self.memory.end_step()
        self.throughput.end_step(step.step, tokens, flops)
        self.state.step = step.step
        self.state.position = step.position
        self.state.target_tokens += step.target_tokens
        outcome.numbers = numbers
        set_due(self, outcome)
        peaks = torch.stack([numbers["host_peak_bytes"], numbers["device_peak_bytes"]], dim=1)
        self.metrics = {
            "epoch": outcome.batches.epochs_seen,
            "tokens": self.state.target_tokens,
            "train/lr": lr,
            **observe.memory_metrics(peaks),
            **self.state.scale.metrics(),
        }
        outcome.metrics = self.metrics
        for part in self._parts:
            part.after_step(self, outcome, self.metrics)
        return self.metrics

    def read_losses(self, outcome: StepOutcome | None) -> list[StepOutcome]:
        """Return the steps whose loss is known now, with it in their metrics. On a GPU that is the
        step before, unless this step's loss is needed. None: no step follows.

        Raises:
            RunFailure: a loss or a gradient norm is not finite.
        """
        steps = self._unread.push(outcome)
        for step in steps:
            training.read_loss_or_stop(step, self.writer.finish, self.ranks)
            step.metrics.update(self.throughput.metrics(step.step))
            for name, value in step.metrics.items():
                if isinstance(value, torch.Tensor):  # of the recipe; its step has ended
                    step.metrics[name] = value.item()
            for part in self._parts:
                part.step_read(self, step)
        self.ranks.record_step(self.state.step)
        return steps

    def log_steps(self, steps: Sequence[StepOutcome]) -> None:
        """Log the steps that are due by log_steps, the last step, and those with an evaluation."""
        for step in steps:
            if step.is_logged:
                self.log.log_step(step.step, step.metrics | self.writer.timings())

    def evaluate(self, objective: Objective, outcome: StepOutcome | None = None) -> Metrics:
        """Return the validation loss and related metrics, also of each validation set with a name.
        All ranks call it together. `outcome`: of the step after which it is due; None before step 1.

        A signal abandons the evaluation. After a step, the result is then empty and the step's
        checkpoint can be saved. Before step 1, Stopped is raised.
        """
        step = 0 if outcome is None else outcome.step
        metrics: Metrics = {}
        with self._evaluating("The evaluation", outcome):
            metrics = self._evaluation.metrics(self, objective, step)
            self.state.best.check(metrics)
        return metrics

    def show_answers(self, when: str, outcome: StepOutcome | None = None) -> None:
        """Log the model's answers to the sample prompts and keep them for the report, under the
        heading `when`. A signal abandons them, as in `evaluate`."""
        with self._evaluating("The generation of sample answers", outcome):
            self._evaluation.show_answers(self, when)

    @contextmanager
    def _evaluating(self, what: str, outcome: StepOutcome | None) -> Iterator[None]:
        """Measure the block, which a signal abandons. Before step 1 and after the last step there is
        nothing to save, so the run ends then."""
        self.memory.enter("evaluation")
        try:
            yield
        except runtime.Stopped as stopped:
            log.info(f"{what} was abandoned.")
            self.stop = stopped.stop
            if outcome is None:
                raise self._stopped() from stopped
        self.throughput.pause()

    def save_is_due(self, outcome: StepOutcome, is_best: bool) -> bool:
        """Return whether to save after this step: if the settings say so, or after the best
        validation loss so far. Raises the error of a failed save."""
        if outcome.save_failed:
            self.writer.finish()
        # an evaluation may have ended the run since `end_step`
        ends_run = self._ends_run(outcome) or self.stop is not None
        if self.writer.is_due(outcome.step, outcome.batches.ends_epoch, ends_run):
            outcome.save = True
        return outcome.save or (is_best and self.config.checkpoint.save_model)

    def save(
        self,
        outcome: StepOutcome,
        is_best: bool,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Start to write a checkpoint. Training continues after a copy in host memory is made; the
        last one is written before this returns."""
        self.memory.enter("save")
        self.writer.save(
            outcome.step,
            model,
            optimizer,
            self._description(self._ends_run(outcome)),
            is_requested=outcome.save,
            best_value=self.state.best.value if is_best else None,
            is_final=self._ends_run(outcome) or self.stop is not None,
        )
        self.throughput.pause()

    def _description(self, ends_run: bool) -> dict[str, Any]:
        """Return what a checkpoint says of the run after its newest step."""
        return {
            "progress": self.state.state_dict(),
            "ends_run": ends_run,
            "metrics": self.metrics,
            "trackers": self.log.tracker_ids,
        }

    def _ends_run(self, outcome: StepOutcome) -> bool:
        return outcome.is_last or self.state.best.should_stop

    def is_over(self, outcome: StepOutcome) -> bool:
        """Return whether training ends after this step: the last one, or by early stopping or
        max_train_time. Raises Stopped by a signal, or by --stop_after if training is not over: it
        leaves time for the export."""
        best = self.state.best
        reason = "all steps are done"
        if best.should_stop:
            reason = f"the {best.title} was best at step {best.step}"
        elif outcome.time_is_up:
            reason = f"max_train_time {self.config.train.max_train_time} is over"
        elif outcome.end_reason:
            reason = outcome.end_reason
        if best.should_stop or outcome.time_is_up or outcome.end_reason:
            self.facts.add(stopped_early=reason)
        is_over = self._ends_run(outcome)
        if self.stop is not None and (self.stop.exit_code != 0 or not is_over):
            raise self._stopped()
        if is_over:
            self.announce_end()
            self.ended = f"step {self.state.step} of {self.batches.total_steps}: {reason}"
        return is_over

    def announce_end(self) -> None:
        """Tell a successor, which waits for the directory, that its wait is worth it."""
        if self.ranks.lock is not None:
            self.ranks.lock.announce_end()

    def _stopped(self) -> runtime.Stopped:
        """Return the exception that ends a run by a request to stop; its checkpoint is written."""
        assert self.stop is not None
        saved = self.writer.finish()
        for part in self._parts:
            part.ended(self, "stopped")
        return runtime.Stopped(self.stop, self.state.step, saved)

    def finish(self) -> None:
        """End the parts of the run after the final model is written: tasks, uploads, summary."""
        self.writer.finish()
        for part in self._parts:
            part.ended(self, "finished")


def _work_of(step: StepBatches) -> tuple[list[int], int]:
    """Return the tokens of each sample of this rank in a step, and the number in the loss."""
    lengths = [length for batch in step.batches for length in batch.example_lengths]
    return lengths, sum(batch.target_tokens for batch in step.batches)
