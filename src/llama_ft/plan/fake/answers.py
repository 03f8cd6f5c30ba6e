"""What generating answers takes in a plan: with FSDP units that are freed after their forward pass, and with
units that stay unsharded for the length of an answer."""

from collections.abc import Callable
from typing import TypeVar

import torch

from llama_ft.config import TrainConfig
from llama_ft.libraries.evidence import parameters_of
from llama_ft.models import BuiltModel
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.models.sharding.kept_units import units_kept
from llama_ft.plan.fake.tracker import MemoryTracker

Result = TypeVar("Result")
# Assumed for a chat template and its system prompt, in addition to a sample prompt.
TEMPLATE_TOKENS = 256
LAST = "logits_to_keep"


def generate_twice(
    generate: Callable[[], Result], built: BuiltModel, tracker: MemoryTracker
) -> Result:
    """Call a function that generates, and again with units that stay unsharded, whose peaks are
    `tracker.kept_peaks`."""
    result = generate()
    if built.sharding.resharded and built.sharding.unsharded_bytes:
        with tracker.keeping_units(), units_kept(built):
            generate()
    return result


def plan_answers(
    train: TrainConfig, is_scored: bool, longest: int, built: BuiltModel, tracker: MemoryTracker
) -> None:
    """Run the forward pass after the last token of the largest batch of answers: to validation samples
    (--score), or to the sample prompts. Its cache of keys and values has its largest size then.

    Args:
        train: the settings.
        is_scored: whether there are validation samples to score.
        longest: tokens of the longest sample.
        built: the model, in training mode.
        tracker: counts it as an evaluation.
    """
    batches = list[tuple[int, int]]()  # answers, and tokens of each with its prompt
    if is_scored and train.score:
        batches.append((train.score_batch_size, longest + train.score_tokens))
    if train.sample_tokens:
        prompts = train.sample_prompts or []
        # a token has at least one byte
        lengths = [len(prompt.encode()) + TEMPLATE_TOKENS for prompt in prompts] or [longest]
        batches.append((len(lengths), max(lengths) + train.sample_tokens))
    if not batches:
        return
    shape = max(batches, key=lambda batch: batch[0] * batch[1])
    tracker.enter("evaluation")
    built.model.eval()
    generate_twice(lambda: _last_forward(built, shape), built, tracker)
    built.model.train()


@torch.no_grad()
def _last_forward(built: BuiltModel, shape: tuple[int, int]) -> None:
    model = built.model
    ids = torch.zeros(shape, dtype=torch.int64)
    # as `generate` does; xLSTM has none
    last = {LAST: 1} if LAST in parameters_of(type(model).forward) else {}
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **last)
    free_unsharded(model)
