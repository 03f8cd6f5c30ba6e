"""The result in Hugging Face format: safetensors files for transformers and peft, written as their rows arrive:
gathered from the ranks at the end of a run, or read from a checkpoint."""

import copy
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.checkpoint.safetensors_file import SafetensorsFile, TensorHeader, split_into_files, write_index
from llama_ft.config.messages import size_text
from llama_ft.data import stop_token_ids
from llama_ft.errors import RunFailure, UserError
from llama_ft.models import Adapter, ShardGroup
from llama_ft.models.conversion import SavedGroup, open_source, saved_layout
from llama_ft.models.load_weights import account_for
from llama_ft.models.lora import ADAPTER_WEIGHTS
from llama_ft.models.source import blocks
from llama_ft.runtime import Runtime

CARRIED_OVER = ("generation_config.json", "*.py")  # beside config.json, tokenizer and weights
Rows = Callable[[str, torch.dtype], Iterator[torch.Tensor]]  # of a parameter or buffer, in order, on the host
Write = Callable[[Path], None]


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
    write_card: Write,
    runtime: Runtime,
) -> None:
    """Write a whole fine-tuned model, its tensors named and shaped as in the checkpoint it came from where transformers
    converts that one while loading; all ranks call it, rank 0 writes.

    Args:
        model: sharded.
        folder: where to; complete or absent.
        source: folder of the model that was tuned, for its frozen weights, generation config and code.
        stored_dtypes: dtype of each tensor there, used where save_dtype is None.
        save_dtype: dtype of all tensors.
        max_shard_bytes: largest file.
        tokenizer: saved beside the model, chat template included.
        write_card: called on rank 0 with the folder that holds everything else and is not in its place yet.
        runtime: the ranks.
    """
    tensors = saved_tensors(model)
    dtypes = saved_dtypes(tensors, stored_dtypes, save_dtype)
    groups = saved_layout(model, tensors)
    rows = _gathered(tensors, runtime)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if frozen:
        rows = _frozen_from(source, model, frozen, rows, runtime)

    def write(aside: Path) -> None:
        write_weights(aside, groups, tensors, dtypes, max_shard_bytes, rows, runtime.is_main)
        if runtime.is_main:
            write_model_settings(aside, model.config, tensors, dtypes, tokenizer, source)

    _write_aside(folder, write, write_card, runtime)


def export_adapter(
    model: PreTrainedModel,
    adapter: Adapter,
    folder: Path,
    save_dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
    write_card: Write,
    runtime: Runtime,
) -> None:
    """Write the adapter as a peft folder; all ranks call it, rank 0 writes. Arguments as in export_model."""
    tensors = adapter_tensors(model, adapter)
    rows = _gathered(tensors, runtime)

    def write(aside: Path) -> None:
        write_adapter(aside, adapter, tensors, save_dtype, rows, tokenizer, runtime.is_main)

    _write_aside(folder, write, write_card, runtime)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a whole model's folder holds of it: its parameters, tied ones once, and its persistent buffers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def saved_dtypes(
    tensors: Mapping[str, torch.Tensor], stored: Mapping[str, torch.dtype], save_dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """What each is written as: save_dtype where that is given and it holds floats, else as it was stored."""
    return {
        name: save_dtype if save_dtype and tensor.is_floating_point() else stored.get(name, tensor.dtype)
        for name, tensor in tensors.items()
    }


def adapter_tensors(model: PreTrainedModel, adapter: Adapter) -> dict[str, torch.Tensor]:
    """What an adapter's folder holds, by the names peft gives."""
    return {adapter.keys[name]: p for name, p in model.named_parameters() if name in adapter.keys}


def _gathered(tensors: dict[str, torch.Tensor], runtime: Runtime) -> Rows:
    """Rows of sharded parameters as the ranks send them to rank 0: two shards of one are the most it holds.

    All ranks meet after each parameter. Those of other copies of the model, which send nothing, would else wait for the
    whole export at once, and their watchdogs take rank 0 for one that hangs.
    """
    ranks = ShardGroup(runtime.mesh)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        tensor = tensors[name]
        if isinstance(tensor, nn.Parameter):
            yield from ranks.gather_rows(tensor, dtype)
            dist.barrier()
        else:
            yield tensor.to(dtype).cpu()

    return rows


def _frozen_from(source: Path, model: PreTrainedModel, frozen: set[str], gathered: Rows, runtime: Runtime) -> Rows:
    """`gathered`, but with frozen parameters as `source` stores them: training may hold them rounded to 16 bits."""
    if runtime.is_main:
        base = open_source(source, model)
        keys = account_for(model, base.tensors, source)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        if name not in frozen:
            yield from gathered(name, dtype)
            return
        if runtime.is_main:
            yield from (block.to(dtype) for block in blocks(base, keys[name]))
        dist.barrier()

    return rows


def _write_aside(folder: Path, write: Write, write_card: Write, runtime: Runtime) -> None:
    safe = f"The trained weights are safe in the newest directory of {folder.parent / 'checkpoints'}."
    with written_aside(folder, safe, runtime.is_main) as aside:
        write(aside)
        if runtime.is_main:
            write_card(aside)
    dist.barrier()


