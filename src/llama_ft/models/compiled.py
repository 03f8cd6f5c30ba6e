"""Decoder layers compiled by torch.compile: layers of a kind share one graph, which is made at the first step."""

from functools import partial
from typing import Any

import torch
from torch import nn

from llama_ft.models.build import decoder_layers
from llama_ft.runtime.console import log

# Graphs of one model: for training and for evaluation, of each kind of layer, of the first where its input needs no
# gradient. torch's own limit is 8, beyond which it computes without a graph.
MOST_GRAPHS = 32
# Of what a layer is called with, the dimensions that vary from step to step: rows and tokens; and of a pack the number
# of rows and the longest. torch would compile for the first step's numbers and then, for each that changes, again.
VARIES: dict[str, tuple[int, ...]] = {
    r"L\['args'\]\[0\]": (0, 1),  # [rows, tokens, width]
    r"L\['keywords'\]\['(position_embeddings|position_ids)'\].*": (0, 1),
    r"L\['keywords'\]\['attention_mask'\]": (0, 2, 3),  # [rows, 1, tokens, tokens]
    r"L\['keywords'\]\['packed_rows'\].offsets": (0,),
}
VARYING_NUMBER = r"L\['keywords'\]\['packed_rows'\].longest"


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the `forward` of decoder layers, below the hooks by which fully_shard gathers their weights; parameters
    keep their names. Not with a cache of keys and values, which grows with every token of an answer."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    varies = [f"{name}:{dimension}" for name, dimensions in VARIES.items() for dimension in dimensions]
    torch.compiler.config.dynamic_sources = ",".join([*varies, VARYING_NUMBER])
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
