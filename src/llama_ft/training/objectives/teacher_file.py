"""The file of a teacher's probabilities: its k most likely tokens for each target of each example.

It is a safetensors file, which is mapped into memory:

    keys [examples]               int64    hash of an example's tokens and labels, see example_key
    ends [examples]               int64    where its targets end among those of all examples
    token_ids [targets, k]        int32    the most likely tokens of each target
    log_probabilities             float32  of the same shape

The examples are those of the training data, in their order. The header has a fingerprint of all
that determines the numbers, and a checksum.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from llama_ft.data import Batch
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.training.objectives.reference import find_examples

CORRUPTED = (
    OSError,
    LookupError,
    ValueError,
    TypeError,
    MemoryError,
    OverflowError,
    RecursionError,
)
BYTES_HASHED_AT_ONCE = 2**24
CHECKSUM_LENGTH = 32  # hex digits of xxh3_128
DTYPES = {"I64": numpy.int64, "I32": numpy.int32, "F32": numpy.float32}
NAMES = ("keys", "ends", "token_ids", "log_probabilities")


class TeacherFile:
    """A complete file, to look up the targets of micro-batches. Raises OSError or ValueError if it
    cannot be mapped."""

    def __init__(self, path: Path) -> None:
        keys, self._ends, self._token_ids, self._log_probabilities = map_tensors(path, "r")
        # Equal examples have equal numbers: the first one is found.
        self._sorted_keys, self._first = numpy.unique(keys, return_index=True)

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, int64 [targets, k], and their log-probabilities, float32 [targets, k],
        of a micro-batch, on the host. Raises RunFailure if an example is not in the file."""
        size = self._token_ids.shape[1]
        if not batch.locations:  # a rank without samples has no targets
            return torch.zeros(0, size, dtype=torch.int64), torch.zeros(0, size)
        failure = "the teacher's probabilities of this sample are not stored."
        indices = find_examples(self._sorted_keys, batch, failure)
        token_ids = []
        log_probabilities = []
        for example in self._first[indices].tolist():
            targets = targets_of(self._ends, example)
            token_ids.append(self._token_ids[targets])
            log_probabilities.append(self._log_probabilities[targets])
        return (
            torch.from_numpy(numpy.concatenate(token_ids).astype(numpy.int64)),
            torch.from_numpy(numpy.concatenate(log_probabilities)),
        )


class TeacherWriter:
    """Writes a file. It appears under its name when it is complete.

    Args:
        path: of the file.
        fingerprint: all that determines the numbers; `distill_top_k` is k.
        keys: of the examples.
        targets: number of targets of each example.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """

    def __init__(
        self, path: Path, fingerprint: dict[str, Any], keys: numpy.ndarray, targets: numpy.ndarray
    ) -> None:
        self._path = path
        # Nodes may share the directory.
        self._aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        ends = numpy.cumsum(targets)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _create(self._aside, fingerprint, len(keys), int(ends[-1]))
        except OSError:
            self.abandon()
            raise
        stored = map_tensors(self._aside, "r+")
        stored[0][:] = keys
        stored[1][:] = ends
        self._tensors = stored

    def write(
        self, examples: Sequence[int], token_ids: numpy.ndarray, log_probabilities: numpy.ndarray
    ) -> None:
        """Write the targets [targets, k] of some examples, whose indices are given."""
        _, ends, stored_ids, stored_log_probabilities = self._tensors
        start = 0
        for example in examples:
            targets = targets_of(ends, example)
            rows = slice(start, start + targets.stop - targets.start)
            stored_ids[targets] = token_ids[rows]
            stored_log_probabilities[targets] = log_probabilities[rows]
            start = rows.stop
        if start != len(token_ids):
            raise RunFailure(f"teacher: {len(token_ids)} targets were computed; expected {start}.")

    def finish(self) -> None:
        """Write the checksum into the header, and give the file its name."""
        for tensor in self._tensors:
            tensor.flush()  # type: ignore[attr-defined]  # a memmap
        _, start = _header(self._aside)
        checksum = _checksum(self._aside)
        with self._aside.open("r+b") as file:
            text = file.read(start)
            file.seek(text.index(b'"checksum": "' + b"0" * CHECKSUM_LENGTH))
            file.write(f'"checksum": "{checksum}"'.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._aside, self._path)

    def abandon(self) -> None:
        """Delete the incomplete file."""
        self._aside.unlink(missing_ok=True)


