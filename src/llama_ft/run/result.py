"""What a run leaves behind: the weights of its final model, and its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ft import checkpoint, door
from llama_ft.runtime import Ranks

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun


def load_best_weights(run: TrainingRun) -> None:
    """With early stopping, load the weights with the best validation loss."""
    run.writer.finish()
    run.weights_of = run.state.step
    step = checkpoint.result_step(run.config, run.state.step, run.state.best.step)
    if step != run.state.step:
        if not run.ranks.shares_disk:
            run.writer.finish_uploads()
            run.remote.fetch(step)
        best = checkpoint.open_best(step, run.directory, run.resumed, run.ranks)
        checkpoint.restore_weights(best, run.built.model)
        run.weights_of = best.step


def outcome_of(run: TrainingRun) -> dict[str, Any]:
    """Return the last step and its metrics, and the steps of the weights and of the best ones."""
    return {
        "step": run.state.step,
        "metrics": run.metrics,
        "weights_of": run.weights_of,
        "best_step": run.state.best.step,
    }


def trainer_record(run: TrainingRun) -> dict[str, Any]:
    """Return the description of a run for the model card; see export.write_model_card."""
    return {**outcome_of(run), **run.description}


def at_end(directory: Path, remote: checkpoint.RemoteRun, ranks: Ranks) -> Callable[[], None]:
    """Return what is called when a run has ended in any way: it writes its report, and uploads it.
    A rank that ends the run on another disk than rank 0's has only the status."""
    has_log = ranks.disk_leader == 0
    functions = door.functions_at_end() if has_log else []  # nothing is imported after an error

    def end_run() -> None:
        for function in functions:
            function(directory)
        if ranks.status is not None:
            remote.put_outcome(ranks.status.step, has_log)

    return end_run
