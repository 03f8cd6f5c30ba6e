"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), asked of a model that is loaded
already. lm_eval is an extra: only this file imports it, and only when tasks are asked for."""

import contextlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase, set_seed
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError, reason
from llama_ft.evaluation.flags import EvaluateFlags
from llama_ft.runtime import Runtime

Metrics = dict[str, dict[str, Any]]  # task -> metric -> {"value": ..., "stderr": ... or None}


def find_tasks(flags: EvaluateFlags, job: Runtime) -> dict[str, Any]:
    """Find the tasks and load their questions, before a model is loaded; return what lm_eval's TaskManager has made."""
    from lm_eval.tasks import TaskManager

    by_name = any(not name.endswith((".yaml", ".yml")) for name in flags.tasks)
    with job.local_main_process_first(), _quiet(job):
        try:
            manager = TaskManager(include_defaults=by_name)
            loaded: dict[str, Any] = manager.load(flags.tasks)
        except Exception as error:  # of yaml, jinja, datasets, the Hub or the task's own code
            raise UserError(f"--tasks {','.join(flags.tasks)}: cannot be loaded ({reason(error)}).") from error
    for task in loaded["tasks"].values():  # the rest of this function and the seeds are as in lm_eval.simple_evaluate
        task.set_fewshot_seed(seed=1234)
        own = task.get_config("num_fewshot")
        if own is None or (own != 0 and flags.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=flags.num_fewshot or 0)
    return loaded


def ask_tasks(
    loaded: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    flags: EvaluateFlags,
    job: Runtime,
) -> Metrics:
    """Ask a model all questions; every rank asks the same ones.

    Args:
        loaded: what `find_tasks` returns.
        model: in eval mode, sharded with flags.enable_fsdp.
        tokenizer: its own.
        flags: limit, batch_size and apply_chat_template.
        job: the ranks; all of them call this.

    Returns:
        Task -> metric -> value and stderr.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    # It is tied already, and transformers' way fails if an adapter wraps the embedding or the head.
    model.tie_weights = lambda *_, **__: None  # type: ignore[method-assign]
    set_seed(1234)
    random.seed(0)
    try:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=flags.batch_size)
        with _quiet(job):
            found = evaluate(
                lm=lm,
                task_dict=loaded,
                limit=flags.limit,
                log_samples=False,
                apply_chat_template=flags.apply_chat_template,
                fewshot_as_multiturn=True,
            )
    except (ValueError, AssertionError) as error:  # such as tasks with images, or that run the model's code
        raise UserError(f"--tasks: lm-evaluation-harness cannot ask them: {reason(error)}.") from error
    return _metrics(found)


@contextlib.contextmanager
def _quiet(job: Runtime) -> Iterator[None]:
    """Show only errors of lm_eval's log, and its progress bars only in a terminal."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    is_shown = job.is_main and sys.stderr.isatty()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(sys.stderr if is_shown else nowhere):
        yield


def _metrics(found: Any) -> Metrics:
    """lm_eval's {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}, in order; a group's own mean before its tasks."""
    metrics: Metrics = {}
    for task, values in {**found.get("groups", {}), **found["results"]}.items():
        metrics[task] = {}
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{chosen}")
                stderr = error if isinstance(error, int | float) else None
                metrics[task][metric if chosen == "none" else key] = {"value": value, "stderr": stderr}
    return metrics
