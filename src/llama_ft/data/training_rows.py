"""From tokenized rows, or a source that is streamed, to what the training loop iterates over."""

from typing import TYPE_CHECKING

import torch.distributed as dist

from llama_ft.config import Config
from llama_ft.data.batches import BatchPlan, row_lengths, target_token_counts
from llama_ft.data.feed import PreparedRows
from llama_ft.data.prepare import TokenizedData
from llama_ft.data.stream import StreamedRows
from llama_ft.errors import UserError

if TYPE_CHECKING:
    from llama_ft.runtime import Runtime

TrainingRows = PreparedRows | StreamedRows


def plan_training(
    config: Config,
    data: TokenizedData,
    context_length: int,
    global_batch: int,
    pad_token_id: int,
    vocabulary_size: int | None,
    runtime: "Runtime",
) -> TrainingRows:
    """Settle which rows this rank sees at which step: a function of (seed, epoch, step), and of nothing else.

    Args:
        config: the resolved configuration.
        data: of `prepare`.
        context_length: tokens of a pack.
        global_batch: packs (or rows) of an optimizer step over all ranks.
        pad_token_id: fills padded rows.
        vocabulary_size: of the model, or None: ids of streamed rows are not checked.
        runtime: the ranks; all of them call this.

    Raises:
        UserError: they have other rows than rank 0, and would train on some twice and on others never.
    """
    prints: list[dict[str, str]] = [{}] * runtime.world_size
    dist.all_gather_object(prints, data.fingerprints())
    if other := [str(rank) for rank, own in enumerate(prints) if own != prints[0]]:
        raise UserError(
            f"--dataset: rank {', '.join(other)} has other rows than rank 0.\nExpected the same files on every node, "
            "and the same rows in the same order whenever a function is called: a shuffle in it needs a seed."
        )
    settings = config.train
    capacity = context_length if config.data.batching_strategy == "packing" else None
    if data.stream is not None:
        source, encoder = data.stream
        return StreamedRows(
            source, encoder, config.data, settings, capacity, global_batch, pad_token_id, vocabulary_size, runtime
        )
    assert data.train is not None  # one or the other
    plan = BatchPlan(
        row_lengths(data.train),
        target_token_counts(data.train),
        capacity=capacity,
        global_batch=global_batch,
        world_size=runtime.world_size,
        rank=runtime.rank,
        micro_batch=settings.batch_size_training,
        seed=settings.seed,
    )
    return PreparedRows(data.train, plan, pad_token_id, settings.num_epochs, settings.max_train_step)
