"""The loss of a model on held-out samples, as a run's own evaluation computes it."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models, training
from llama_ft.config import Config
from llama_ft.config.paths import BUILT_IN_MODELS
from llama_ft.data.sources import Split
from llama_ft.errors import UserError
from llama_ft.evaluation.flags import Asked, Evaluation
from llama_ft.runtime import Runtime, log


@dataclass(frozen=True)
class HeldOut:
    """Loss on held-out samples.

    Attributes:
        loss: mean over the tokens in the loss.
        perplexity: its exponential.
        rows: samples of the data.
        target_tokens: tokens in the loss: not all of the data's with max_eval_step.
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
    asked: Asked,
    job: Runtime,
) -> HeldOut:
    """Tokenize the samples, or take them from the cache, and compute the loss; all ranks call it together.

    Args:
        model: in eval mode, and left in it.
        tokenizer: with which the samples are tokenized.
        config: its data section, and val_batch_size and max_eval_step.
        split: which split of `dataset` is taken whole, or all of it without splits; None: what is held out of it.
        asked: the model, by its name, and whether it may have rows for tokens that its config.json does not count.
        job: the ranks.

    Raises:
        UserError: there are no such samples, or they do not fit the model.
    """
    context_length = models.resolve_context_length(config.data.context_length, model.config)
    vocabulary = models.vocabulary_size(model.config)
    with job.local_main_process_first():
        tokenized = data.prepare(
            config.data,
            tokenizer,
            context_length=context_length,
            cache=data.cache_dir(),
            want_validation=split is None,
            vocabulary_size=None if asked.resized else vocabulary,
            add_tokens=asked.resized,
            use=split or "train",
            verify=job.local_rank == 0,
            examples=training.SupervisedFineTuning.examples,
        )
    rows = tokenized.train if split else tokenized.validation
    counted = tokenized.report.train if split else tokenized.report.validation
    if rows is None or counted is None:
        raise UserError(
            f"{asked.place}: no samples were held out: the run had no --validation.\n--dataset FILE names samples "
            "that it was not trained on."
        )
    log.info(f"{counted.rows:,} rows, {counted.tokens:,} tokens, of which {counted.target_tokens:,} are in the loss")
    if cut := counted.truncated + counted.dropped:
        log.info(f"{cut:,} of them are longer than --context_length {context_length}")
    if steps := config.train.max_eval_step:
        log.info(f"--max_eval_step {steps}: only so many batches per process are used")
    attention, pack_length = model.config._attn_implementation, None
    if config.data.batching_strategy == "packing":
        pack_length = context_length
        models.use_packed_attention(model)
        training.check_packing(model, rows, context_length, model.dtype, job)
    pad = data.pad_token_id(tokenizer, vocabulary)
    loss, tokens = training.mean_loss(model, training.SupervisedFineTuning(), rows, config.train, pad, pack_length, job)
    model.config._attn_implementation = attention  # packed attention is only for this
    model.eval()
    return HeldOut(loss, training.perplexity(loss), counted.rows, tokens)


def find_models(options: Evaluation, job: Runtime) -> None:
    """Find all models before the first one is loaded; those of the Hub come to its cache.

    Args:
        options: flags of recipes/evaluate.py.
        job: the ranks.

    Raises:
        UserError: one of them is not there.
    """
    places = {base.place: "base model" for _, base in options.asked if base}
    places |= {asked.place: "MODEL" for asked, _ in options.asked}
    places |= {options.flags.base_model: "--base_model"} if options.flags.base_model else {}
    with job.local_main_process_first():
        for place, flag in sorted(places.items()):
            if place not in BUILT_IN_MODELS:
                models.local_folder(place, flag, ask_hub=job.local_rank == 0)


def describe_samples(options: Evaluation) -> str:
    """Return what the loss was measured on, in words; `options` are flags of recipes/evaluate.py."""
    settings = options.config.data
    named = settings.dataset if isinstance(settings.dataset, str) else "a mixture"
    if options.rows == "all":
        return f"all rows of {named}"
    run = next(iter(options.runs), None) if "dataset" not in options.given else None
    which = f"the rows that {run} held out" if run else f"the rows that a run on {named} holds out"
    return f"{which} (--validation {settings.validation})" if settings.validation else which


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that decides what tokens it makes of a chat."""
    tokenizer("")  # the backend's text holds its last truncation and padding, too: a plain call resets them
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(tokenizer.get_vocab())
    return f"{backend} {tokenizer.special_tokens_map} {tokenizer.chat_template}"
