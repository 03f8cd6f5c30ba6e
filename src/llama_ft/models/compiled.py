"""Fused kernels for decoder layers: graphs of torch.compile, or Liger's own kernels."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.models.build import decoder_layers
from llama_ft.models.packed_rows import runs_rows_apart
from llama_ft.runtime.console import log

# Of what a layer is called with, the dimensions that vary from step to step: rows and tokens; and of a pack the number
# of rows and the longest. torch would compile for the first step's numbers and then, for each that changes, again.
VARIES = [
    *(rf"L\['args'\]\[0\]:{dimension}" for dimension in (0, 1)),  # [rows, tokens, width]
    *(rf"L\['keywords'\]\['(position_embeddings|position_ids)'\].*:{dimension}" for dimension in (0, 1)),
    *(rf"L\['keywords'\]\['attention_mask'\]:{dimension}" for dimension in (0, 2, 3)),  # [rows, 1, tokens, tokens]
    r"L\['keywords'\]\['packed_rows'\].offsets:0",
    r"L\['keywords'\]\['packed_rows'\].longest",
]


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the `forward` of decoder layers, below the hooks by which fully_shard gathers their weights: layers of a
    kind share one graph, which is made at the first step. Not with a cache of keys and values, which grows with every
    token of an answer."""
    if runs_rows_apart(model):
        raise UserError(
            f"--compile: {type(model).__name__} computes packed samples one after another, which cannot be compiled.\n"
            "Use --batching_strategy padding, or leave --compile out."
        )
    # Graphs of one model: for training and for evaluation, of each kind of layer, of the first where its input needs no
    # gradient. torch's own limit is 8, beyond which it computes without a graph.
    torch._dynamo.config.recompile_limit = 32
    torch.compiler.config.dynamic_sources = ",".join(VARIES)
    compiled = torch.compile(_forward, backend=backend)
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = partial(_forward_or_graph, layer, compiled)
    log.info(f"{len(layers)} decoder layers will be compiled at the first step.")


def _forward(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
    # By its class, which fully_shard replaces: transformers checkpoints in the forward of the last one only.
    return type(layer).forward(layer, *args, **keywords)


def _forward_or_graph(layer: nn.Module, compiled: Any, *args: Any, **keywords: Any) -> Any:
    return (compiled if keywords.get("past_key_values") is None else _forward)(layer, *args, **keywords)


def without_graphs(model: nn.Module) -> AbstractContextManager[Any]:
    """Compute layers as they are meanwhile: graphs of a few samples, in evaluation mode, would be used only once."""
    is_compiled = any(isinstance(layer.forward, partial) for layer in decoder_layers(model))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def apply_liger(model: PreTrainedModel, train: TrainConfig) -> None:
    """Patch the `forward` methods of the skeleton with Liger's own function for its architecture, before adapters and
    sharding. Liger's losses stay out: ours is a sum over target tokens. A UserError without liger-kernel, or if it does
    not know this architecture.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UserError(f"--use_liger: pip install liger-kernel; it cannot be imported ({error}).") from error
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise UserError(f"--use_liger: no kernels for {model.config.model_type}, only {', '.join(sorted(known))}.")
    # Liger rotates queries and keys where they lie. Those that selective keeps would be rotated again when the layer is
    # recomputed, and the gradients wrong without a message.
    kernels = {"rope": False} if train.activation_checkpointing == "selective" else {}
    monkey_patch._apply_liger_kernel_to_instance(
        model, cross_entropy=False, fused_linear_cross_entropy=False, **kernels
    )
