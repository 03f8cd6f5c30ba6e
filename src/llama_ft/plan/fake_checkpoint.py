"""A model folder as a plan needs it: the real one, or one with the headers of its weights and nothing behind them.

So a checkpoint that is on the hub only, or that is cut down to a few of its layers, is loaded as any other is.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError
from transformers import PretrainedConfig

from llama_ft.config import ModelConfig
from llama_ft.errors import UserError
from llama_ft.models import chunked_loss, loader, packed_attention, quantized, source
from llama_ft.models.build import build_on_meta, decoder_layers, load_model_config
from llama_ft.models.lora import checkpoint_key

NAMES = {dtype: name for name, dtype in source.DTYPES.items()}


class HeaderSource(source.SafetensorsSource):
    """The tensors of safetensors files without their values: what is read lies in memory that is the file's."""

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self.read(name)[start:stop]

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return torch.empty((), dtype=self.tensors[name].dtype).expand(self.tensors[name].shape)


@contextmanager
def planned_models(device: str) -> Iterator[None]:
    """In the block, llama_ft.models loads and computes as fake tensors need it, which stand for those of `device`."""
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

    patches: list[AbstractContextManager[Any]] = [
        patch.object(source, "SafetensorsSource", HeaderSource),
        patch.object(loader, "SafetensorsSource", HeaderSource),
        patch.object(loader.Loader, "fill", fill_one_of_a_kind),
        patch.object(loader.Loader, "_keep", keep_few_blocks),
    ]
    if device == "cuda":  # fake tensors lie on the CPU
        patches += [
            patch.object(packed_attention, "_cpu_kernel_takes", lambda *_: False),
            patch.object(quantized, "_on_cuda", lambda _: True),
            patch.dict(chunked_loss.LOGITS_AT_ONCE, cpu=chunked_loss.LOGITS_AT_ONCE["cuda"]),
        ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


@contextmanager
def fake_checkpoint(folder: Path, model: ModelConfig, layers: int | None) -> Iterator[Path]:
    """Yield a folder to plan with, of so many decoder layers (None: all): `folder` itself if it has the weights and all
    layers are wanted. Raises UserError if config.json or a header cannot be read."""
    has_weights = bool(source.weight_files(folder))
    if has_weights and layers is None:
        yield folder
        return
    config = load_model_config(folder, model.trust_remote_code)
    if layers is not None:
        config = _with_layers(config, layers)
    headers = source.open_weights(folder).tensors if has_weights else _headers_of(config, model)
    if layers is not None:
        headers = _first_layers(headers, config, model, layers)
    with tempfile.TemporaryDirectory(prefix="llama_ft-plan-") as name:
        config.save_pretrained(name)
        _write_headers(Path(name) / source.SINGLE_FILE, headers)
        yield Path(name)


def layers_are_alike(config: PretrainedConfig, model: ModelConfig) -> bool:
    """Whether all decoder layers have parameters of the same shapes, and config.json can be cut down."""
    if model.trust_remote_code:
        return False
    layers = decoder_layers(build_on_meta(config, model))
    shapes = {tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers}
    return len(shapes) == 1 and len(layers) == config.get_text_config().num_hidden_layers


def _with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """A model's config with only its first decoder layers."""
    config = deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return config


def _headers_of(config: PretrainedConfig, model: ModelConfig) -> dict[str, source.StoredTensor]:
    """From the hub, which tells them without the weights; else as a model of this config would be stored."""
    if not Path(model.model_name).expanduser().is_dir() and model.model_name != "demo":
        # The hub may not be reached, or have .bin files.
        with suppress(OSError, HfHubHTTPError, NotASafetensorsRepoError):
            files = get_safetensors_metadata(model.model_name).files_metadata.values()
            tensors = {name: it for file in files for name, it in file.tensors.items()}
            dtypes = source.DTYPES
            return {
                name: source.StoredTensor(Path(), tuple(it.shape), dtypes[it.dtype]) for name, it in tensors.items()
            }
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"--model_name {model.model_name}: it is quantized, and what its files hold cannot be known without them."
            "\nDownload it, or plan with the model it was made of and --quantization."
        )
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    parameters = build_on_meta(deepcopy(config), model).named_parameters()
    return {checkpoint_key(name): source.StoredTensor(Path(), tuple(it.shape), dtype) for name, it in parameters}


def _first_layers(
    headers: dict[str, source.StoredTensor], config: PretrainedConfig, model: ModelConfig, count: int
) -> dict[str, source.StoredTensor]:
    """Without the tensors of later layers: names with a number from `count` on where the layers' numbers stand."""
    skeleton = build_on_meta(deepcopy(config), model)
    first_layer = next(name for name, layer in skeleton.named_modules() if layer is decoder_layers(skeleton)[0])
    prefix = re.escape(first_layer.split(".")[-2])  # layers, h: a checkpoint may lack what stands before it
    numbers = {name: re.search(rf"(?:^|\.){prefix}\.(\d+)\.", name) for name in headers}
    return {name: it for name, it in headers.items() if (found := numbers[name]) is None or int(found[1]) < count}


def _write_headers(file: Path, headers: dict[str, source.StoredTensor]) -> None:
    """A safetensors file whose data are a hole that takes no room. Source: https://huggingface.co/docs/safetensors"""
    entries, end = dict[str, object](), 0
    for name, header in headers.items():
        begin, end = end, end + header.nbytes
        entries[name] = {"dtype": NAMES[header.dtype], "shape": list(header.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
