"""Give the sharded skeleton its weights: each rank's rows stream from the checkpoint to where they live. Neither way of
loading (see loader.py) ever holds a whole model, or a whole tensor that is not this rank's, anywhere."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.loader import Loader, ShardLoad, open_loader
from llama_ft.models.lora import (
    ADAPTER_WEIGHTS,
    Adapter,
    check_saved_adapter,
    checkpoint_key,
    initial_rows,
    is_adapter_weight,
)
from llama_ft.models.new_tokens import TokenRows
from llama_ft.models.prequantized import parts_of, read_4bit, read_8bit, stored_form, stored_shape
from llama_ft.models.quantized import FourBit, QuantizedLinear
from llama_ft.models.shards import ShardGroup, local_shard
from llama_ft.models.source import StoredTensor, WeightSource, listed

NORM_ROWS = 1024
QUANTIZED_AT_ONCE = 2**19  # weights; with it ranks held at most 11 to 54 MiB in addition to their shards


def load_weights(
    model: PreTrainedModel,
    folder: Path,
    group: ShardGroup,
    device: torch.device,
    storage_device: torch.device,
    scatter: bool,
    adapter: Adapter | None,
    peft: PeftConfig,
    seed: int,
    frozen_dtype: torch.dtype,
    tuned: WeightSource | None = None,
) -> dict[str, torch.dtype]:
    """Allocate every rank's shards on its device and fill them.

    Args:
        model: sharded, on the meta device; possibly with adapters.
        folder: the model's folder.
        group: the ranks the model is sharded over.
        device: where the model computes and weights are quantized; buffers live there.
        storage_device: where shards live: `device`, or the CPU with offloading.
        scatter: rank 0 reads and sends (`low_cpu_fsdp`).
        adapter: the adapter injected into the model.
        peft: where the adapter's first values come from.
        seed: for the adapter's first values.
        frozen_dtype: what weights are quantized from.
        tuned: weights to take in the place of the folder's of the same names; without scatter.

    Returns:
        Parameter name -> dtype in the checkpoint, for the model's own parameters.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or a file cannot be read.
    """
    loader = open_loader(folder, model, group, scatter, tuned)
    keys = account_for(model, loader.headers, folder)
    saved_adapter = None
    if adapter is not None and peft.from_peft_checkpoint:
        file = Path(peft.from_peft_checkpoint) / ADAPTER_WEIGHTS
        saved_adapter = open_loader(file, model, group, scatter)
        check_saved_adapter(saved_adapter.headers, model, adapter, file)
    _allocate(model, device, storage_device)
    with torch.no_grad():
        for load in _shard_loads(model, keys, loader.headers, frozen_dtype, device):
            loader.fill(load)
        for name, parameter in model.named_parameters():
            if saved_adapter is not None and adapter is not None and name in adapter.keys:
                saved_adapter.fill(_as_stored(parameter, adapter.keys[name], saved_adapter.headers))
            elif is_adapter_weight(name) and "_magnitude_vector" not in name and "trainable_tokens_delta" not in name:
                rows, gaussian = slice(*group.own_rows(parameter.shape[0])), peft.init_lora_weights == "gaussian"
                local_shard(parameter).copy_(initial_rows(name, tuple(parameter.shape), gaussian, seed, rows))
        for name, layer in model.named_modules():
            if saved_adapter is None and isinstance(layer, TokenRows) and layer.tied_adapter is None:
                copies, ids = layer.trainable_tokens_delta["default"], layer.token_indices["default"]
                loader.fill(_as_stored(copies, keys[f"{name}.base_layer.weight"], loader.headers, ids))
        for each in (loader, saved_adapter):
            if each is not None:
                each.finish()
        if saved_adapter is None:
            _set_dora_magnitudes(model)
        _fill_buffers(model, loader)
    return {name: loader.headers[key].dtype for name, key in keys.items()}


def _shard_loads(
    model: PreTrainedModel,
    keys: dict[str, str],
    headers: dict[str, StoredTensor],
    frozen_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[ShardLoad]:
    """How each of the model's own parameters is made of what the checkpoint holds."""
    layers = {id(module.weight): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    threads = torch.get_num_threads()
    for name, parameter in model.named_parameters():
        if layer := layers.get(id(parameter)):
            # Quantizing is many small operations. With other programs on the cores, waiting for all threads at the end
            # of each takes longer than the work: 26 s instead of 3 for 450 M weights in 8 bits on 4 cores.
            torch.set_num_threads(1)
            yield _to_quantized(layer, keys[name], headers, frozen_dtype, device)
            torch.set_num_threads(threads)  # the caller has filled it
        elif name in keys:
            yield _as_stored(parameter, keys[name], headers)


def _as_stored(
    parameter: torch.Tensor, key: str, headers: dict[str, StoredTensor], ids: list[int] | None = None
) -> ShardLoad:
    """The rows of a stored tensor, or those numbered `ids`."""

    def make(source: WeightSource, start: int, stop: int) -> list[torch.Tensor]:
        if ids is None:
            return [source.read_rows(key, start, stop)]
        return [torch.cat([source.read_rows(key, id_, id_ + 1) for id_ in ids[start:stop]])]

    shard = local_shard(parameter)
    # The narrower of the two dtypes travels: conversion gives the same bits on either side.
    wire = min(headers[key].dtype, shard.dtype, key=lambda dtype: dtype.itemsize)
    return ShardLoad([shard], tuple(parameter.shape), [wire], make)


def _to_quantized(
    layer: QuantizedLinear, key: str, headers: dict[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> ShardLoad:
    """Rows quantized from `dtype` on `device` as they come, or taken as they are when the checkpoint is quantized."""
    form, scheme, in_features = stored_form(key, headers), layer.scheme, layer.in_features

    def make(source: WeightSource, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if form == "8bit":
            return read_8bit(source, key, start, stop)
        if form == "4bit" and isinstance(scheme, FourBit):
            return read_4bit(source, key, in_features, scheme, start, stop)
        return scheme.quantize(source.read_rows(key, start, stop).to(device=device, dtype=dtype))

    shards = [local_shard(layer.weight), local_shard(layer.scale)]
    wire = [shard.dtype for shard in shards]
    return ShardLoad(shards, (layer.out_features, in_features), wire, make, QUANTIZED_AT_ONCE)


def account_for(model: PreTrainedModel, headers: dict[str, StoredTensor], folder: Path) -> dict[str, str]:
    """Parameter name -> name in the checkpoint; a UserError if a name on either side has no counterpart."""
    aliases = defaultdict[int, list[str]](list)  # a tied weight may have either name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_adapter_weight(name):
            aliases[id(parameter)].append(checkpoint_key(name))
    quantized = {id(module.weight): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    scales = {id(layer.scale) for layer in quantized.values()}
    missing, unlike, keys, ties = [], [], dict[str, str](), model.all_tied_weights_keys
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name) or id(parameter) in scales:
            continue
        layer, candidates = quantized.get(id(parameter)), aliases[id(parameter)]
        shape = tuple(parameter.shape) if layer is None else (layer.out_features, layer.in_features)
        candidates = candidates + [ties[candidate] for candidate in candidates if candidate in ties]
        key = next((candidate for candidate in candidates if candidate in headers), None)
        if key is None:
            missing.append(candidates[0])
            continue
        if (stored := stored_shape(key, headers, shape)) != shape:
            unlike.append(f"{key} is {list(stored)}, config.json makes it {list(shape)}")
            continue
        keys[name] = key
        form, expected = stored_form(key, headers), layer.scheme.name[:4] if layer and layer.is_stored else "float"
        if form != expected:
            unlike.append(f"{key} is stored in {form}, config.json says {expected}")
    known = {name for names in aliases.values() for name in names}
    known |= {checkpoint_key(name) for name, _ in model.named_buffers()}
    known |= {part for key in keys.values() for part in parts_of(key, headers)}
    # Llama 2's checkpoints hold each layer's rotary frequencies, which are computed now; transformers skips them too.
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    extra = [key for key in headers if key not in known and not any(re.search(pattern, key) for pattern in ignored)]
    wrong = {"missing": missing, "not part of the model": extra, "not as in config.json": unlike}
    if lines := [f"{title}: {listed(names)}" for title, names in wrong.items() if names]:
        heading = f"{folder}: its weights are not those of the model its config.json describes."
        raise UserError("\n".join([heading, *lines]))
    return keys


def _allocate(model: nn.Module, device: torch.device, storage_device: torch.device) -> None:
    """Storage for every shard and buffer. to_empty makes a tied weight two parameters: tie them again."""
    places = defaultdict[int, list[tuple[nn.Module, str]]](list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    model.to_empty(device=storage_device)
    if storage_device != device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
    for (first_module, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first_module, first_name))


def _set_dora_magnitudes(model: nn.Module) -> None:
    """DoRA's magnitude is the norm of each row of W + scaling * B A; B is zero at first. Row norms need no other rank:
    weight and magnitude are split into the same rows."""
    for module in model.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            weight = local_shard(cast(nn.Linear, module.base_layer).weight)
            own = local_shard(magnitude.weight)
            for start in range(0, len(weight), NORM_ROWS):  # bounds the fp32 copy
                rows = slice(start, start + NORM_ROWS)
                own[rows] = torch.linalg.vector_norm(weight[rows].float(), dim=1)


def _fill_buffers(model: PreTrainedModel, loader: Loader) -> None:
    """Read the buffers the checkpoint holds and have transformers compute the others (rotary frequencies); a UserError
    if it does not compute one of them."""
    computed = dict(model.named_buffers())
    for name, buffer in model.named_buffers():
        if checkpoint_key(name) in loader.headers:
            if loader.source is not None:
                buffer.copy_(loader.source.read(checkpoint_key(name)))
            if loader.scatter:
                dist.broadcast(buffer, src=0)
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark for "leave it as it is"
            del computed[name]
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    versions = {name: buffer._version for name, buffer in computed.items()}  # counts what has been written into it
    compute_buffers(model, model)
    left = [n for n, b in computed.items() if model.get_buffer(n) is b and b._version == versions[n]]
    if left:
        kind = f"--model_name: model_type {model.config.model_type} is not supported"
        raise UserError(f"{kind}: neither the checkpoint nor Transformers has values for:\n{listed(left)}")


def compute_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Have transformers initialize the modules of `module` that have buffers, in its own order: children first, each by
    the innermost model around it. Falcon-H1's decoder fills buffers of its layers."""
    model = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        compute_buffers(child, model)
    if any(True for _ in module.buffers()):
        model._init_weights(module)
