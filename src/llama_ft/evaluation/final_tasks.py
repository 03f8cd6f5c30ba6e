"""Tasks of lm-evaluation-harness at the end of a run, for --eval_tasks."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from llama_ft.config import TrainConfig
from llama_ft.evaluation.flags import EvaluateFlags
from llama_ft.evaluation.measure import find_tasks, run_tasks
from llama_ft.evaluation.results import Evaluated, describe, write_json
from llama_ft.models import BuiltModel
from llama_ft.processes import replace_text
from llama_ft.runtime import Ranks, log

RESULTS = "tasks.json"  # in the directory of the run; in the form of evaluate.py --output


class FinalTasks:
    """Asks the final model the questions of --eval_tasks. Without it, `run` does nothing.

    Args:
        settings: eval_tasks and eval_tasks_limit.
        ranks: the ranks. All of them call every method together.

    Raises:
        UserError: lm_eval is not installed, or a task cannot be loaded.
    """

    def __init__(self, settings: TrainConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._flags = EvaluateFlags(tasks=settings.eval_tasks, limit=settings.eval_tasks_limit)
        self._tasks: Any = None
        if settings.eval_tasks:
            self._tasks = find_tasks(settings.eval_tasks, ranks, "--eval_tasks")

    def run(self, built: BuiltModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
        """Evaluate the model, log a table, and write it into the directory of the run."""
        if self._tasks is None:
            return
        flags = self._flags
        config = built.mixers.config if built.mixers is not None else built.model.config
        log.info(f"Tasks of lm-evaluation-harness: {', '.join(flags.tasks)}")
        attention = config._attn_implementation or ""
        # packed attention is for packed sequences, and lm_eval gives padded batches
        config._attn_implementation = attention.removeprefix("packed_") or None
        built.model.eval()
        try:
            found = run_tasks(self._tasks, built.model, tokenizer, flags, self._ranks)
        finally:
            config._attn_implementation = attention or None
        if self._ranks.is_main:
            results = [Evaluated("final model", "", held_out=None, tasks=found)]
            log.info(f"\n{describe(results, '', flags.limit)}")
            text = write_json(results, "", {"limit": flags.limit})
            replace_text(directory / RESULTS, text)
            log.info(f"\nResults of the tasks: {directory / RESULTS}")
