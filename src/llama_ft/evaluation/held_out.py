"""The loss of a model on held-out samples, as a run's own evaluation computes it."""

from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft import data, models, training
from llama_ft.errors import UserError
from llama_ft.evaluation.flags import Asked, Evaluation
from llama_ft.runtime import Runtime, log


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked, what: Evaluation, job: Runtime
) -> dict[str, float]:
    """Tokenize the samples, or take them from the cache, and compute the loss; all ranks call it together.

    Args:
        model: in eval mode, and left in it.
        tokenizer: with which the samples are tokenized.
        asked: where the model, or the one fine-tuned from it, comes from.
        what: the settings and the split of the samples.
        job: the ranks.

    Returns:
        loss, perplexity, and target_tokens: the number of tokens in the loss.
    """
    config, split = what.config, what.split
    context_length = models.resolve_context_length(config.data.context_length, model.config)
    vocabulary = models.vocabulary_size(model.config)
    has_new_tokens = asked.run is not None and asked.run.model.resize_embeddings
    with job.local_main_process_first():
        tokenized = data.prepare(
            config.data,
            tokenizer,
            context_length=context_length,
            cache=data.cache_dir(),
            want_validation=split is None,
            vocabulary_size=None if has_new_tokens else vocabulary,
            add_tokens=has_new_tokens,
            use=split or "train",
            verify=job.local_rank == 0,
            examples=training.SupervisedFineTuning.examples,
        )
    log.info("\n".join(tokenized.summary))
    samples = tokenized.train if split else tokenized.validation
    if samples is None:
        raise UserError(f"{asked.place}: there is no validation set. --dataset FILE names samples for the evaluation.")
    attention, pack_length = model.config._attn_implementation, None
    if config.data.batching_strategy == "packing":
        pack_length = context_length
        models.use_packed_attention(model)
        training.check_packing(model, samples, context_length, model.dtype, job)
    pad, objective = data.pad_token_id(tokenizer, vocabulary), training.SupervisedFineTuning()
    loss, tokens = training.mean_loss(model, objective, samples, config.train, pad, pack_length, job)
    model.config._attn_implementation = attention  # packed attention is only for this
    model.eval()
    return {"loss": loss, "perplexity": training.perplexity(loss), "target_tokens": tokens}
