"""Read the weights of a Hugging Face directory in blocks of rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import _TYPES

from llama_ft.config.paths import TO_SAFETENSORS, file_problem
from llama_ft.errors import UserError, reason

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Transformers loads such files, of its own parallel training, before all others.
DISTRIBUTED = "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors"
# per file, for its fingerprint: one sample per 80 MiB of a 5 GB file
SAMPLES = 64
SAMPLE_BYTES = 2**14
IGNORED_CONFIG_KEYS = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
)  # in config.json
# by their names in a header
DTYPES = {name: dtype for name, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}
DTYPES["F8_E8M0"] = torch.float8_e8m0fnu  # scales; safetensors reads them, but its table lacks them
BLOCK_ELEMENTS = 2**20  # of an exported tensor at once: its temporaries in fp32 take 4 MiB


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, shape and dtype, from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_dequantized: bool = False  # rows are computed, not mapped (see published.py)
    packed: object = None  # the PackedWeight that it is computed from
    # Not part of the loaded model, and copied unchanged by an export:
    is_left_out: bool = False  # of a tower, not in the model's text part (see text_part.py)
    is_ignored: bool = False  # Transformers skips it, e.g. layers for multi-token prediction

    @property
    def is_untouched(self) -> bool:
        return self.is_left_out or self.is_ignored

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """Interface of weights: names and headers in `tensors` are known at once, rows are read on
    request."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of dimension 0 in the stored dtype; of a scalar, all of it."""

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor in the stored dtype."""
        shape = self.tensors[name].shape
        rows = shape[0] if shape else 1
        return self.read_rows(name, 0, rows)


class SafetensorsSource(WeightSource):
    """Tensors of safetensors files. Opening reads only headers; files are memory-mapped. Raises
    UserError if a file is missing, truncated, not safetensors, or has a dtype that torch does not
    know."""

    def __init__(self, files: list[Path]) -> None:
        self.tensors = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            try:
                handle = self._handles[file] = safe_open(file, framework="pt")
                headers = {name: handle.get_slice(name) for name in handle.keys()}
                stored = {name: header.get_dtype() for name, header in headers.items()}
                unknown = {name: dtype for name, dtype in stored.items() if dtype not in DTYPES}
                if not unknown:
                    self.tensors |= {
                        name: StoredTensor(file, tuple(header.get_shape()), DTYPES[stored[name]])
                        for name, header in headers.items()
                    }
            # a header may be anything: not JSON, a list, or longer than memory
            except Exception as error:
                damage = "It is missing or corrupted: download it again."
                raise UserError(
                    f"{file}: cannot be read as safetensors ({reason(error)}).\n{damage}"
                ) from error
            for name, dtype in unknown.items():
                raise UserError(
                    f"{file}: {name} has the type {dtype}, which torch {torch.__version__} cannot read.\n"
                    f"Install a newer torch, or use a version in 16 bits."
                )

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`. Only these rows are read."""
        handle = self._handles[self.tensors[name].file]
        return (
            handle.get_slice(name)[start:stop]
            if self.tensors[name].shape
            else handle.get_tensor(name)
        )

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read columns [start, stop) of a matrix in the stored dtype. Only these are read."""
        handle = self._handles[self.tensors[name].file]
        columns: torch.Tensor = handle.get_slice(name)[:, start:stop]
        return columns


class OverlaidSource(WeightSource):
    """The tensors of one source; those of another source replace tensors with the same names."""

    def __init__(self, under: WeightSource, over: WeightSource) -> None:
        self.tensors = under.tensors | over.tensors
        self._holders = dict.fromkeys(under.tensors, under)
        self._holders |= dict.fromkeys(over.tensors, over)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self._holders[name].read_rows(name, start, stop)


def listed(names: list[str], most: int = 8) -> str:
    """Return names for a message. Those beyond `most` are only counted."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", ... and {len(names) - most} more"
    return text


def open_weights(folder: Path) -> SafetensorsSource:
    """Open the weights of a model directory. Raises UserError if there are none or a file cannot be
    read."""
    files = weight_files(folder)
    if files:
        return SafetensorsSource(files)
    raise UserError(f"{folder}: no {SINGLE_FILE} or {INDEX_FILE} here. {TO_SAFETENSORS}")


def fingerprint(folder: Path) -> str:
    """Return a hash of config.json, and of the size and samples of each file of weights. It
    identifies a model without reading it completely. Fine-tuning changes all of a tensor, so the
    samples change."""
    lasting = json.loads((folder / "config.json").read_text())
    for name in IGNORED_CONFIG_KEYS:
        lasting.pop(name, None)
    digest = xxhash.xxh3_128(json.dumps(lasting, sort_keys=True).encode())
    for file in filter(Path.exists, weight_files(folder)):  # loading will report missing files
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb", buffering=0) as opened:
            for sample in range(SAMPLES):
                opened.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def blocks(source: WeightSource, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in order, in blocks of BLOCK_ELEMENTS or one row."""
    shape = source.tensors[name].shape or (1,)
    for start, stop in row_blocks(shape, 0, shape[0], BLOCK_ELEMENTS):
        yield source.read_rows(name, start, stop)


def row_blocks(
    shape: tuple[int, ...], start: int, stop: int, most: int
) -> Iterator[tuple[int, int]]:
    """Split rows [start, stop) of a tensor into blocks of at most `most` elements, or of one
    row."""
    row_elements = max(1, torch.Size(shape[1:]).numel())
    rows = max(1, most // row_elements)
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model directory that Transformers loads: the one that config.json
    names, else the single file, else those that the index names, else none. Later files replace
    tensors of earlier ones. Links are followed, as in the Hub's cache.

    Raises:
        UserError: the index is malformed or leaves its directory, or Transformers would load a
            distributed checkpoint.
    """
    if shards := sorted(folder.glob(DISTRIBUTED)):
        raise UserError(
            f"{folder}: holds a distributed checkpoint ({shards[0].name}), which is not supported. Load it with "
            "Transformers and save it with save_pretrained."
        )
    index = folder / INDEX_FILE
    single = folder / SINGLE_FILE
    named = _named_by_config(folder)
    if named is not None:
        index = single = folder / named
    is_index = named is not None and named.endswith(".index.json")
    # as in Transformers: an older save into the same directory may have left the index
    if not is_index and (single.is_file() or not index.exists()):
        return [_regular(single)] if single.exists() or named is not None else []
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(Path(name)) for name in weight_map.values()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OSError) as error:
        raise UserError(f"{index}: not a safetensors index ({error}).") from error
    for name in names:
        _check_inside(index, name)
    return [_regular(folder / name) for name in sorted(names)]


def _named_by_config(folder: Path) -> str | None:
    """Return the file of weights that config.json names (`transformers_weights`), or None."""
    try:
        settings = json.loads((folder / "config.json").read_text())
        name = settings.get("transformers_weights")
    except (ValueError, AttributeError, RecursionError, OSError):
        return None  # load_model_config reports it
    if name is None:
        return None
    if not str(name).endswith((".safetensors", ".safetensors.index.json")):
        raise UserError(
            f"{folder / 'config.json'}: transformers_weights is {name}. Expected a *.safetensors file or its index."
        )
    _check_inside(folder / "config.json", str(name))
    return str(name)


def _check_inside(file: Path, name: str) -> None:
    """Raise UserError if a file names another one outside its directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{file}: names {name}, which is outside its directory.")


def _regular(file: Path) -> Path:
    """Return a file that is missing or can be opened without waiting."""
    problem = file_problem(str(file)) if file.exists() else None
    if problem:
        raise UserError(f"{file}: {problem}")
    return file
