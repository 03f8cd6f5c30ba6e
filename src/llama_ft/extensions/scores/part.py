"""Tasks of lm-evaluation-harness at the end of a run, for --eval_tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from llama_ft.evaluation.flags import EvaluateFlags
from llama_ft.evaluation.measure import find_tasks, run_tasks
from llama_ft.evaluation.results import Evaluated, describe, write_json
from llama_ft.processes import replace_text
from llama_ft.run import Part
from llama_ft.runtime import log

if TYPE_CHECKING:
    from llama_ft.run.inputs import RunInputs
    from llama_ft.run.setup import Setup
    from llama_ft.run.training_run import TrainingRun

RESULTS = "tasks.json"  # in the directory of the run; in the form of evaluate.py --output


class FinalTasks(Part):
    """Asks the final model the questions of --eval_tasks. All ranks create it together.

    Raises:
        UserError: lm_eval is not installed, or a task cannot be loaded.
    """

    def __init__(self, setup: Setup, inputs: RunInputs) -> None:
        settings = inputs.config.train
        self._tokenizer = inputs.tokenizer
        self._flags = EvaluateFlags(tasks=settings.eval_tasks, limit=settings.eval_tasks_limit)
        self._tasks: Any = find_tasks(settings.eval_tasks, setup.ranks, "--eval_tasks")

    def ended(self, run: TrainingRun, how: Literal["finished", "stopped"]) -> None:
        """Evaluate the final model, log a table, and write it into the directory of the run."""
        if how == "stopped":
            return
        built = run.built
        flags = self._flags
        config = built.mixers.config if built.mixers is not None else built.model.config
        log.info(f"Tasks of lm-evaluation-harness: {', '.join(flags.tasks)}")
        attention = config._attn_implementation or ""
        # packed attention is for packed sequences, and lm_eval gives padded batches
        config._attn_implementation = attention.removeprefix("packed_") or None
        built.model.eval()
        try:
            metrics = run_tasks(self._tasks, built.model, self._tokenizer, flags, run.ranks)
        finally:
            config._attn_implementation = attention or None
        if run.ranks.is_main:
            results = [Evaluated("final model", "", held_out=None, tasks=metrics)]
            log.info(f"\n{describe(results, '', flags.limit)}")
            text = write_json(results, "", {"limit": flags.limit})
            replace_text(run.directory / RESULTS, text)
            log.info(f"\nResults of the tasks: {run.directory / RESULTS}")
