"""Reading a Hugging Face folder's safetensors a few rows at a time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llama_ft.errors import UserError

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, as its file's header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsSource:
    """Tensors of one or more safetensors files by name. Opening reads headers only; files are memory-mapped.

    Args:
        files: the files; a name must not occur in two of them.

    Raises:
        UserError: a file is missing, truncated or not safetensors, or holds a dtype that torch does not know.
    """

    def __init__(self, files: list[Path]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._handles: dict[Path, Any] = {}
        for file in files:
            handle = self._handles[file] = _open(file)
            for name in handle.keys():
                header = handle.get_slice(name)
                dtype = DTYPES.get(header.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"{file}: {name} is stored as {header.get_dtype()}, which is not read here.\nUse the model in "
                        "bf16, fp16 or fp32."
                    )
                self.tensors[name] = StoredTensor(file, tuple(header.get_shape()), dtype)

    @classmethod
    def of_model(cls, folder: Path) -> "SafetensorsSource":
        """The weights of a model folder: the files its index names, or its single file.

        Raises:
            UserError: the folder holds no safetensors weights, or its index names files that are not there.
        """
        index = folder / INDEX_FILE
        if index.exists():
            try:
                files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise UserError(f"{index}: not a safetensors index ({error}).") from error
        elif (folder / SINGLE_FILE).exists():
            files = [folder / SINGLE_FILE]
        else:
            raise UserError(
                f"{folder}: no weights here; expected {SINGLE_FILE}, or {INDEX_FILE} and the files it names.\n"
                "A folder with .bin or .pth weights is converted by loading it with transformers and calling "
                "save_pretrained."
            )
        return cls(files)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0 in the file's dtype; only they are read."""
        rows: torch.Tensor = self._handles[self.tensors[name].file].get_slice(name)[start:stop]
        return rows

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in the file's dtype."""
        tensor: torch.Tensor = self._handles[self.tensors[name].file].get_tensor(name)
        return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file, but {INDEX_FILE} beside it names it.") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: cannot be read as safetensors ({error}).\nThe file is truncated or damaged: copy or download it "
            "again."
        ) from error
