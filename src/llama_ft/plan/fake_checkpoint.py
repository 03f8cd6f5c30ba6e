"""The weights of a model as a plan needs them: the headers of a checkpoint, and nothing behind them.

So a checkpoint that is on the hub only, or that is cut down to a few of its layers, is loaded as any other is.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.integrations import hub_kernels

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import (
    attention_kernels,
    block_attention,
    chunked_loss,
    compiled,
    conversion,
    fsdp,
    loader,
    quantized,
)
from llama_ft.models.attention_kernels import AMPERE, T4
from llama_ft.models.build import build_on_meta, decoder_layers, load_model_config
from llama_ft.models.load_weights import QUANTIZED_AT_ONCE
from llama_ft.models.lora import checkpoint_key
from llama_ft.models.source import StoredTensor, open_weights, weight_files
from llama_ft.training import objective
from llama_ft.training.reference import AdapterOff, StoredReference


@dataclass(frozen=True)
class HeaderSource:
    """Tensors without their values: what is read lies in memory that is the file's."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self.read(name)[start:stop]

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return torch.empty((), dtype=self.tensors[name].dtype).expand(self.tensors[name].shape)


class _KernelNorm(torch.autograd.Function):
    """What CUDA's RMSNorm keeps for the backward pass: its input, and one number per position. The CPU's keeps more."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32))
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), None, torch.empty_like(weight) if ctx.needs_input_grad[2] else None, None


@contextmanager
def planned_models(headers: dict[str, StoredTensor], device: str) -> Iterator[None]:
    """In the block, llama_ft.models loads weights with these headers, whatever the folder, and computes as fake tensors
    need it, which stand for those of `device`."""
    fill, keep, filled = loader.Loader.fill, loader.Loader._keep, set[object]()

    def fill_one_of_a_kind(to: loader.Loader, load: loader.ShardLoad) -> None:
        kind = (id(to), load.shape, *load.wire, *(shard.dtype for shard in load.shards))
        if kind not in filled:
            filled.add(kind)
            fill(to, load)

    def keep_few_blocks(to: loader.Loader, load: loader.ShardLoad, start: int, stop: int) -> None:
        blocks = list(load.blocks(start, stop))
        for first, last in [*blocks[:2], *blocks[2:][-1:]]:  # others are like the second; a 4-bit weight of 70B has 448
            shards = [shard[first - start : last - start] for shard in load.shards]
            keep(to, replace(load, shards=shards), first, last)

    patches: list[Any] = [
        patch.object(conversion, "open_weights", lambda _: HeaderSource(headers)),
        patch.object(loader.Loader, "fill", fill_one_of_a_kind),
        patch.object(loader.Loader, "_keep", keep_few_blocks),
        # Kernels of layers that carry a state need CUDA; transformers then computes them by torch's own operations.
        patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
        # Planned as a forward pass in each step: the pass before training holds no more.
        patch.object(StoredReference, "log_probabilities", AdapterOff.log_probabilities),
        patch.object(block_attention, "LONGEST_IN_BLOCKS", 0),  # many small operators; a block takes little memory
    ]
    if device == "cuda":  # fake tensors lie on the CPU
        patches += [
            patch.object(attention_kernels, "capability_of", lambda it: T4 if it.dtype == torch.float16 else AMPERE),
            patch.object(quantized, "_on_cuda", lambda _: True),
            patch.object(fsdp, "_is_over_gloo", lambda _: False),
            patch.object(compiled, "_is_cuda", lambda _: True),
            patch.object(functional, "rms_norm", _KernelNorm.apply),
            patch.dict(chunked_loss.LOGITS_AT_ONCE, cpu=chunked_loss.LOGITS_AT_ONCE["cuda"]),
            patch.dict(QUANTIZED_AT_ONCE, cpu=QUANTIZED_AT_ONCE["cuda"]),
            patch.dict(objective.FILLED_TO, cpu=objective.FILLED_TO["cuda"]),
        ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def read_headers(
    folder: Path, model: ModelConfig, layers: int | None = None
) -> tuple[PretrainedConfig, dict[str, StoredTensor]]:
    """A model's config and the headers of its weights, with only so many decoder layers (None: all); without weights
    the headers that a model of this config would be stored with. Raises UserError if config.json or a header cannot be
    read."""
    config = load_model_config(folder, model.trust_remote_code)
    if weight_files(folder):
        headers = open_weights(folder).tensors
    elif getattr(config, "quantization_config", None):
        raise UserError(
            f"--model_name {model.model_name}: it is quantized, and what its files hold cannot be known without them."
            "\nDownload it, or plan with the model it was made of and --quantization."
        )
    else:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        parameters = build_on_meta(deepcopy(config), model).named_parameters()
        headers = {checkpoint_key(name): StoredTensor(folder, tuple(it.shape), dtype) for name, it in parameters}
    if layers is not None:
        text = config.get_text_config()
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == text.num_hidden_layers:
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
        numbers = {name: re.search(r"\b\d+\b", name) for name in headers}  # the first in a name is its layer's
        headers = {name: it for name, it in headers.items() if not (at := numbers[name]) or int(at[0]) < layers}
    return config, headers


def layers_are_alike(config: PretrainedConfig, model: ModelConfig) -> bool:
    """Whether all decoder layers have parameters of the same shapes, and config.json can be cut down."""
    layers = decoder_layers(build_on_meta(config, model))
    shapes = {tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers}
    count = config.get_text_config().num_hidden_layers
    return not model.trust_remote_code and len(shapes) == 1 and len(layers) == count
