"""The result in Hugging Face format: safetensors files for transformers and peft, written as they are gathered."""

import copy
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.checkpoint.safetensors_file import SafetensorsFile, TensorHeader, split_into_files, write_index
from llama_ft.errors import RunFailure
from llama_ft.models import Adapter, ShardGroup
from llama_ft.models.conversion import SavedGroup, saved_layout
from llama_ft.models.lora import ADAPTER_WEIGHTS
from llama_ft.runtime import Runtime

CARRIED_OVER = ("generation_config.json", "*.py")  # beside config.json, tokenizer and weights


def save_dtype(name: Literal["auto", "float32", "bfloat16", "float16"]) -> torch.dtype | None:
    """The dtype `--save_dtype` names; None for auto."""
    return None if name == "auto" else getattr(torch, name)


def export_model(
    model: PreTrainedModel,
    folder: Path,
    source: Path,
    stored_dtypes: dict[str, torch.dtype],
    save_dtype: torch.dtype | None,
    max_shard_bytes: int,
    tokenizer: PreTrainedTokenizerBase,
    runtime: Runtime,
) -> None:
    """Write a whole fine-tuned model, its tensors named and shaped as in the checkpoint it came from where transformers
    converts that one while loading; all ranks call it, rank 0 writes.

    Args:
        model: sharded.
        folder: where to; complete or absent.
        source: folder of the model that was tuned, for its generation config and code.
        stored_dtypes: dtype of each tensor there, used where save_dtype is None.
        save_dtype: dtype of all tensors.
        max_shard_bytes: largest file.
        tokenizer: saved beside the model, chat template included.
        runtime: the ranks.
    """
    tensors = {name: p for name, p in model.named_parameters()} | _persistent_buffers(model)
    dtypes = {name: save_dtype or stored_dtypes.get(name, t.dtype) for name, t in tensors.items()}
    groups = saved_layout(model, tensors)

    def write(aside: Path) -> None:
        _write_weights(aside, tensors, dtypes, groups, max_shard_bytes, runtime)
        if runtime.is_main:
            config: PretrainedConfig = copy.deepcopy(model.config)
            sizes = Counter[torch.dtype]()
            for name, tensor in tensors.items():
                sizes[dtypes[name]] += tensor.numel()
            config.dtype = sizes.most_common(1)[0][0]  # what it loads as by itself; the skeleton's says nothing
            config.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            for pattern in CARRIED_OVER:
                for file in source.glob(pattern):
                    shutil.copy(file, aside / file.name)

    _write_aside(folder, write, runtime)


def export_adapter(
    model: PreTrainedModel,
    adapter: Adapter,
    folder: Path,
    save_dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
    runtime: Runtime,
) -> None:
    """Write the adapter as a peft folder; all ranks call it, rank 0 writes. Arguments as in export_model."""
    tensors: dict[str, torch.Tensor] = {
        adapter.keys[name]: p for name, p in model.named_parameters() if name in adapter.keys
    }
    dtypes = {key: save_dtype or p.dtype for key, p in tensors.items()}
    groups = [SavedGroup([key], {key: tuple(p.shape)}) for key, p in tensors.items()]

    def write(aside: Path) -> None:
        _write_file(aside / ADAPTER_WEIGHTS, tensors, dtypes, groups, runtime)
        if runtime.is_main:
            settings = copy.deepcopy(adapter.config)
            settings.inference_mode = True
            settings.save_pretrained(str(aside))
            tokenizer.save_pretrained(aside)

    _write_aside(folder, write, runtime)


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _write_aside(folder: Path, write: Callable[[Path], None], runtime: Runtime) -> None:
    safe = f"The trained weights are safe in the newest directory of {folder.parent / 'checkpoints'}."
    with written_aside(folder, safe, runtime.is_main) as aside:
        write(aside)
    dist.barrier()


@contextmanager
def written_aside(folder: Path, advice: str, enabled: bool = True) -> Iterator[Path]:
    """A directory beside `folder` that takes its place once it is complete, and is deleted if that fails.

    Args:
        folder: must not hold anything by then.
        advice: second line of the message when the disk refuses.
        enabled: False on ranks that do not write.

    Raises:
        RunFailure: the disk is full, or something else is wrong with it.
    """
    aside = folder.with_name(f".writing-{folder.name}")
    try:
        if enabled:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        yield aside
        if enabled:
            os.replace(aside, folder)
    except OSError as error:
        raise RunFailure(f"{folder}: the model could not be written ({error.strerror or error}).\n{advice}") from error
    finally:
        if enabled:
            shutil.rmtree(aside, ignore_errors=True)


def _write_weights(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    dtypes: dict[str, torch.dtype],
    groups: list[SavedGroup],
    max_shard_bytes: int,
    runtime: Runtime,
) -> None:
    headers = [_headers(group, dtypes) for group in groups]
    files = split_into_files(headers, max_shard_bytes)
    for file_name, members in files.items():
        _write_file(folder / file_name, tensors, dtypes, [groups[member] for member in members], runtime)
    if runtime.is_main:
        write_index(folder, files, headers)


def _headers(group: SavedGroup, dtypes: dict[str, torch.dtype]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(shape, dtypes[group.parameters[0]]) for name, shape in group.tensors.items()}


def _write_file(
    path: Path,
    tensors: dict[str, torch.Tensor],
    dtypes: dict[str, torch.dtype],
    groups: list[SavedGroup],
    runtime: Runtime,
) -> None:
    """Write the groups in order, rows as they arrive: rank 0 never holds more than two shards of a parameter, unless a
    conversion needs it whole."""
    headers = {name: header for group in groups for name, header in _headers(group, dtypes).items()}
    ranks = ShardGroup(runtime.mesh)
    with SafetensorsFile(path, headers, runtime.is_main) as file:
        for group in groups:
            for rows in _rows_to_write(group, tensors, dtypes[group.parameters[0]], ranks):
                if runtime.is_main:
                    file.append(rows)


def _rows_to_write(
    group: SavedGroup, tensors: dict[str, torch.Tensor], dtype: torch.dtype, ranks: ShardGroup
) -> Iterator[torch.Tensor]:
    """On rank 0 all of the group's tensors, piece by piece; the other ranks send theirs."""

    def gathered(name: str) -> Iterator[torch.Tensor]:
        tensor = tensors[name]
        return ranks.gather_rows(tensor, dtype) if isinstance(tensor, nn.Parameter) else iter([tensor.to(dtype).cpu()])

    first = group.parameters[0]
    if not group.is_converted:
        yield from gathered(first)
    elif group.by_row:
        for rows in gathered(first):
            for row in rows.split(1):
                yield from group.convert({first: row})
    else:
        pieces = {name: list(gathered(name)) for name in group.parameters}
        if dist.get_rank() == 0:
            yield from group.convert({name: torch.cat(several) for name, several in pieces.items()})
