"""The result in Hugging Face format: safetensors files for transformers and peft, written as their rows arrive:
gathered from the ranks at the end of a run, or read from a checkpoint."""

import copy
import json
import math
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from llama_ft.checkpoint.safetensors_file import Headers, SafetensorsFile, split_into_files
from llama_ft.data import stop_token_ids
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.models import Adapter, ShardGroup
from llama_ft.models.conversion import SavedGroup, open_source, saved_layout
from llama_ft.models.load_weights import account_for
from llama_ft.models.lora import ADAPTER_WEIGHTS
from llama_ft.models.source import INDEX_FILE, WeightSource, blocks
from llama_ft.runtime import Runtime

CARRIED_OVER = ("generation_config.json", "*.py")  # beside config.json, tokenizer and weights
Rows = Callable[[str, torch.dtype], Iterator[torch.Tensor]]  # of a parameter or buffer, in order, on the host
Write = Callable[[Path], None]


def save_dtype(name: Literal["auto", "float32", "bfloat16", "float16"]) -> torch.dtype | None:
    """The dtype `--save_dtype` names; None for auto."""
    return None if name == "auto" else getattr(torch, name)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a whole model's folder holds of it: its parameters, tied ones once, and its persistent buffers."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


class SavedWeights:
    """Weights that are written, and where they come from.

    Args:
        tensors: parameters and buffers by name; only their shapes and dtypes are used.
        rows: where they come from.
        save_dtype: of all floating tensors; None: as stored.
        stored: name -> dtype, if that is not the tensor's own.
        groups: what is written together, in order, in which layout; None: each tensor as it is.
    """

    def __init__(
        self,
        tensors: Headers,
        rows: Rows,
        save_dtype: torch.dtype | None,
        stored: Mapping[str, torch.dtype] = {},
        groups: list[SavedGroup] | None = None,
    ) -> None:
        self.tensors, self.rows = tensors, rows
        self.dtypes = {
            name: save_dtype if save_dtype and tensor.dtype.is_floating_point else stored.get(name, tensor.dtype)
            for name, tensor in tensors.items()
        }
        alone = [SavedGroup([name], {name: tuple(tensor.shape)}) for name, tensor in tensors.items()]
        self.groups = alone if groups is None else groups
        self.headers = [self._headers(group) for group in self.groups]

    def _headers(self, group: SavedGroup) -> dict[str, torch.Tensor]:
        dtype = self.dtypes[group.parameters[0]]
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in group.tensors.items()}

    def main_dtype(self) -> torch.dtype:
        """The dtype of most numbers: what config.json says, so what transformers loads the model as."""
        sizes = Counter[torch.dtype]()
        for name, tensor in self.tensors.items():
            sizes[self.dtypes[name]] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    def write(self, folder: Path, max_shard_bytes: int) -> None:
        """Write model*.safetensors, none larger than max_shard_bytes, and the index if there are several."""
        files = split_into_files(self.headers, max_shard_bytes)
        for file, members in files.items():
            self.write_file(folder / file, members)
        if len(files) > 1:
            held = {name: file for file, members in files.items() for it in members for name in self.headers[it]}
            total_size = sum(header.nbytes for headers in self.headers for header in headers.values())
            index = {"metadata": {"total_size": total_size}, "weight_map": held}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write_file(self, path: Path, members: Iterable[int]) -> None:
        """Write the groups of these numbers into one file."""
        headers = {name: header for member in members for name, header in self.headers[member].items()}
        with SafetensorsFile(path, headers) as file:
            for member in members:
                for rows in self._converted(self.groups[member]):
                    file.append(rows)

    def _converted(self, group: SavedGroup) -> Iterator[torch.Tensor]:
        """All of the group's tensors, piece by piece as they arrive, unless a conversion needs them whole."""
        first, dtype = group.parameters[0], self.dtypes[group.parameters[0]]
        if group.group is None:
            yield from self.rows(first, dtype)
        elif group.by_row:
            for several in self.rows(first, dtype):
                for row in several.split(1):
                    yield from group.convert({first: row})
        else:
            whole = {name: torch.empty(self.tensors[name].shape, dtype=dtype) for name in group.parameters}
            for name, tensor in whole.items():  # held once
                start = 0
                for several in self.rows(name, dtype):
                    tensor[start : start + len(several)] = several
                    start += len(several)
            yield from group.convert(whole)

    def send(self) -> None:
        """On a rank that does not write: send its rows to the one that does."""
        for group in self.groups:
            for name in group.parameters:
                deque(self.rows(name, self.dtypes[group.parameters[0]]), maxlen=0)


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
    """Write a whole fine-tuned model; all ranks call it, rank 0 writes.

    Args:
        model: sharded.
        folder: where to; complete or absent.
        source: folder of the model that was fine-tuned, for its frozen weights, generation config and code.
        stored_dtypes: dtype of each tensor there, used if save_dtype is None.
        save_dtype: dtype of all floating tensors.
        max_shard_bytes: largest file.
        tokenizer: saved beside the model, chat template included.
        write_card: called on rank 0 with the folder that holds everything else and is not in its place yet.
        runtime: the ranks.
    """
    frozen = None
    if runtime.is_main and not all(parameter.requires_grad for parameter in model.parameters()):
        base = open_source(source, model)  # training may hold them rounded to 16 bits
        frozen = stored_rows(base, account_for(model, base.tensors, source))
    tensors = saved_tensors(model)
    rows = _gathered(tensors, runtime, frozen)
    weights = SavedWeights(tensors, rows, save_dtype, stored_dtypes, saved_layout(model, tensors))

    def write(aside: Path) -> None:
        weights.write(aside, max_shard_bytes)
        write_model_settings(aside, model.config, weights.main_dtype(), tokenizer, source)

    _write_from_ranks(folder, weights, write, write_card, runtime)


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
    tensors = {adapter.keys[name]: p for name, p in model.named_parameters() if name in adapter.keys}
    weights = SavedWeights(tensors, _gathered(tensors, runtime), save_dtype)
    write = partial(write_adapter, adapter=adapter, weights=weights, tokenizer=tokenizer)
    _write_from_ranks(folder, weights, write, write_card, runtime)