def check_file(path: Path, fingerprint: dict[str, Any]) -> None:
    """Check all of a file.

    Raises:
        ValueError: it is missing or corrupted.
        UserError: it was computed with something else than `fingerprint` says.
    """
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for ever
            raise ValueError("not a file")
        header, start = _header(path)
        metadata = header["__metadata__"]
        saved: dict[str, Any] = json.loads(metadata["fingerprint"])
        _, end = header[NAMES[-1]]["data_offsets"]
        if path.stat().st_size != start + end:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, not {start + end:,}")
        if metadata["checksum"] != _checksum(path):
            raise ValueError("its checksum differs")
    except CORRUPTED as error:
        raise ValueError(f"{path}: not a valid file of a teacher ({reason(error)}).") from error
    others = [name for name, value in fingerprint.items() if saved.get(name) != value]
    if others:
        described = [f"{name} {saved.get(name)}, not {fingerprint[name]}" for name in others]
        raise UserError(
            f"{path}: these probabilities of a teacher were computed with another {' and '.join(others)} "
            f"({'; '.join(described):.300}).\n"
            "Set another --teacher_file, or delete this one to compute it again."
        )


def stored_bytes(examples: int, targets: int, size: int) -> int:
    """Return the bytes of a file without its header, about 1 KB."""
    return sum(_tensor_bytes(*about) for about in _layout(examples, targets, size).values())


def targets_of(ends: numpy.ndarray, example: int) -> slice:
    """Return which targets belong to an example. `ends`: of the file."""
    start = int(ends[example - 1]) if example else 0
    return slice(start, int(ends[example]))


def map_tensors(path: Path, mode: Any) -> list[numpy.ndarray]:
    """Map the tensors of a file into memory, in the order of NAMES."""
    header, start = _header(path)
    tensors = list[numpy.ndarray]()
    for name in NAMES:
        about = header[name]
        first, _ = about["data_offsets"]
        shape = tuple(about["shape"])
        tensors.append(numpy.memmap(path, DTYPES[about["dtype"]], mode, start + first, shape))
    return tensors


def _layout(examples: int, targets: int, size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> dtype and shape of the tensors, in order."""
    kinds = ("I64", "I64", "I32", "F32")
    shapes: tuple[tuple[int, ...], ...] = (
        (examples,), (examples,), (targets, size), (targets, size),
    )  # fmt: skip
    return dict(zip(NAMES, zip(kinds, shapes, strict=True), strict=True))


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * numpy.dtype(DTYPES[dtype]).itemsize


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("it has no header of safetensors")
        header: dict[str, Any] = json.loads(file.read(length))
    return header, 8 + length


def _create(path: Path, fingerprint: dict[str, Any], examples: int, targets: int) -> None:
    """Create a file without numbers."""
    metadata = {
        "fingerprint": json.dumps(fingerprint, sort_keys=True),
        "checksum": "0" * CHECKSUM_LENGTH,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in _layout(examples, targets, fingerprint["distill_top_k"]).items():
        end = offset + _tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires data aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        # Writing to mapped memory while the disk is full would kill the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)


def _checksum(path: Path) -> str:
    """Return the checksum of the fingerprint and of all tensors with their names and shapes."""
    header, start = _header(path)
    metadata = header.pop("__metadata__")
    digest = xxhash.xxh3_128(metadata["fingerprint"].encode())
    digest.update(json.dumps(header, sort_keys=True).encode())
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(BYTES_HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()