@contextmanager
def written_aside(folder: Path, advice: str, enabled: bool = True) -> Iterator[Path]:
    """A directory beside `folder` that takes its place once it is complete, and is deleted if that fails.

    Args:
        folder: what it holds is replaced.
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
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(aside, folder)
    except OSError as error:
        raise RunFailure(f"{folder}: the model could not be written ({error.strerror or error}).\n{advice}") from error
    finally:
        if enabled:
            shutil.rmtree(aside, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    """See that `needed` bytes are free where `folder` will be.

    Raises:
        RunFailure: they are not.
    """
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RunFailure(f"{folder}: needs {size_text(needed)}, and {size_text(free)} are free there.")


def group_headers(group: SavedGroup, dtypes: Mapping[str, torch.dtype]) -> dict[str, TensorHeader]:
    """What is written of a group: name -> shape and dtype."""
    return {name: TensorHeader(shape, dtypes[group.parameters[0]]) for name, shape in group.tensors.items()}


def write_weights(
    folder: Path,
    groups: list[SavedGroup],
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    rows: Rows,
    enabled: bool,
) -> None:
    """Write model*.safetensors and, where there are several, their index.

    Args:
        folder: where to.
        groups: what is written together, in order.
        tensors: every parameter and buffer by name; only their shapes are used.
        dtypes: of each as it is written.
        max_shard_bytes: largest file.
        rows: where they come from.
        enabled: False on ranks that do not write and only see `rows` through.
    """
    headers = [group_headers(group, dtypes) for group in groups]
    files = split_into_files(headers, max_shard_bytes)
    for file_name, members in files.items():
        _write_file(folder / file_name, [groups[member] for member in members], tensors, dtypes, rows, enabled)
    if enabled:
        write_index(folder, files, headers)


def check_export(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Write what stands beside the weights of a final model into a directory that is deleted, so that what cannot be
    written stops a run before training and not after it. Arguments as of write_model_settings.

    Raises:
        UserError: config, tokenizer or generation config cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model_settings(Path(folder), model_config, {}, {}, tokenizer, source)
    except UserError:
        raise
    except Exception as error:  # each tokenizer class saves itself, and raises what it likes
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{source}: the config or the tokenizer cannot be saved, which the final model needs ({reason})."
        ) from error


def write_model_settings(
    folder: Path,
    model_config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
) -> None:
    """Write what stands beside the weights: config.json, tokenizer, and from `source` generation config and code."""
    config = copy.deepcopy(model_config)
    sizes = Counter[torch.dtype]()
    for name, tensor in tensors.items():
        sizes[dtypes[name]] += tensor.numel()
    config.dtype = max(sizes, key=sizes.__getitem__, default=None)  # what it loads as; the skeleton's says nothing
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for pattern in CARRIED_OVER:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
    stop_at_turns(folder, tokenizer, source)


def stop_at_turns(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Have `generate` stop where the model has learned to: a chat template may end turns with another token than the
    one the base model stops at.

    Args:
        folder: holds config.json and perhaps generation_config.json.
        tokenizer: with the chat template that was trained with.
        source: folder of the model that was tuned.

    Raises:
        UserError: its generation_config.json is not a JSON object.
    """
    file = folder / "generation_config.json"
    try:
        settings = json.loads((file if file.exists() else folder / "config.json").read_text())
        if not isinstance(settings, dict):
            raise TypeError(type(settings).__name__)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{source / file.name}: not a JSON object ({error}), and the final model needs it.\nCopy or download it "
            "again, or delete it."
        ) from error
    known = settings.get("eos_token_id")
    stops = stop_token_ids(tokenizer, known)
    if stops == (known if isinstance(known, list) else [known] if known is not None else []):
        return
    own = settings if file.exists() else {"bos_token_id": settings.get("bos_token_id")}
    own = {key: value for key, value in own.items() if value is not None} | {"eos_token_id": stops}
    file.write_text(json.dumps(own, indent=2) + "\n")


def write_adapter(
    folder: Path,
    adapter: Adapter,
    tensors: Mapping[str, torch.Tensor],
    save_dtype: torch.dtype | None,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    enabled: bool,
) -> None:
    """Write a peft folder with the tokenizer; `tensors` and `rows` go by peft's names, see write_weights."""
    dtypes = {key: save_dtype or tensor.dtype for key, tensor in tensors.items()}
    groups = [SavedGroup([key], {key: tuple(tensor.shape)}) for key, tensor in tensors.items()]
    _write_file(folder / ADAPTER_WEIGHTS, groups, tensors, dtypes, rows, enabled)
    if enabled:
        settings = copy.deepcopy(adapter.config)
        settings.inference_mode = True
        for name, value in vars(settings).items():
            if isinstance(value, set):  # a set's order differs from process to process
                setattr(settings, name, sorted(value))
        settings.save_pretrained(str(folder))
        tokenizer.save_pretrained(folder)


def _write_file(
    path: Path,
    groups: list[SavedGroup],
    tensors: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    rows: Rows,
    enabled: bool,
) -> None:
    headers = {name: header for group in groups for name, header in group_headers(group, dtypes).items()}
    with SafetensorsFile(path, headers, enabled) as file:
        for group in groups:
            for written in _rows_to_write(group, tensors, dtypes[group.parameters[0]], rows, enabled):
                if enabled:
                    file.append(written)


def _rows_to_write(
    group: SavedGroup, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, rows: Rows, enabled: bool
) -> Iterator[torch.Tensor]:
    """All of the group's tensors, piece by piece as they arrive, unless a conversion needs them whole."""
    first = group.parameters[0]
    if not group.is_converted:
        yield from rows(first, dtype)
    elif group.by_row:
        for several in rows(first, dtype):
            for row in several.split(1):
                yield from group.convert({first: row})
    else:
        whole = {name: _put_together(rows(name, dtype), tensors[name].shape, dtype) for name in group.parameters}
        if enabled:
            yield from group.convert(whole)


def _put_together(rows: Iterator[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor out of its rows, held once; where no rows arrive, no memory is touched."""
    whole, start = torch.empty(shape, dtype=dtype), 0
    for several in rows:
        whole[start : start + len(several)] = several
        start += len(several)
    return whole
