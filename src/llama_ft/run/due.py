"""What is due after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_ft.config import parse_duration
from llama_ft.training import StepOutcome, is_due

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


def set_due(run: TrainingRun, outcome: StepOutcome) -> None:
    """Set what is due after a step, by the settings, the end of an epoch, signals and max_train_time:
    the same on all ranks. A part may add a checkpoint."""
    settings = run.config.train
    step = outcome.batches
    numbers = outcome.numbers
    if settings.max_train_time is not None:
        seconds = numbers["seconds"][0].item()  # all ranks use rank 0's clock
        outcome.time_is_up = seconds >= parse_duration(settings.max_train_time)
    outcome.is_last = outcome.time_is_up or step.step == run.batches.total_steps
    run.stop = run.ranks.signals.agreed(numbers["stop_asked"])
    outcome.is_stopping = run.stop is not None
    ends_run = outcome.is_last or outcome.is_stopping
    if ends_run:
        run.announce_end()
    outcome.save_failed = bool(numbers["save_failed"].any())
    evaluates = is_due(step.step, settings.eval_steps, step.ends_epoch or outcome.is_last)
    outcome.evaluation = evaluates and bool(run.dataset.validations)
    answers = is_due(step.step, settings.sample_steps, False)
    outcome.answers = answers and not outcome.is_last
    outcome.save = run.writer.is_due(step.step, step.ends_epoch, ends_run)
    is_logged_anyway = outcome.evaluation or outcome.is_last
    outcome.is_logged = is_due(step.step, settings.log_steps, is_logged_anyway)