def stored_rows(source: WeightSource, keys: Mapping[str, str]) -> Rows:
    """Rows out of a file: keys says what `source` calls a tensor, if that is not its own name."""
    return lambda name, dtype: (block.to(dtype) for block in blocks(source, keys.get(name, name)))


def _gathered(tensors: Mapping[str, torch.Tensor], runtime: Runtime, frozen: Rows | None = None) -> Rows:
    """Rows of sharded parameters as the ranks send them to rank 0: two shards of one are the most it holds. Frozen
    ones come from `frozen`, which rank 0 alone needs.

    All ranks meet after each parameter. Those of other copies of the model, which send nothing, would else wait for the
    whole export at once, and their watchdogs take rank 0 for one that hangs.
    """
    ranks = ShardGroup(runtime.mesh)

    def rows(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        tensor = tensors[name]
        if not isinstance(tensor, nn.Parameter):
            yield tensor.to(dtype).cpu()
            return
        if tensor.requires_grad:
            yield from ranks.gather_rows(tensor, dtype)
        elif frozen is not None:
            yield from frozen(name, dtype)
        dist.barrier()

    return rows


def _write_from_ranks(folder: Path, weights: SavedWeights, write: Write, write_card: Write, runtime: Runtime) -> None:
    if runtime.is_main:
        advice = f"The trained weights are safe in the newest directory of {folder.parent / 'checkpoints'}."
        with written_aside(folder, advice) as aside:
            write(aside)
            write_card(aside)
    else:
        weights.send()
    dist.barrier()


@contextmanager
def written_aside(folder: Path, advice: str = "Nothing is left of it.") -> Iterator[Path]:
    """A directory beside `folder` that takes its place once it is complete, and is deleted if that fails; a RunFailure
    if the disk does not take it."""
    aside = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
    except OSError as error:
        raise RunFailure(f"{folder}: the model could not be written ({error.strerror or error}).\n{advice}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_export(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Write what stands beside the weights of a final model into a directory that is deleted, so that what cannot be
    written stops a run before training and not after it. Arguments as of write_model_settings."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_model_settings(Path(folder), model_config, None, tokenizer, source)
        except Exception as error:  # of whatever the libraries find wrong with these files
            what = "config.json, generation_config.json or the tokenizer cannot be saved with the final model"
            raise UserError(f"{source}: {what}: {reason(error)}") from error


def write_model_settings(
    folder: Path,
    model_config: PretrainedConfig,
    dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
) -> None:
    """Write what stands beside the weights: config.json with their dtype, tokenizer, and from `source` generation
    config and code."""
    config = copy.deepcopy(model_config)
    config.dtype = dtype  # the skeleton's says nothing
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for pattern in CARRIED_OVER:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
    _stop_at_turns(folder, tokenizer)


def _stop_at_turns(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have `generate` stop where the model has learned to: a chat template may end messages with another token than
    the one the base model stops at."""
    file = folder / "generation_config.json"
    settings = json.loads((file if file.exists() else folder / "config.json").read_text())
    known = settings.get("eos_token_id")
    stops = stop_token_ids(tokenizer, known)
    if stops != (known if isinstance(known, list) else [known] if known is not None else []):
        own = settings if file.exists() else {"bos_token_id": settings.get("bos_token_id")}
        file.write_text(json.dumps(own | {"eos_token_id": stops}, indent=2) + "\n")


def write_adapter(folder: Path, adapter: Adapter, weights: SavedWeights, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a peft folder with the tokenizer; `weights` go by peft's names."""
    weights.write_file(folder / ADAPTER_WEIGHTS, range(len(weights.groups)))
    settings = copy.deepcopy(adapter.config)
    settings.inference_mode = True
    for name, value in vars(settings).items():
        if isinstance(value, set):  # a set's order differs from process to process
            setattr(settings, name, sorted(value))
    settings.save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
