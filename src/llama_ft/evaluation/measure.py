"""Compute a model's loss on samples, in the same way as a run's own evaluation, and results on
tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

lm_eval is an optional package. Only this file imports it, and only if tasks are requested.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import datasets
from datasets import Dataset
from huggingface_hub import constants, get_session
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models, training
from llama_ft.config import Config
from llama_ft.config.objectives import PROMPTS
from llama_ft.errors import UserError, reason
from llama_ft.evaluation.flags import EvaluateFlags, EvaluationRequest, ModelToEvaluate
from llama_ft.inference.load import LoadedModel
from llama_ft.models.base.replaced import weights_stay_tied
from llama_ft.runtime import Ranks, log

SECONDS_TO_REACH_THE_HUB = 5.0
WITHOUT_RESPONSES = (
    "The run was trained on prompts, which need no responses. To compare rewards of prompts, use llama-ft rollout "
    "with the run and with its base model."
)
Metrics = dict[str, dict[str, Any]]  # task -> metric -> {"value": ..., "stderr": ... or None}


def prepare_samples(
    request: models.ModelRequest,
    tokenizer: PreTrainedTokenizerBase,
    candidate: ModelToEvaluate,
    what: EvaluationRequest,
    ranks: Ranks,
) -> data.TokenizedData:
    """Tokenize the samples, or take them from the cache, before the model is built: samples with
    images need its towers. The first rank of a node must call it before the others.

    Args:
        request: the model.
        tokenizer: tokenizes the samples.
        candidate: the origin of the model, or of the model that was fine-tuned from it.
        what: the settings and the split of the samples.
        ranks: the ranks.

    Raises:
        UserError: samples cannot be used; those of a run on prompts may have no responses.
    """
    config = what.config.data
    model_config = request.model_config
    new_tokens = request.new_tokens
    vocabulary = new_tokens.rows if new_tokens else models.vocabulary_size(model_config)
    has_new_tokens = candidate.run is not None and candidate.run.model.resize_embeddings
    no_media = models.why_text_only(model_config)
    objective = training.build_objective(Config())  # the default: the loss of each token
    trust = request.config.model.trust_remote_code
    media_model = data.MediaModel(request.folder, model_config, tokenizer, trust)
    try:
        return data.prepare(
            config,
            tokenizer,
            data.DataRequest(
                context_length=models.resolve_context_length(config.context_length, model_config),
                want_validation=what.split is None,
                evaluates=True,
                vocabulary_size=None if has_new_tokens else vocabulary,
                add_tokens=has_new_tokens,
                use=what.split or "train",
                examples=objective.examples,
                media_model=None if no_media else media_model,
                no_media=no_media,
                stop_ids=models.stop_ids(request.folder, model_config),
            ),
            cache=data.cache_dir(),
            verify_cache=ranks.local_rank == 0,  # it reads all samples
        )
    except UserError as error:
        if candidate.run is None or candidate.run.data.dataset_format != PROMPTS:
            raise
        raise UserError(*error.messages, WITHOUT_RESPONSES) from error


def measure_loss(
    opened: LoadedModel,
    tokenized: data.TokenizedData,
    candidate: ModelToEvaluate,
    what: EvaluationRequest,
    ranks: Ranks,
    reported: set[str],
) -> dict[str, float]:
    """Compute the loss on samples. All ranks must call it.

    Args:
        opened: the model, which stays in eval mode, and the tokenizer of the samples.
        tokenized: the samples.
        candidate, what, ranks: as of `prepare_samples`.
        reported: the reports on data that were logged; each is logged once.

    Returns:
        loss (mean per token), perplexity, target_tokens, the number of tokens in the loss, and with
        --score the mean score; those of a validation set with a name as name/loss and so on.
    """
    built = opened.built
    model = built.model
    config = what.config
    context_length = models.resolve_context_length(config.data.context_length, model.config)
    vocabulary = models.vocabulary_size(model.config)
    report = "\n".join(tokenized.summary)
    if report not in reported:
        log.info(report)
        reported.add(report)
    sets = _sets(tokenized, candidate, what)
    attention = model.config._attn_implementation
    is_packed = config.data.batching_strategy == "packing"
    if is_packed:
        built.mixers = models.use_packed_attention(built)
        first = next(iter(sets.values()))
        built.has_chunked_loss = training.check_packing(
            built, first, context_length, model.dtype, ranks, tokenized.media
        )
    layout = data.BatchLayout(
        data_size=ranks.data.size,
        data_rank=ranks.data.rank,
        micro_batch=config.train.val_batch_size,
        pack_length=context_length if is_packed else None,
        pad_token_id=data.pad_token_id(opened.tokenizer, vocabulary),
        media=tokenized.media,
    )
    objective = training.build_objective(Config())
    max_batches = config.train.max_eval_step
    # before the loss: a wrong function ends the program early
    answers = training.open_scores(config.train, sets, opened.tokenizer)
    sums = {
        name: training.loss_sums(built, objective, samples, layout, max_batches, ranks)
        for name, samples in sets.items()
    }
    scores = answers.score(built, layout, ranks)
    # packed attention works only for packed sequences; run_tasks gives padded batches
    model.config._attn_implementation = attention
    model.eval()
    metrics = training.evaluation_metrics(sums, scores, has_perplexity=True)
    return {**metrics, "target_tokens": sum(one.count for one in sums.values())}


def _sets(
    tokenized: data.TokenizedData, candidate: ModelToEvaluate, what: EvaluationRequest
) -> dict[str, Dataset]:
    """Return the sets to evaluate by name: the requested split, or else the validation sets."""
    sets = tokenized.validations
    if what.split and tokenized.train is not None:
        sets = {"": tokenized.train}
    if not sets:
        raise UserError(
            f"{candidate.place}: there is no validation set. --dataset FILE names samples for the evaluation."
        )
    return sets


def find_tasks(tasks: list[str], ranks: Ranks, flag: str = "--tasks") -> Any:
    """Load the tasks of a flag and their questions once, before any model. Return lm_eval's
    TaskManager, in which they can be found again."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"{flag}: needs lm-evaluation-harness. pip install -e '.[eval]' installs it."
        ) from error
    by_name = any(not name.endswith((".yaml", ".yml")) for name in tasks)
    with (
        ranks.local_main_process_first(),
        _cache_without_hub(flag, by_name),
        _quiet(ranks),
    ):
        try:
            manager = TaskManager(include_defaults=by_name)
            manager.load(tasks)
        except Exception as error:  # of yaml, jinja, datasets, the Hub or the task's own code
            raise UserError(
                f"{flag} {','.join(tasks)}: cannot be loaded ({reason(error)})."
            ) from error
    return manager


