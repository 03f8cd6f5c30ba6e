"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), asked of a model that is loaded
already. lm_eval is an extra: only this file imports it, and only when tasks are asked for."""

import contextlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.errors import UserError, reason
from llama_ft.evaluation.flags import EvaluateFlags, is_task_file
from llama_ft.runtime import Runtime, log

# lm_eval's own seeds (lm_eval/defaults.py), so that its command line has the same numbers.
RANDOM_SEED, OTHER_SEED = 0, 1234

Metrics = dict[str, dict[str, Any]]  # task -> metric -> {"value": ..., "stderr": ... or None}


class Tasks:
    """Tasks that were found.

    Args:
        loaded: what lm_eval's TaskManager made of their names.
        options: limit, num_fewshot, batch_size and apply_chat_template.
    """

    def __init__(self, loaded: Any, options: EvaluateFlags) -> None:
        self._loaded, self._options = loaded, options

    def ask(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, is_sharded: bool, job: Runtime
    ) -> Metrics | None:
        """Ask a model all questions. Ranks that each hold a whole model share the questions; ranks that share a model
        all ask the same ones.

        Args:
            model: in eval mode.
            tokenizer: its own.
            is_sharded: whether the ranks share one model.
            job: the ranks; all of them call this.

        Returns:
            Task -> metric -> value and stderr, on rank 0.

        Raises:
            UserError: the tasks cannot be asked of this model.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.evaluator_utils import get_sample_size

        options = self._options
        if options.apply_chat_template and not tokenizer.chat_template:
            raise UserError("--apply_chat_template: this model's tokenizer has no chat template. Remove it.")
        sizes = [get_sample_size(task, options.limit) or len(task.eval_docs) for task in self._loaded["tasks"].values()]
        ask_all = is_sharded or job.world_size == 1
        if not ask_all and min(sizes) < job.world_size:
            ask_all = True  # lm_eval fails on a rank that has no question
            log.info("A task has fewer questions than there are ranks, so every rank asks all questions of all tasks.")
        random.seed(RANDOM_SEED)
        numpy.random.seed(OTHER_SEED)
        torch.manual_seed(OTHER_SEED)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=OTHER_SEED)
        try:
            with _quiet(job):
                found = evaluate(
                    lm=_wrapped(model, tokenizer, options.batch_size, is_sharded, ask_all, job),
                    task_dict=self._loaded,
                    limit=options.limit,
                    log_samples=False,
                    apply_chat_template=options.apply_chat_template,
                    fewshot_as_multiturn=True,
                )
        except (ValueError, AssertionError) as error:  # such as tasks with images, or that run the model's code
            raise UserError(f"--tasks: lm-evaluation-harness cannot ask them: {reason(error)}.") from error
        return None if found is None else _metrics(found)


def find_tasks(options: EvaluateFlags, job: Runtime) -> Tasks:
    """Find the tasks and load their questions, before a model is loaded.

    Raises:
        UserError: there is no such task, or its questions cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    by_name = [name for name in options.tasks if not is_task_file(name)]
    if by_name:
        log.info("Looking through the tasks of lm-evaluation-harness ...")
    with job.local_main_process_first(), _quiet(job):
        manager = TaskManager(include_defaults=bool(by_name))
        if unknown := [name for name in by_name if not manager.match_tasks([name])]:
            raise UserError(
                f"--tasks {','.join(unknown)}: lm-evaluation-harness has no such task; `lm-eval ls tasks` lists them.\n"
                "A task of your own is named by its .yaml file."
            )
        names = [found for name in options.tasks for found in (manager.match_tasks([name]) if "*" in name else [name])]
        try:
            loaded = manager.load(names)
        except Exception as error:  # of yaml, jinja, datasets, the hub or the task's own code
            raise UserError(f"--tasks {','.join(options.tasks)}: cannot be loaded ({reason(error)}).") from error
    for task in loaded["tasks"].values():  # as lm_eval.simple_evaluate sets the number of solved examples
        own = task.get_config("num_fewshot")
        if own is None or (own != 0 and options.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    return Tasks(loaded, options)


def _wrapped(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int | str,
    is_sharded: bool,
    ask_all: bool,
    job: Runtime,
) -> Any:
    """lm_eval's own model class around one that is loaded, with this job's ranks in place of accelerate's; with
    `ask_all` each is asked all questions."""
    from lm_eval.models.huggingface import HFLM

    class Loaded(HFLM):
        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return job.all_gather_floats(tensor.item())[:, 0].long()  # only single numbers are gathered

        def barrier(self) -> None:
            dist.barrier()

        def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
            settings["synced_gpus"] = is_sharded and job.world_size > 1
            return super()._model_generate(context, max_length, stop, **settings)

    # It is tied already, and transformers' way fails where an adapter stands around the embedding or the head.
    model.tie_weights = lambda *_, **__: None  # type: ignore[method-assign]
    lm = Loaded(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=64)
    if not ask_all:
        lm._rank, lm._world_size = job.rank, job.world_size
    return lm


@contextlib.contextmanager
def _quiet(job: Runtime) -> Iterator[None]:
    """Only errors of lm_eval's log, and its progress bars only where somebody sees them."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if job.is_main and sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _metrics(found: Any) -> Metrics:
    """lm_eval's {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}, in order; a group's own mean before its tasks."""
    metrics: Metrics = {}
    for task, values in {**found.get("groups", {}), **found["results"]}.items():
        metrics[task] = {}
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            shown = metric if chosen == "none" else key
            metrics[task][shown] = {"value": value, "stderr": error if isinstance(error, int | float) else None}
    return metrics
