"""Which activations are kept for the backward pass, and where."""

import re
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.models.packed_rows import has_token_mixers, token_mixers

# Matrix products and attention by operator name, torch's, bitsandbytes', ours and flash-attn's: their outputs are what
# selective keeps. By name, because many of them exist only with their package or device.
EXPENSIVE = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|_int_mm|_scaled_mm|_grouped_mm|_(scaled_dot_product|efficient)_\w*attention\w*)"
    r"|bitsandbytes::(gemm_4bit|gemv_4bit|int8_linear_matmul|int8_scaled_mm|int8_mixed_scaled_mm)"
    r"|llama_ft::lora_linear"
    r"|torch_attn::_varlen_attn"
    r"|\w*flash_attn\w*::\w*(forward|fwd)\w*"
)


def checkpoint_activations(model: PreTrainedModel, train: TrainConfig) -> None:
    """Have decoder layers recompute their activations in the backward pass: all layers, or layer 0, k, 2k, ...

    full and every_k keep a layer's input only. selective also keeps the outputs of matmuls and attention, which are not
    recomputed. With activation_offload the inputs of recomputed layers wait in pinned host memory. transformers
    checkpoints a layer's `forward`, below the hooks of `fully_shard`, so a recomputed layer is all-gathered once.
    """
    if train.activation_checkpointing in ("off", None):
        return
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_expensive)}
    settings = {"use_reentrant": False} | (selective if train.activation_checkpointing == "selective" else {})
    every = train.activation_checkpointing_k if train.activation_checkpointing == "every_k" else 1
    model.activation_checkpointing_enable(settings, every_n_layers=every, offload=train.activation_offload)
    # transformers has the embedding's output require gradients for reentrant checkpointing; ours is not.
    model.disable_input_require_grads()
    if has_token_mixers(model):
        token_mixers(model).keep_rows_for_recomputation()


def _keep_expensive(context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    keep = EXPENSIVE.fullmatch(operator.name().partition(".")[0])
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
