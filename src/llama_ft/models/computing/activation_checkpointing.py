"""Activation checkpointing: which activations are kept for the backward pass, and where."""

import re
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from llama_ft.config import TrainConfig
from llama_ft.libraries.evidence import is_experts
from llama_ft.models.base.grouped_matmul import checkpoint_with_reads
from llama_ft.models.built import BuiltModel
from llama_ft.models.computing.tiled_mlp import computes_pieces

# Operators of matmuls and attention of torch, bitsandbytes, llama_ft and flash-attn. selective
# keeps their outputs. They are matched by name, because many exist only with their package or
# device.
EXPENSIVE = re.compile(
    r"aten::(mm|addmm|bmm|_int_mm|_scaled_mm|_grouped_mm|_(scaled_dot_product|efficient)_\w*attention\w*)"
    r"|bitsandbytes::(gemm_4bit|gemv_4bit|int8_linear_matmul|int8_scaled_mm|int8_mixed_scaled_mm)"
    r"|llama_ft::(lora_linear|lora_experts|grouped_matmul|attention_in_blocks)"
    r"|torch_attn::_varlen_attn"
    r"|\w*flash_attn\w*::\w*(forward|fwd)\w*"
)


def checkpoint_activations(built: BuiltModel, train: TrainConfig) -> None:
    """Make decoder layers recompute their activations in the backward pass: all layers, or layers
    0, k, 2k, ...

    full and every_k keep only the input of a layer. selective also keeps the outputs of matmuls and
    attention, which are not recomputed. With activation_offload the inputs are moved to pinned host
    memory. Transformers checkpoints a layer's `forward`, inside the hooks of `fully_shard`, so a
    recomputed layer is all-gathered only once.
    """
    if train.activation_checkpointing in ("off", None):
        return
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_expensive)}
    settings = {"use_reentrant": False} | (
        selective if train.activation_checkpointing == "selective" else {}
    )
    every = train.activation_checkpointing_k if train.activation_checkpointing == "every_k" else 1
    model = built.model
    model.activation_checkpointing_enable(
        settings, every_n_layers=every, offload=train.activation_offload
    )
    # Transformers makes the embedding's output require gradients, which only reentrant
    # checkpointing needs.
    model.disable_input_require_grads()
    if any(map(is_experts, model.modules())):
        for module in model.modules():
            checkpoint = vars(module).get("_gradient_checkpointing_func")
            if checkpoint is not None:
                module._gradient_checkpointing_func = partial(checkpoint_with_reads, checkpoint)  # type: ignore[assignment]
    if built.mixers is not None:
        built.mixers.keep_samples_for_recomputation()


def _keep_expensive(
    context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    keep = EXPENSIVE.fullmatch(operator.name().partition(".")[0]) and not computes_pieces()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
