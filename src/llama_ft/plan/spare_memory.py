"""Use spare memory on the CPU to make a run faster: the C library keeps freed memory for the next
tensors, and ranks on one host exchange weights and gradients in memory that they share. Both need
memory that a plan does not count.
"""

import math

from torch import nn

from llama_ft import training
from llama_ft.config import Config
from llama_ft.config.wording.messages import size_text
from llama_ft.cpu.freed_memory import keep_freed_memory, return_freed_memory
from llama_ft.cpu.gloo import share_memory
from llama_ft.models import BuiltModel, resolve_context_length, total_weights
from llama_ft.models.base.shards import local_shard
from llama_ft.models.quantization.layers import quantized_weights
from llama_ft.plan.free_memory import free_bytes, free_text
from llama_ft.runtime import PRECISIONS, Ranks, log

# Share of the free host memory that a run may take, by its plan or by an upper bound, to keep freed
# memory: that makes peaks higher.
SHARE_TO_KEEP = 2 / 3
# Weights, their gradients and optimizer states count as fp32.
WEIGHT_BYTES = 4
# A trained weight of a rank's shard: gradient and two optimizer states, and copies of them and of
# the weight for a checkpoint.
TENSORS_PER_TRAINED_WEIGHT = 6
# The backward pass needs inputs and outputs of matmuls. Activation functions, norms and copies for
# attention take less than that again.
TENSORS_PER_ACTIVATION = 2


def use_spare_memory(
    planned_share: float | None,
    built: BuiltModel,
    config: Config,
    longest_example: int | None,
    ranks: Ranks,
) -> None:
    """On the CPU, keep freed memory and share memory between ranks if there is room for it. All
    ranks call it together, after the weights are loaded.

    Args:
        planned_share: of the free memory, the same on all ranks; None without a plan. Then an upper
            bound decides.
        built: the model, sharded.
        config: the run's settings.
        longest_example: tokens of the longest sample; None if unknown.
        ranks: the ranks.
    """
    if ranks.device.type != "cpu":
        return
    if planned_share is None:
        has_room, why = _has_room(built, config, longest_example, ranks)
    else:
        has_room = planned_share <= SHARE_TO_KEEP
        why = ", since the plan leaves room for it"
    if has_room:
        if keep_freed_memory():
            report = log.info if planned_share is None else log.debug  # without a plan, a guess
            report(f"Freed memory is kept for the next tensors{why}.")
        if share_memory(built.model, ranks.mesh):
            log.debug("ranks of one host exchange weights and gradients in memory that they share")
    elif planned_share is None:
        log.info(f"Freed memory is not kept for the next tensors{why}. Steps take longer.")
    elif return_freed_memory():
        log.info(
            "Freed memory is returned at once, since the plan leaves little room. Steps take longer."
        )


def _has_room(
    built: BuiltModel, config: Config, longest_example: int | None, ranks: Ranks
) -> tuple[bool, str]:
    """Return whether an upper bound of what training adds leaves room on all ranks, and why."""
    added = most_bytes_added(built, config, longest_example)
    free = free_bytes(ranks.device, ranks.local_world_size)
    least_free = ranks.all_gather_floats(free).min().item()
    if math.isinf(added):
        return False, ", since there is no plan"
    most = f"training adds at most {size_text(added)} per rank"
    why = f": without a plan, {most}, and {free_text(least_free)} are free"
    return added <= SHARE_TO_KEEP * least_free, why


def most_bytes_added(built: BuiltModel, config: Config, longest_example: int | None) -> float:
    """Return an upper bound of the memory that training adds to a rank after its weights are loaded.
    inf if other tensors than those of matmuls may be large: pixels, states of convolutions, and the
    weights of eager attention."""
    model = built.model
    has_convolutions = any(isinstance(module, nn.Conv1d) for module in model.modules())
    attends = model.config.get_text_config()._attn_implementation or ""
    if built.towers or has_convolutions or attends.endswith("eager"):
        return math.inf
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    local = sum(local_shard(parameter).numel() for parameter in trained)
    # without shards: all weights, and the gradients of all trained ones
    whole = total_weights(model) + sum(parameter.numel() for parameter in trained)

    train = config.train
    samples = max(train.batch_size_training, train.val_batch_size)
    samples *= training.build_objective(config).examples_per_sample
    length = resolve_context_length(config.data.context_length, model.config)
    if config.data.batching_strategy == "padding":
        length = min(length, longest_example or length)
    tokens = samples * length
    if train.score:
        tokens = max(tokens, train.score_batch_size * (length + train.score_tokens))
    activations = tokens * _width(model) * TENSORS_PER_ACTIVATION
    masks = tokens * length  # of padded samples
    activation_bytes = PRECISIONS[train.precision].compute.itemsize * activations
    return activation_bytes + WEIGHT_BYTES * (local * TENSORS_PER_TRAINED_WEIGHT + whole + masks)


def _width(model: nn.Module) -> int:
    """Return the sum of rows and columns of all weights of a model: the numbers per token that go
    in and out of its matmuls."""
    shapes = {id(weight.weight): weight.shape for weight in quantized_weights(model)}
    width = 0
    for parameter in model.parameters():
        *stacked, rows, columns = 1, 1, *shapes.get(id(parameter), parameter.shape)
        width += math.prod(stacked) * (rows + columns)
    return width
