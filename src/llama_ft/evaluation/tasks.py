"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), asked of a model that is loaded
already. lm_eval is an extra: only this file imports it, and only when tasks are asked for."""

import contextlib
import difflib
import fnmatch
import logging
import os
import random
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config.evaluate_flags import is_task_file
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime, log

# lm_eval's own seeds (lm_eval/defaults.py), so that its command line has the same numbers.
RANDOM_SEED, OTHER_SEED = 0, 1234
NAMES_SHOWN = 3

Metrics = dict[str, dict[str, Any]]  # task -> metric -> {"value": ..., "stderr": ... or None}


class Tasks:
    """Tasks that were found.

    Args:
        loaded: what lm_eval's TaskManager made of their names.
        options: limit, num_fewshot, batch_size and apply_chat_template.
    """

    def __init__(self, loaded: Any, options: Namespace) -> None:
        self._loaded, self._options = loaded, options

    def ask(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, is_sharded: bool, job: Runtime
    ) -> Metrics | None:
        """Put all questions to a model. Ranks that each hold a whole model share the questions out; those that share
        one are asked the same ones together.

        Args:
            model: in eval mode.
            tokenizer: its own.
            is_sharded: whether the ranks share one model.
            job: the ranks; all of them call this.

        Returns:
            Task -> metric -> value and stderr, on rank 0.

        Raises:
            UserError: the model's tokenizer, or what the task's YAML says, does not allow them to be asked.
        """
        from lm_eval.evaluator import evaluate

        options = self._options
        if options.apply_chat_template and not tokenizer.chat_template:
            raise UserError("--apply_chat_template: this model's tokenizer has no chat template. Leave it out.")
        if not (ask_all := is_sharded or job.world_size == 1) and (few := self._fewer_than(job.world_size)):
            ask_all = True  # lm_eval fails on a rank that has no question
            log.info(f"{few}: fewer questions than ranks, so every rank asks all questions of all tasks.")
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
        except (ValueError, AssertionError) as error:  # so lm_eval tells of what it finds wrong
            if not _is_of_lm_eval(error):
                raise
            reason = str(error) or type(error).__name__
            raise UserError(f"--tasks: lm-evaluation-harness cannot ask them: {reason}") from error
        return None if found is None else _metrics(found)

    def _fewer_than(self, ranks: int) -> str:
        """A task of which fewer questions are asked, or nothing."""
        from lm_eval.evaluator_utils import get_sample_size

        for name, task in self._loaded["tasks"].items():
            there = len(task.eval_docs)
            if min(there, get_sample_size(task, self._options.limit) or there) < ranks:
                return str(name)
        return ""


def _is_of_lm_eval(error: BaseException) -> bool:
    """Whether it was raised there, and not by a model that it has asked."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "lm_eval"


def find_tasks(options: Namespace, job: Runtime) -> Tasks:
    """Find the tasks and load their questions, before a model is loaded.

    Raises:
        UserError: there is no such task, its questions cannot be had, or are none that are asked here.
    """
    from lm_eval.tasks import TaskManager

    names: list[str] = options.tasks
    by_name = [name for name in names if not is_task_file(name)]
    if by_name:
        log.info("Looking through the tasks of lm-evaluation-harness ...")
    with job.node_leader_first(), _quiet(job):
        manager = TaskManager(include_defaults=bool(by_name))
        check_names(by_name, manager.all_tasks)
        matched = [found for name in names for found in (manager.match_tasks([name]) if "*" in name else [name])]
        try:
            loaded = manager.load(matched)
        except Exception as error:  # of yaml, jinja, datasets, the hub or the task's own code
            reason = str(error).strip() or type(error).__name__
            raise UserError(f"--tasks {','.join(names)}: cannot be loaded: {reason}") from error
    settled = [_settled(name, task, options.num_fewshot) for name, task in loaded["tasks"].items()]
    if any(settled):
        raise UserError(*filter(None, settled))
    return Tasks(loaded, options)


def _settled(name: str, task: Any, num_fewshot: int | None) -> str | None:
    """Give a task its number of solved examples, as lm_eval.simple_evaluate does; say why it cannot be asked."""
    if getattr(task, "UNSAFE_CODE", False):
        return f"--tasks {name}: runs code that the model writes, which is not done here."
    if getattr(task, "MULTIMODAL", False):
        return f"--tasks {name}: its questions have pictures or sound, and only text is asked here."
    own = task.get_config("num_fewshot")
    if own is None or (own != 0 and num_fewshot is not None):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    if not num_fewshot or own == 0 or not hasattr(task, "sampler"):
        return None
    # a question is no example of itself; so the task's own code tells that they are of the same split
    rows = len(task.sampler.fewshot_docs()) - (task.fewshot_cfg.split == task.config.test_split)
    few = f"--num_fewshot {num_fewshot}: {name} has only {rows} rows to take solved examples from."
    return few if rows < num_fewshot else None


def check_names(names: Iterable[str], known: list[str]) -> None:
    """Refuse names, or patterns, of tasks that are not there.

    Raises:
        UserError: with the nearest names.
    """
    mistakes = []
    for name in names:
        if name in known or ("*" in name and fnmatch.filter(known, name)):
            continue
        near = difflib.get_close_matches(name, known, NAMES_SHOWN)
        hint = f"Did you mean {', '.join(near)}?" if near else "A task of your own is named by its .yaml file."
        mistakes.append(f"--tasks {name}: lm-evaluation-harness has no such task. {hint}")
    if mistakes:
        raise UserError(*mistakes)


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
            return job.gather_numbers(tensor.item())[:, 0].long()  # only single numbers are gathered

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
