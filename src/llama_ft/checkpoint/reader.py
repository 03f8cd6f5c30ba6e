"""Read checkpoints/step-000100/: verify its checksums, and read any rows of any tensor.

docs/reference/checkpoint-format.md describes the files: each rank's rows as safetensors,
trainer.json, checksums.txt. A header stores the first row of each block, so reading does not depend
on the number of ranks that wrote. Nothing is unpickled.
"""

import copy
import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystem

from llama_ft.config.objectives import FILES_OF_CHECKPOINTS
from llama_ft.errors import UserError
from llama_ft.models.base.source import StoredTensor, WeightSource

TRAINER_FILE = "trainer.json"
CHECKSUMS_FILE = "checksums.txt"
FORMAT = 2


class _StoredRows(NamedTuple):
    """Rows of a tensor that one rank has written."""

    first_row: int
    rows: int  # number; 1 for a scalar
    file: str
    key: str  # the tensor's name in the file


class Checkpoint:
    """A checkpoint opened for reading: headers and trainer.json are read at once, tensors on
    request. No file stays open or mapped, so deleting a file frees its space.

    Args:
        folder: checkpoints/step-000100.

    Attributes:
        run: the directory of the run that wrote it; the checkpoint itself if it was moved out of
            its run.
        trainer: the content of trainer.json.
        step: optimizer steps done.
        tensors: name -> whole shape and dtype.

    Raises:
        UserError: the directory is not a checkpoint of this version of llama_ft.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = run_of(folder)
        try:
            self.trainer: dict[str, Any] = json.loads(read_bytes(folder / TRAINER_FILE))
            self.step = int(self.trainer["step"])
            if self.trainer["format"] != FORMAT:
                raise ValueError("of another version of llama_ft")
            held = self.open_storage().read_metadata()
        # safetensors has its own errors, and other files can hold anything
        except Exception as error:
            raise UserError(f"{folder}: cannot be read as a checkpoint ({error!r}).") from error
        headers: dict[str, Any] = held.state_dict_metadata
        self.tensors = {
            name: StoredTensor(folder, tuple(header.size), header.properties.dtype)
            for name, header in headers.items()
        }
        self._pieces = dict[str, list[_StoredRows]]()
        for index, stored in held.storage_data.items():
            first = index.offset[0] if stored.shape else 0
            rows = stored.shape[0] if stored.shape else 1
            piece = _StoredRows(first, rows, stored.relative_path, index.fqn)
            self._pieces.setdefault(index.fqn, []).append(piece)

    def open_storage(self) -> dcp.StorageReader:
        """Open the files of the ranks for `dcp.load`."""
        storage = dcp.HuggingFaceStorageReader(str(self.folder))
        storage.fs = _Shards(int(self.trainer["world_size"]))
        return storage

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read only the rows [start, stop) of dimension 0, in the stored dtype."""
        header = self.tensors[name]
        shape = (stop - start, *header.shape[1:])
        rows = torch.empty(shape, dtype=header.dtype)
        for piece in self._pieces[name]:
            first = piece.first_row
            low = max(start, first)
            high = min(stop, first + piece.rows)
            if low < high:
                with safe_open(piece.file, framework="pt") as opened:
                    mapped = opened.get_slice(piece.key)[low - first : high - first]
                    rows[low - start : high - start] = mapped
        return rows

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor in the stored dtype."""
        shape = self.tensors[name].shape
        if shape:
            return self.read_rows(name, 0, shape[0])
        piece = self._pieces[name][0]
        with safe_open(piece.file, framework="pt") as opened:
            # a copy, because the tensor is mapped memory of the file
            return torch.clone(opened.get_tensor(piece.key))

    def weights(self) -> WeightSource:
        """The trained parameters, by the model's own names."""
        trained = copy.copy(self)
        names = [name for name in self.tensors if name.startswith("model.")]
        trained.tensors = {name.removeprefix("model."): self.tensors[name] for name in names}
        trained._pieces = {name.removeprefix("model."): self._pieces[name] for name in names}
        return trained


class _Shards(FileSystem):
    """The files that torch reads of a checkpoint: those of its ranks. In the same directory are
    those of a reference, and perhaps of other programs."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        files = [Path(path) / shard_file(rank) for rank in range(self._ranks)]
        for file in files:
            check_regular(file)
        return [str(file) for file in files]


def shard_file(rank: int) -> str:
    """Return the name of the file that a rank writes. torch counts from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Return the path of a run's checkpoint of this step."""
    return run / "checkpoints" / f"step-{step:06d}"


def run_of(folder: Path) -> Path:
    """Return the directory of the run that wrote a checkpoint; the checkpoint itself if it was moved
    out of its run."""
    # `step-000100` as typed inside checkpoints/, or a link to it, has no such parents itself
    for path in (folder, folder.resolve()):
        if path.parent.name == "checkpoints":
            return path.parent.parent
    return folder


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint by its name, step-000100."""
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run directory, newest first. They are complete, but may be
    corrupted."""
    paths = [
        path
        for path in (run / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d{6,}", path.name)
    ]
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def checkpoint_errors(
    folder: Path,
    part: int = 0,
    parts: int = 1,
) -> list[str]:
    """Compare a checkpoint's files with their checksums, which reads them completely. The file of
    the reference is not compared: it checks itself, and a run computes it again if it is corrupted.

    Args:
        folder: checkpoints/step-000100.
        part: which of `parts` equal shares of the files to check, so that ranks can share the work.
        parts: number of shares; 1: all files. The first one also opens the checkpoint.

    Returns:
        One line per file that is missing or corrupted; empty for a valid checkpoint.
    """
    errors = []
    try:
        *lines, end = read_bytes(folder / CHECKSUMS_FILE).decode("ascii").split("\n")
        listed = {}
        for line in lines:
            digest, name = line.split("  ")
            listed[name] = digest
        others = listed.keys() - {*FILES_OF_CHECKPOINTS}
        shards = {shard_file(rank) for rank in range(len(others) - 1)}
        # The file ends in a line break, and no rank's file is missing.
        if end or others != {TRAINER_FILE, *shards}:
            raise ValueError("corrupted")
    except (OSError, ValueError) as error:
        return [f"{CHECKSUMS_FILE}: {error}"] if part == 0 else []
    for name in sorted(others)[part::parts]:
        try:
            if file_digest(folder / name) != listed[name]:
                errors.append(f"{name} is corrupted: its checksum differs from {CHECKSUMS_FILE}")
        except OSError as error:
            errors.append(f"{name} cannot be read ({error.strerror})")
    if part == 0 and not errors:
        try:
            Checkpoint(folder)
        except UserError as error:
            errors += error.messages
    return errors


def read_bytes(file: Path) -> bytes:
    """Return the content of a file. Raises OSError also for what is not a regular file."""
    check_regular(file)
    return file.read_bytes()


def check_regular(file: Path) -> None:
    """Raise OSError if there is no file, or something else: to open a pipe waits for ever."""
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a file", str(file))


def content_digest(content: bytes) -> str:
    """Return what `file_digest` returns for a file of this content."""
    return xxhash.xxh3_128_hexdigest(content)


def file_digest(file: Path) -> str:
    """Return the xxh3_128 hash of a file's content, in hex."""
    check_regular(file)
    with open(file, "rb", buffering=0) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
