"""A checkpoint for planning that has only headers: names, shapes and dtypes without values.

So a checkpoint that exists only on the Hub, or is reduced to a few layers, can be loaded like any
other.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.integrations import hub_kernels

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import attention_kernels, chunked_loss, compiled, conversion, loader, quantized
from llama_ft.models.attention_kernels import AMPERE, T4
from llama_ft.models.build import build_on_meta, decoder_layers, load_model_config
from llama_ft.models.load_weights import QUANTIZED_AT_ONCE
from llama_ft.models.lora import checkpoint_key
from llama_ft.models.source import SafetensorsSource, StoredTensor, open_weights, weight_files
from llama_ft.training import objective
from llama_ft.training.reference import AdapterOff, StoredReference


@dataclass(frozen=True)
class HeaderSource:
    """Returns tensors without values. They count as memory-mapped files."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self.read(name)[start:stop]

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return torch.empty((), dtype=self.tensors[name].dtype).expand(self.tensors[name].shape)


class _KernelNorm(torch.autograd.Function):
    """An RMSNorm that keeps for backward what CUDA's kernel keeps: its input and one number per
    position."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(
            inputs, weight, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        )
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight, _ = ctx.saved_tensors
        return (
            torch.empty_like(inputs),
            None,
            torch.empty_like(weight) if ctx.needs_input_grad[2] else None,
            None,
        )


@contextmanager
def planned_models(headers: dict[str, StoredTensor], device: str) -> Iterator[None]:
    """In the block, llama_ft.models loads weights with these headers from any directory, and
    computes in ways that work with fake tensors, which stand for tensors on `device`."""
    fill = loader.Loader.fill
    filled = set[object]()

    def fill_one_of_a_kind(to: loader.Loader, load: loader.ShardLoad) -> None:
        kind = (id(to), load.shape, *load.wire, *(shard.dtype for shard in load.shards))
        if kind not in filled:
            filled.add(kind)
            fill(to, load)

    patches: list[Any] = [
        patch.object(conversion, "open_weights", lambda _: HeaderSource(headers)),
        # Of a saved adapter; fake tensors cannot be read from a file.
        patch.object(
            loader,
            "SafetensorsSource",
            lambda files: HeaderSource(SafetensorsSource(files).tensors),
        ),
        patch.object(loader.Loader, "fill", fill_one_of_a_kind),
        # Kernels of layers with a recurrent state need CUDA. With this, Transformers uses torch
        # operations instead.
        patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
        # Planned as a forward pass in each step: a pass of the same model holds no more. Another
        # model's is planned by itself.
        patch.object(StoredReference, "log_probabilities", AdapterOff.log_probabilities),
    ]
    if device == "cuda":  # the device of fake tensors is the CPU
        patches += [
            patch.object(
                attention_kernels,
                "capability_of",
                lambda it: T4 if it.dtype == torch.float16 else AMPERE,
            ),
            patch.object(quantized, "_on_cuda", lambda _: True),
            patch.object(compiled, "_is_cuda", lambda _: True),
            patch.object(functional, "rms_norm", _KernelNorm.apply),
            patch.dict(chunked_loss.LOGITS_AT_ONCE, cpu=chunked_loss.LOGITS_AT_ONCE["cuda"]),
            patch.dict(QUANTIZED_AT_ONCE, cpu=QUANTIZED_AT_ONCE["cuda"]),
            patch.dict(objective.PAD_MULTIPLE, cpu=objective.PAD_MULTIPLE["cuda"]),
        ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def read_headers(
    folder: Path, model: ModelConfig, layers: int | None = None
) -> tuple[PretrainedConfig, dict[str, StoredTensor]]:
    """Return a model's config and the headers of its weights, with `layers` decoder layers (None:
    all).

    If it has no weights, the headers are those that a model with this config would be saved with.

    Raises:
        UserError: config.json or a header cannot be read.
    """
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
        parameters = build_on_meta(deepcopy(config), model).model.named_parameters()
        headers = {
            checkpoint_key(name): StoredTensor(folder, tuple(it.shape), dtype)
            for name, it in parameters
        }
    if layers is not None:
        text = config.get_text_config()
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == text.num_hidden_layers:
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
        reduced = build_on_meta(deepcopy(config), model).model
        # the first number in a name is the layer's
        numbers = {name: re.search(r"\b\d+\b", name) for name in headers}
        headers = {
            name: it
            for name, it in headers.items()
            if not (at := numbers[name])
            or int(at[0]) < layers
            or conversion.is_ignored(reduced, name)
        }
    return config, headers


def layers_are_alike(config: PretrainedConfig, model: ModelConfig) -> bool:
    """Return whether all decoder layers have the same parameter shapes, and config.json can be
    reduced to a few."""
    layers = decoder_layers(build_on_meta(config, model).model)
    shapes = {
        tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers
    }
    count = config.get_text_config().num_hidden_layers
    return not model.trust_remote_code and len(shapes) == 1 and len(layers) == count