def run_tasks(
    manager: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    flags: EvaluateFlags,
    ranks: Ranks,
) -> Metrics:
    """Evaluate a model on all tasks. Every rank answers the same questions.

    Args:
        manager: the result of `find_tasks`.
        model: a model in eval mode, sharded with flags.enable_fsdp.
        tokenizer: the model's tokenizer.
        flags: tasks, limit, num_fewshot, batch_size and apply_chat_template.
        ranks: the ranks. All of them must call this function.

    Returns:
        Task -> metric -> value and stderr, on rank 0.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    try:
        with _quiet(ranks):
            with weights_stay_tied(model):  # HFLM ties them
                adapted = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=flags.batch_size)
            output = simple_evaluate(
                model=adapted,
                tasks=list(flags.tasks),
                task_manager=manager,
                num_fewshot=flags.num_fewshot,
                limit=flags.limit,
                log_samples=False,
                apply_chat_template=flags.apply_chat_template,
                # with a chat template: solved examples are earlier messages, as in a chat
                fewshot_as_multiturn=True,
            )
    # such as tasks with images, or with generated code
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"--tasks: lm-evaluation-harness cannot ask them: {reason(error)}."
        ) from error
    return _metrics(output) if output else {}


@contextlib.contextmanager
def _cache_without_hub(flag: str, is_needed: bool) -> Iterator[None]:
    """If questions come from the Hub and it does not answer, look only into the cache. `datasets`
    would retry for minutes before it does that, or fails."""
    problem = ""
    if is_needed and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_REACH_THE_HUB)
        # the session's package differs between versions of huggingface_hub
        except Exception as error:
            problem = reason(error)
    if not problem:
        yield
        return
    log.warning(f"{flag}: {constants.ENDPOINT}: {problem}. Only questions in the cache are found.")
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False


@contextlib.contextmanager
def _quiet(ranks: Ranks) -> Iterator[None]:
    """Show only errors of lm_eval, and its progress bars only in a terminal."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    is_shown = ranks.is_main and sys.stderr.isatty()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(sys.stderr if is_shown else nowhere),
    ):
        yield


def _metrics(output: Any) -> Metrics:
    """Convert lm_eval's {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}. A group's mean comes
    before its tasks."""
    metrics: Metrics = {}
    by_task = {**output.get("groups", {}), **output["results"]}
    for task, values in by_task.items():
        metrics[task] = {}
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            # The part after the comma is the filter of the answers; other keys, such as "alias", have
            # none.
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}", "N/A")
            stderr = None if error == "N/A" else error
            name = metric if chosen == "none" else key
            metrics[task][name] = {"value": value, "stderr": stderr}
    return metrics
