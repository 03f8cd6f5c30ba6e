"""Giving the sharded skeleton its weights: each rank's rows stream from the checkpoint to where they live.

Two ways, bit-identical: every rank reads its own rows, or (`low_cpu_fsdp`) rank 0 alone opens the checkpoint and sends
each rank its rows, one slice in flight. Neither way is a whole model, or more than two slices of a tensor, anywhere.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from llama_ft.config import PeftConfig
from llama_ft.errors import UserError
from llama_ft.models.lora import (
    ADAPTER_WEIGHTS,
    Adapter,
    check_saved_adapter,
    checkpoint_key,
    initial_rows,
    is_adapter_weight,
    row_norms,
)
from llama_ft.models.shards import ShardGroup, local_shard, row_ranges
from llama_ft.models.source import SafetensorsSource, StoredTensor

NAMED_AT_MOST = 8


@dataclass(frozen=True)
class Loader:
    """One way of getting rows to ranks.

    Attributes:
        source: the files; None on the ranks that do not open them.
        headers: shape and dtype of every stored tensor, known on all ranks.
        group: which rows this rank holds.
        scatter: rank 0 reads and sends, instead of every rank reading for itself.
    """

    source: SafetensorsSource | None
    headers: dict[str, StoredTensor]
    group: ShardGroup
    scatter: bool

    def fill(self, shard: torch.Tensor, key: str) -> None:
        """Put this rank's rows of tensor `key` into `shard` [rows, ...], converted to its dtype."""
        stored = self.headers[key]
        if not self.scatter:
            assert self.source is not None
            start, stop = self.group.own_rows(stored.shape[0])
            if stop > start:
                shard.copy_(self.source.read_rows(key, start, stop))
            return
        if self.group.in_first_copy:
            # The narrower of the two dtypes travels: conversion gives the same bits on either side.
            wire = min(stored.dtype, shard.dtype, key=lambda dtype: dtype.itemsize)
            if self.source is not None:
                self._send_rows(shard, key, wire)
            elif shard.numel():
                received = shard if shard.dtype == wire else torch.empty_like(shard, dtype=wire)
                dist.recv(received, src=0)
                if received is not shard:
                    shard.copy_(received)
        self.group.replicate(shard)

    def _send_rows(self, shard: torch.Tensor, key: str, wire: torch.dtype) -> None:
        """Rank 0: keep the first rows, send the others; while a slice is on its way the next is read."""
        assert self.source is not None
        ranges = row_ranges(self.headers[key].shape[0], self.group.size)
        shard.copy_(self.source.read_rows(key, *ranges[0]))
        in_flight: tuple[dist.Work, torch.Tensor] | None = None
        for destination, (start, stop) in enumerate(ranges):
            if destination == 0 or stop == start:
                continue
            rows = self.source.read_rows(key, start, stop).to(device=shard.device, dtype=wire)
            if in_flight is not None:
                in_flight[0].wait()
            in_flight = (cast(dist.Work, dist.isend(rows, dst=destination)), rows)
        if in_flight is not None:
            in_flight[0].wait()


def open_loader(files: Path, group: ShardGroup, scatter: bool) -> Loader:
    """Read the headers of a model folder, or of one safetensors file: on rank 0 and sent, or on every rank."""

    def opened() -> SafetensorsSource:
        return SafetensorsSource.of_model(files) if files.is_dir() else SafetensorsSource([files])

    if not scatter:
        source = opened()
        return Loader(source, source.tensors, group, scatter)
    box: list[dict[str, StoredTensor] | None] = [None]
    source_on_main = opened() if dist.get_rank() == 0 else None
    if source_on_main is not None:
        box[0] = source_on_main.tensors
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return Loader(source_on_main, box[0], group, scatter)


