"""checkpoints/step-000100/ from the outside: is it what was written, and any rows of any tensor, whoever wrote them.

docs/checkpoints.md says what the files hold: each rank's rows as safetensors, trainer.json and checksums.txt. A header
says at which row of its tensor a piece begins: nothing depends on the number of ranks that wrote it. Nothing here is
ever unpickled.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from llama_ft.errors import UserError
from llama_ft.models.source import DTYPES, StoredTensor, WeightSource

TRAINER_FILE = "trainer.json"
CHECKSUMS_FILE = "checksums.txt"
STEP_FOLDER = re.compile(r"step-(\d{6,})")
CHECKSUM_LINE = re.compile(r"([0-9a-f]{32})  ([^/\n]+)")
READ_BYTES = 2**22
FORMAT = 2
SHARDING_INFO, SAVED_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names for where pieces begin


class Checkpoint:
    """A checkpoint, open for reading: headers and trainer.json are read, tensors when they are asked for. No file stays
    open or mapped: deleting one frees its space.

    Args:
        folder: checkpoints/step-000100.

    Attributes:
        trainer: what trainer.json holds.
        step: optimizer steps done.
        tensors: whole shape and dtype of every tensor by name.

    Raises:
        UserError: the folder is no checkpoint of this version of llama_ft.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._prefix = ""  # of the names in the files
        self._pieces: dict[str, list[tuple[int, int, Path]]] = {}  # first row, last, file
        try:
            self.trainer: dict[str, Any] = json.loads((folder / TRAINER_FILE).read_text())
            self.step = int(self.trainer["step"])
            if self.trainer["format"] != FORMAT:
                raise ValueError("of another version of llama_ft")
            for rank in range(int(self.trainer["world_size"])):
                self._add(folder / shard_file(rank))
        except Exception as error:  # safetensors has its own; what is no checkpoint can hold anything
            raise UserError(f"{folder}: cannot be read as a checkpoint ({error!r}).") from error

    @property
    def run(self) -> Path:
        """The directory of the run that wrote it."""
        return self.folder.parent.parent

    def _add(self, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads(opened.metadata()[SHARDING_INFO])
            for name in opened.keys():
                header = opened.get_slice(name)
                shape, dtype = tuple(header.get_shape()), DTYPES[header.get_dtype()]
                start, count = (offsets[name][SAVED_OFFSETS][0], shape[0]) if shape else (0, 1)
                pieces = self._pieces.setdefault(name, [])
                pieces.append((start, start + count, file))
                whole = (max(stop for _, stop, _ in pieces), *shape[1:]) if shape else ()
                self.tensors[name] = StoredTensor(self.folder, whole, dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0, in the dtype they are stored in; only they are read."""
        header, key = self.tensors[name], self._prefix + name
        rows = torch.empty((stop - start, *header.shape[1:]), dtype=header.dtype)
        for first, last, file in self._pieces[key]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                with safe_open(file, framework="pt") as opened:
                    rows[low - start : high - start] = opened.get_slice(key)[low - first : high - first]
        return rows

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in the dtype it is stored in."""
        if shape := self.tensors[name].shape:
            return self.read_rows(name, 0, shape[0])
        key = self._prefix + name
        with safe_open(self._pieces[key][0][2], framework="pt") as opened:
            return torch.clone(opened.get_tensor(key))

    def generator_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Device type -> state of a rank's random number generator; nothing for a rank that did not write it."""
        prefix = f"rng.{rank}."
        return {name.removeprefix(prefix): self.read(name) for name in self.tensors if name.startswith(prefix)}

    def weights(self) -> WeightSource:
        """The trained parameters by the model's own names."""
        trained = copy.copy(self)
        trained._prefix = "model."
        named = self.tensors.items()
        trained.tensors = {name.removeprefix("model."): it for name, it in named if name.startswith("model.")}
        return trained


def shard_file(rank: int) -> str:
    """Name of the file a rank writes: torch counts from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return run / "checkpoints" / f"step-{step:06d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, newest first. A directory of that name is complete, if not corrupted."""
    found = [path for path in (run / "checkpoints").glob("step-*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: -int(path.name.removeprefix("step-")))


def checkpoint_errors(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Compare a checkpoint's files with their checksums, reading them whole.

    Args:
        folder: checkpoints/step-000100.
        part: which of `parts` equal shares of the files to look at, for ranks that share the work.
        parts: 1: all files.

    Returns:
        A line for each file that is missing or not what was written; nothing if all is well.
    """
    errors = []
    try:
        lines = (folder / CHECKSUMS_FILE).read_bytes().decode("ascii").split("\n")
        matches = [CHECKSUM_LINE.fullmatch(line) for line in lines[:-1]]
        listed = {match[2]: match[1] for match in matches if match}
        if lines[-1] or listed.keys() != {TRAINER_FILE, *(shard_file(rank) for rank in range(len(lines) - 2))}:
            raise ValueError("not what was written")
    except (OSError, ValueError) as error:
        return [f"{CHECKSUMS_FILE}: {error}"] if part == 0 else []
    for name in sorted(listed)[part::parts]:
        try:
            if file_digest(folder / name) != listed[name]:
                errors.append(f"{name} is not what was written: its checksum is not that in {CHECKSUMS_FILE}")
        except OSError as error:
            errors.append(f"{name} cannot be read ({error.strerror})")
    return errors


def file_digest(file: Path) -> str:
    """xxh3_128 of a file's content, in hex."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
