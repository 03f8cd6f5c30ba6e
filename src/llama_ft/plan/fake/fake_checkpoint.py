"""A checkpoint for planning that has only headers: names, shapes and dtypes without values.

So a checkpoint that exists only on the Hub, or is reduced to a few layers, can be loaded like any
other.
"""

import re
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models.adapters.names import checkpoint_key, index_names
from llama_ft.models.base.layers import decoder_layers
from llama_ft.models.base.shards import ShardGroup
from llama_ft.models.base.source import SafetensorsSource, StoredTensor, weight_files
from llama_ft.models.build import build_on_meta
from llama_ft.models.built import BuiltModel
from llama_ft.models.model_config import load_model_config
from llama_ft.models.published.formats import published_format
from llama_ft.models.published.quantization_config import find_quantization_config
from llama_ft.models.published.sources import open_dequantized
from llama_ft.models.quantization.layers import Scheme, empty_codes_and_scales
from llama_ft.models.weights import conversion
from llama_ft.models.weights.conversion import convert_weights
from llama_ft.models.weights.loader import Loader, ShardLoad, share_headers
from llama_ft.plan.types import PlanRequest

Headers = dict[str, StoredTensor]


@dataclass(frozen=True)
class HeaderSource:
    """Returns tensors without values. They count as memory-mapped files, or as memory if they are
    dequantized."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        header = self.tensors[name]
        if header.is_dequantized:
            return torch.empty(stop - start, *header.shape[1:], dtype=header.dtype)
        return self.read(name)[start:stop]

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        header = self.tensors[name]
        element = torch.empty((), dtype=header.dtype)
        return element.expand(header.shape)


@dataclass(frozen=True)
class HeaderLoader(Loader):
    """Loads tensors without values. Parameters of the same shapes and dtypes take the same memory
    while they load, so only the first of them is loaded."""

    loaded: set[object] = field(default_factory=set)

    def fill(self, load: ShardLoad) -> None:
        """See `Loader`."""
        dtypes = [shard.dtype for shard in load.shards]
        kind = (load.shape, *load.wire, *dtypes)
        if kind not in self.loaded:
            self.loaded.add(kind)
            super().fill(load)

    def for_file(self, file: Path) -> Loader:
        """See `Loader`."""
        source: Any = HeaderSource(SafetensorsSource([file]).tensors)
        headers, _ = share_headers(source, [], self.scatter)
        return replace(
            self, source=source, headers=headers, files=file, in_flight=deque(), loaded=set()
        )

    def read_stored(
        self, scheme: Scheme, header: StoredTensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Loader`."""
        return empty_codes_and_scales((stop - start, *header.shape[1:]), scheme)


def loader_of_headers(headers: Headers) -> Callable[..., HeaderLoader]:
    """Return a function like `open_loader`, for a model with these headers in any directory: its
    weights may be on the Hub only, or of a model with fewer layers. A saved adapter has the headers
    of its file."""

    def open_headers(
        folder: Path, built: BuiltModel, group: ShardGroup, scatter: bool, seed: int = 0, *_: None
    ) -> HeaderLoader:
        source: Any = HeaderSource(headers)  # which does not change its tensors
        opened = convert_weights(source, built, index_names(built.model), seed)
        shared, conversions = share_headers(opened.source, opened.conversions, scatter)
        return HeaderLoader(
            opened.source, shared, group, scatter, folder, conversions, opened.names
        )

    return open_headers


def shared_headers(
    request: PlanRequest, layers: int | None, with_towers: bool = False
) -> tuple[PretrainedConfig, Headers]:
    """Return a copy of the config of a request's model and the headers of its weights: see
    `read_headers`. They are read once for all requests of a search: without weights, the whole model is
    built for its headers.

    Args:
        request: the run to plan.
        layers: number of decoder layers; None: all.
        with_towers: with the headers of the towers.
    """
    key = ("headers", request.folder, *astuple(request.config.model), layers, with_towers)
    read = partial(_read_layers, request, layers, with_towers)
    config, headers = request.shared.get(key, read)
    return deepcopy(config), headers


