"""The loss of a model on rows that it was not trained on, as a run's own evaluation computes it."""

from dataclasses import dataclass

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models, training
from llama_ft.config import Config
from llama_ft.data.sources import Split
from llama_ft.data.statistics import SplitStatistics
from llama_ft.errors import UserError
from llama_ft.runtime import Runtime, log


@dataclass(frozen=True)
class HeldOut:
    """What came out.

    Attributes:
        loss: mean over the target tokens.
        perplexity: its exponential.
        rows: of the data.
        target_tokens: that the loss is of: not all of them with max_eval_step.
    """

    loss: float
    perplexity: float
    rows: int
    target_tokens: int


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    split: Split | None,
    may_grow: bool,
    name: str,
    job: Runtime,
) -> HeldOut:
    """Tokenize the rows, or take them from the cache, and compute the loss; all ranks call it together.

    Args:
        model: in eval mode, and left in it.
        tokenizer: with which the rows are written.
        config: its data section, and val_batch_size and max_eval_step.
        split: which split of `dataset` is taken whole, or all of it where it has none; None: what is held out of it.
        may_grow: the model has rows of its own for tokens that the base's config.json does not count.
        name: of the model, for messages.
        job: the ranks.

    Raises:
        UserError: there are no such rows, or they do not fit the model.
    """
    context_length = models.resolve_context_length(config.data.context_length, model.config)
    vocabulary = models.vocabulary_size(model.config)
    with job.node_leader_first():
        tokenized = data.prepare(
            config.data,
            tokenizer,
            context_length=context_length,
            cache=data.cache_dir(),
            want_validation=split is None,
            vocabulary_size=None if may_grow else vocabulary,
            add_tokens=may_grow,
            use=split or "train",
            verify=job.local_rank == 0,
        )
    rows = tokenized.train if split else tokenized.validation
    counted = tokenized.report.train if split else tokenized.report.validation
    if rows is None or counted is None:
        raise UserError(
            f"{name}: no rows were held out: the run had no --validation.\n--dataset FILE names rows that it was not "
            "trained on."
        )
    for line in _notes(counted, context_length, config):
        log.info(line)
    pad = data.pad_token_id(tokenizer, vocabulary)
    loss, tokens = _evaluate(model, rows, config, pad, context_length, job)
    return HeldOut(loss, training.perplexity(loss), counted.rows, tokens)


def _notes(counted: SplitStatistics, context_length: int, config: Config) -> list[str]:
    """What has to be known to understand the number."""
    notes = [f"{counted.rows:,} rows, {counted.tokens:,} tokens, of which {counted.target_tokens:,} are predicted"]
    if cut := counted.truncated + counted.dropped:
        notes.append(f"{cut:,} of them are longer than --context_length {context_length}")
    if config.train.max_eval_step:
        notes.append(f"--max_eval_step {config.train.max_eval_step}: only so many batches of each process are used")
    return notes


def _evaluate(
    model: PreTrainedModel, rows: Dataset, config: Config, pad: int, context_length: int, job: Runtime
) -> tuple[float, int]:
    """As training does; with packing, the model is left as it was."""
    attention, capacity = model.config._attn_implementation, None
    if config.data.batching_strategy == "packing":
        capacity = context_length
        models.use_packed_attention(model)
        training.check_rows_stay_apart(model, rows, context_length, model.dtype, job)
    numbers = training.mean_loss(model, rows, config.train, pad, capacity, job)
    model.config._attn_implementation = attention
    model.eval()
    return numbers
