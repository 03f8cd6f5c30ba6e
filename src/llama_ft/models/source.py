"""Reading a Hugging Face folder's weights a few rows at a time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import _TYPES

from llama_ft.config.paths import TO_SAFETENSORS
from llama_ft.errors import UserError, reason

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
SAMPLES, SAMPLE_BYTES = 64, 2**14  # of each file, for its fingerprint: one in about 80 MiB of a file of 5 GB
INCIDENTAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # in config.json
DTYPES = {name: dtype for name, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}  # by their names in a header
BLOCK_ELEMENTS = 2**20  # of a tensor that is exported, at once: temporaries in fp32 are of 4 MiB


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, as its file's header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_left_out: bool = False  # of what the model's text part lacks (see text_part.py): under its own name, as it is

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """Where weights come from: `tensors` by name are known at once, rows are read when they are asked for."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0 in the stored dtype; the whole of a scalar."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in the stored dtype."""
        return self.read_rows(name, 0, next(iter(self.tensors[name].shape), 1))


class SafetensorsSource(WeightSource):
    """Tensors of safetensors files by name. Opening reads headers only; files are memory-mapped. A UserError if a file
    is missing, truncated or not safetensors, or has a dtype that torch does not know."""

    def __init__(self, files: list[Path]) -> None:
        self.tensors = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            try:
                handle = self._handles[file] = safe_open(file, framework="pt")
                headers = {name: handle.get_slice(name) for name in handle.keys()}
                self.tensors |= {
                    name: StoredTensor(file, tuple(header.get_shape()), DTYPES[header.get_dtype()])
                    for name, header in headers.items()
                }
            except Exception as error:  # the header may be anything: no JSON, a list, or longer than memory
                damage = "It is missing or corrupted: download it again."
                raise UserError(f"{file}: cannot be read as safetensors ({reason(error)}).\n{damage}") from error

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`; only these rows are read."""
        handle = self._handles[self.tensors[name].file]
        return handle.get_slice(name)[start:stop] if self.tensors[name].shape else handle.get_tensor(name)


class OverlaidSource(WeightSource):
    """The tensors of one source, and those of another in the place of what has the same names there."""

    def __init__(self, under: WeightSource, over: WeightSource) -> None:
        self.tensors = under.tensors | over.tensors
        self._holders = dict.fromkeys(under.tensors, under) | dict.fromkeys(over.tensors, over)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self._holders[name].read_rows(name, start, stop)


def listed(names: list[str], most: int = 8) -> str:
    """Names for a message, those beyond `most` counted only."""
    return ", ".join(names[:most]) + (f", ... and {len(names) - most} more" if len(names) > most else "")


def open_weights(folder: Path) -> WeightSource:
    """The weights of a model folder as they are stored; a UserError if there are none or a file cannot be read."""
    if files := weight_files(folder):
        return SafetensorsSource(files)
    raise UserError(f"{folder}: no {SINGLE_FILE} or {INDEX_FILE} here. {TO_SAFETENSORS}")


def fingerprint(folder: Path) -> str:
    """Tell models apart without reading them whole: by config.json, and by the size and samples of every file of
    weights. Fine-tuning moves all of a tensor, so that the samples see it."""
    settings = json.loads((folder / "config.json").read_text())
    lasting = {name: value for name, value in settings.items() if name not in INCIDENTAL}
    digest = xxhash.xxh3_128(json.dumps(lasting, sort_keys=True).encode())
    for file in filter(Path.exists, weight_files(folder)):  # whoever loads a missing one will say so
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb", buffering=0) as opened:
            for sample in range(SAMPLES):
                opened.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def blocks(source: WeightSource, name: str) -> Iterator[torch.Tensor]:
    """A tensor's rows in order, BLOCK_ELEMENTS or one row at a time."""
    shape = source.tensors[name].shape
    if not shape:
        yield source.read(name)
        return
    size = max(1, BLOCK_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], size):
        yield source.read_rows(name, start, min(start + size, shape[0]))


def weight_files(folder: Path) -> list[Path]:
    """The files an index names or the single one; none if there is neither. Links are followed, as in the hub's cache.
    A UserError if the index is malformed or leaves its folder."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        return [single] if single.exists() else []
    try:
        names = {Path(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error}).") from error
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{index}: names {name}, which is outside its directory.")
    return sorted(folder / name for name in names)
