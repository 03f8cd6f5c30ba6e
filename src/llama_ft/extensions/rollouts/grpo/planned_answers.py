"""What generating answers takes, for the plan: the forward pass of the prompts, and that of the last
token, when the cache of keys and values is largest. On tensors without values."""

from typing import Any

import torch
from transformers import Cache
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import Config
from llama_ft.extensions.rollouts.grpo.settings import GrpoConfig
from llama_ft.extensions.rollouts.sampling import ChooseTokens, Sampling
from llama_ft.libraries.evidence import parameters_of
from llama_ft.plan.types import PlannedGeneration
from llama_ft.training import free_unsharded

POSITIONS = "position_ids"


@torch.no_grad()
def generate_for_plan(
    model: PreTrainedModel, config: Config, longest: int, ranks: int
) -> PlannedGeneration:
    """Run the largest batch of a rank, and return what all batches of a step cost.

    Args:
        model: in training mode, also afterwards.
        config: of the run.
        longest: tokens of a prompt and its answer.
        ranks: that answer different prompts.
    """
    settings = config.section(GrpoConfig)
    answer = min(settings.max_completion_length, longest - 1)
    prompt = longest - answer
    count = answers_at_once(settings)
    largest = count
    if config.train.run_validation and config.data.validation is not None:
        largest = settings.generate_batch_size  # there may be more held-out prompts
    ids = torch.zeros(largest, prompt, dtype=torch.int64)
    first_tokens = [0] * largest
    if largest > 1 and prompt > 1:
        first_tokens[-1] = 1  # prompts of different lengths need a mask for each layer
    # of positions, so with values, as that of a batch: a mask that may be full is left out
    mask = (torch.arange(longest) >= torch.tensor(first_tokens).unsqueeze(1)).long()
    choose = ChooseTokens([0] * largest, 1, _sampling(settings), ids)
    model.eval()
    cache = _next_tokens(model, choose, ids, mask[:, :prompt], None)
    _fill(cache, answer - 1)  # its last token is not stored before it is read
    cache = _next_tokens(model, choose, ids[:, :1], mask, cache)
    free_unsharded(model)
    model.train()
    answers = settings.prompts_per_step * settings.num_generations
    batches = -(-answers // (count * ranks))
    weights = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    mean_cache_bytes = _bytes_of(cache) * (count / largest) * (prompt + answer / 2) / longest
    return PlannedGeneration(
        generated_tokens=answers * answer,
        generation_flops=2 * weights * batches * count * prompt,
        generation_bytes=round(batches * answer * (weight_bytes + mean_cache_bytes)),
    )


def answers_at_once(settings: GrpoConfig) -> int:
    """Return the largest number of answers that a rank generates at once."""
    return min(settings.generate_batch_size, settings.prompts_per_step * settings.num_generations)


def _next_tokens(
    model: PreTrainedModel,
    choose: ChooseTokens,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Cache | None,
) -> Any:
    """Choose a token of each answer, as `generate` does, and return the cache."""
    arguments = {"attention_mask": mask, "past_key_values": cache}
    if POSITIONS in parameters_of(type(model).forward):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        arguments[POSITIONS] = positions[:, -ids.shape[1] :]
    output = model(input_ids=ids, **arguments, use_cache=True, logits_to_keep=1)
    logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    choose(torch.zeros(len(ids), choose.width, dtype=torch.int64), logits)  # type: ignore[arg-type]
    return output.past_key_values


def _fill(cache: Cache, tokens: int) -> None:
    """Add keys and values of so many tokens. A layer with a sliding window drops old ones; layers
    without keys have states of one size."""
    if tokens < 1:
        return
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        keys = getattr(layer, "keys", None)
        values = getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        added = []
        for stored in (keys, values):
            shape = [*stored.shape]
            shape[-2] = tokens
            added.append(stored.new_empty([1] * len(shape)).expand(shape))  # without memory
        layer.update(*added)


def _bytes_of(cache: Cache) -> int:
    """Return the bytes of all keys and values."""
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _sampling(settings: GrpoConfig) -> Sampling:
    return Sampling(
        temperature=settings.temperature,
        top_p=1.0,
        top_k=0,
        max_completion_length=1,
        stop_ids=[],
        num_generations=settings.num_generations,
        seed=0,
    )