def _read_layers(
    request: PlanRequest, layers: int | None, with_towers: bool
) -> tuple[PretrainedConfig, Headers]:
    model = request.config.model
    if layers is None:
        return read_headers(request.folder, model, with_towers)
    config, headers = shared_headers(request, None, with_towers)
    of_towers = _names_of_towers(config, model, headers) if with_towers else set()
    return config, _reduce_layers(config, model, headers, layers, of_towers)


def read_headers(
    folder: Path, model: ModelConfig, with_towers: bool = False
) -> tuple[PretrainedConfig, Headers]:
    """Return a model's config and the headers of its weights.

    If it has no weights, the headers are those that a model with this config would be saved with,
    `with_towers`: and its towers.

    Raises:
        UserError: config.json or a header cannot be read.
    """
    config = load_model_config(folder, model.trust_remote_code)
    settings = config.to_dict()
    # of a model on the Hub, a plan downloads the index only
    if any(file.exists() for file in weight_files(folder)):
        headers = open_dequantized(folder).tensors
    elif find_quantization_config(settings) and not published_format(settings):
        raise UserError(
            f"--model_name {model.model_name}: it is quantized, and what its files hold cannot be known without them."
            "\nDownload it, or plan with the model it was made of and --quantization."
        )
    else:
        # as a string, or not at all, in some files
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        built = build_on_meta(deepcopy(config), model, with_towers=with_towers)
        parameters = built.model.named_parameters()
        # Which tensors are quantized is not known: all count as dequantized.
        is_published = published_format(settings) is not None
        headers = {
            checkpoint_key(name): StoredTensor(folder, tuple(parameter.shape), dtype, is_published)
            for name, parameter in parameters
        }
    return config, headers


def _names_of_towers(config: PretrainedConfig, model: ModelConfig, headers: Headers) -> set[str]:
    """Return the names of stored tensors that the text part lacks."""
    text_part = build_on_meta(deepcopy(config), model)
    source: Any = HeaderSource(headers)  # which does not change its tensors
    names = index_names(text_part.model)
    tensors = conversion.ConvertedSource(source, text_part, names).tensors
    return {name for name, header in tensors.items() if header.is_left_out}


def _reduce_layers(
    config: PretrainedConfig,
    model: ModelConfig,
    headers: Headers,
    layers: int,
    of_towers: set[str],
) -> Headers:
    """Reduce a config in place to the first `layers` decoder layers. Return the headers of the
    remaining weights, with those `of_towers`, whose towers have layers of their own."""
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        # such as layer_types, with an entry per layer
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    reduced = build_on_meta(deepcopy(config), model).model
    few_headers: Headers = {}
    for name, header in headers.items():
        layer_number = re.search(r"\b\d+\b", name)  # the first number in a name
        is_kept = layer_number is None or int(layer_number[0]) < layers
        if is_kept or name in of_towers or conversion.is_ignored(reduced, name):
            few_headers[name] = header
    return few_headers


def layers_are_alike(request: PlanRequest) -> bool:
    """Return whether all decoder layers of a request's model have the same parameter shapes, no setting
    selects some of them by name, and config.json can be reduced to a few."""
    config = request.config
    model = config.model
    selects_layers = config.train.groups or config.peft.options or model.freeze_layers
    if selects_layers or model.trust_remote_code:
        return False
    key = ("alike", request.folder, *astuple(model))
    return request.shared.get(key, partial(_compare_layers, request))


def _compare_layers(request: PlanRequest) -> bool:
    model = request.config.model
    config = load_model_config(request.folder, model.trust_remote_code)
    layers = decoder_layers(build_on_meta(config, model).model)
    shapes = set[tuple[tuple[str, tuple[int, ...]], ...]]()
    for layer in layers:
        named = layer.named_parameters()
        shapes.add(tuple((name, tuple(parameter.shape)) for name, parameter in named))
    count = config.get_text_config().num_hidden_layers
    return len(shapes) == 1 and len(layers) == count
