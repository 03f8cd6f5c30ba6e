"""Writing a safetensors file row by row. The library's own writer wants every tensor of a file in memory at once.

Format: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes in order
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from llama_ft.models.source import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """Shape and dtype of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file whose tensors are appended in the order of `headers`, in as many pieces as one likes.

    Args:
        path: the file.
        headers: every tensor it will hold, in order.
        enabled: False on the ranks that do not write; their file does nothing.

    Raises:
        ValueError: on leaving the block, if not exactly the announced bytes were appended.
    """

    def __init__(self, path: Path, headers: dict[str, TensorHeader], enabled: bool) -> None:
        self._file = open(path, "wb") if enabled else None
        self._expected = sum(header.nbytes for header in headers.values())
        self._written = 0
        if self._file is None:
            return
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, header in headers.items():
            end = offset + header.nbytes
            table[name] = {
                "dtype": DTYPE_NAMES[header.dtype],
                "shape": list(header.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, rows: torch.Tensor) -> None:
        """Write the next rows of the current tensor (on the host, in its announced dtype)."""
        assert self._file is not None
        self._written += self._file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if kind is None and self._written != self._expected:
            raise ValueError(f"{self._file.name}: {self._written} bytes written, {self._expected} announced")