def materialize(
    model: PreTrainedModel,
    folder: Path,
    group: ShardGroup,
    device: torch.device,
    scatter: bool,
    adapter: Adapter | None,
    peft: PeftConfig,
    seed: int,
) -> dict[str, torch.dtype]:
    """Allocate every rank's shards on its device and fill them.

    Args:
        model: sharded, on the meta device; possibly with adapters.
        folder: the model's folder.
        group: the ranks the model is sharded over.
        device: where shards live.
        scatter: rank 0 reads and sends (`low_cpu_fsdp`).
        adapter: the adapter injected into the model.
        peft: where the adapter's first values come from.
        seed: for the adapter's first values.

    Returns:
        Parameter name -> dtype in the checkpoint, for the model's own parameters.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or a file cannot be read.
    """
    loader = open_loader(folder, group, scatter)
    keys = _account_for(model, loader.headers, folder)
    saved_adapter = None
    if adapter is not None and peft.from_peft_checkpoint:
        file = Path(peft.from_peft_checkpoint) / ADAPTER_WEIGHTS
        saved_adapter = open_loader(file, group, scatter)
        check_saved_adapter(saved_adapter.headers, model, adapter, file)
    _allocate(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = local_shard(parameter)
            if saved_adapter is not None and adapter is not None and name in adapter.keys:
                saved_adapter.fill(shard, adapter.keys[name])
            elif name in keys:
                loader.fill(shard, keys[name])
            elif "lora_magnitude_vector" not in name:
                rows = slice(*group.own_rows(parameter.shape[0]))
                gaussian = peft.init_lora_weights == "gaussian"
                shard.copy_(initial_rows(name, tuple(parameter.shape), gaussian, seed, rows))
        if saved_adapter is None:
            _set_dora_magnitudes(model)
        _fill_buffers(model, loader)
    return {name: loader.headers[key].dtype for name, key in keys.items()}


def _account_for(model: PreTrainedModel, headers: dict[str, StoredTensor], folder: Path) -> dict[str, str]:
    """Parameter name -> name in the checkpoint, with every name on either side accounted for."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_adapter_weight(name):
            aliases.setdefault(id(parameter), []).append(name)
    missing, reshaped, keys = [], [], {}
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            continue
        candidates = [checkpoint_key(alias) for alias in aliases[id(parameter)]]  # a tied weight may have either name
        candidates += [model.all_tied_weights_keys[key] for key in candidates if key in model.all_tied_weights_keys]
        key = next((candidate for candidate in candidates if candidate in headers), None)
        if key is None:
            missing.append(candidates[0])
        elif headers[key].shape != tuple(parameter.shape):
            reshaped.append(f"{key} is {list(headers[key].shape)}, config.json makes it {list(parameter.shape)}")
        else:
            keys[name] = key
    known = {checkpoint_key(name) for names in aliases.values() for name in names}
    known |= {checkpoint_key(name) for name, _ in model.named_buffers()}
    # Llama 2's checkpoints hold each layer's rotary frequencies, which are computed now; transformers skips them too.
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    extra = [key for key in headers if key not in known and not any(re.search(pattern, key) for pattern in ignored)]
    if missing or extra or reshaped:
        raise UserError(_mismatch(folder, missing, extra, reshaped))
    return keys


def _mismatch(folder: Path, missing: list[str], extra: list[str], reshaped: list[str]) -> str:
    lines = [f"{folder}: its safetensors files are not the weights of the model its config.json describes."]
    for title, names in (("missing", missing), ("not part of the model", extra), ("wrong shape", reshaped)):
        if names:
            more = f", ... and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
            lines.append(f"{title}: {', '.join(names[:NAMED_AT_MOST])}{more}")
    lines.append(
        "If transformers renames this architecture's tensors while loading, save the model once with save_pretrained."
        if missing and extra
        else "Copy or download the folder again, or mend config.json."
    )
    return "\n".join(lines)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Storage for every shard and buffer. to_empty makes a tied weight two parameters: tie them again."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            ties.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for places in ties.values():
        first_module, first_name = places[0]
        for module, name in places[1:]:
            setattr(module, name, getattr(first_module, first_name))


def _set_dora_magnitudes(model: nn.Module) -> None:
    """DoRA's magnitude is the norm of each row of W + scaling * B A; B is zero at first. Row norms need no other rank:
    weight and magnitude are split into the same rows."""
    for module in model.modules():
        for adapter, magnitude in getattr(module, "lora_magnitude_vector", {}).items():
            assert adapter == "default"
            base = cast(nn.Linear, module.base_layer)
            local_shard(magnitude.weight).copy_(row_norms(local_shard(base.weight)))


def _fill_buffers(model: PreTrainedModel, loader: Loader) -> None:
    """Read the buffers the checkpoint holds and have transformers recompute the others (rotary frequencies)."""
    for name, buffer in model.named_buffers():
        if checkpoint_key(name) in loader.headers:
            if loader.source is not None:
                buffer.copy_(loader.source.read(checkpoint_key(name)))
            if loader.scatter:
                dist.broadcast(buffer, src=0)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark for "leave it as it is"
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)
