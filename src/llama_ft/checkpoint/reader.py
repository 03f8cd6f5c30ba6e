"""checkpoints/step-000100/ from the outside: is it what was written, and any rows of any tensor, whoever wrote them.

    rank-00000.safetensors   one a rank: its rows of the trained parameters (model/<name>) and of the optimizer's states
                             (optimizer/<name>/<state>), and its random number generators (rng/cpu, rng/cuda)
    trainer.json             where the run was, and how it was set
    checksums.txt            what every other file must hold; `xxh128sum -c checksums.txt` checks it too

Rows of a tensor, put together in the order of the shards, are the tensor: nothing depends on the number of ranks that
wrote it. Nothing here is ever unpickled.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import xxhash

from llama_ft.errors import RunFailure, UserError
from llama_ft.models.source import SafetensorsSource, StoredTensor

TRAINER_FILE = "trainer.json"
CHECKSUMS_FILE = "checksums.txt"
STEP_FOLDER = re.compile(r"step-(\d{6,})")
CHECKSUM_LINE = re.compile(r"([0-9a-f]{32})  ([^/\n]+)")
READ_BYTES = 2**22
FORMAT = 1


class Checkpoint:
    """A checkpoint, open for reading: headers and trainer.json are read, tensors when they are asked for.

    Args:
        folder: checkpoints/step-000100.

    Attributes:
        trainer: what trainer.json holds.
        step: optimizer steps done.
        tensors: whole shape and dtype of `model/...` and `optimizer/...` by name.
        whole: names of tensors that ranks do not share out by rows (step counters, sums over rows).

    Raises:
        UserError: the folder is no checkpoint.
        RunFailure: it lacks a file or is of a newer format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / TRAINER_FILE).is_file():
            raise UserError(f"{folder}: no checkpoint; expected a directory step-... with {TRAINER_FILE} in it.")
        try:
            self.trainer: dict[str, Any] = json.loads((folder / TRAINER_FILE).read_text())
            self.step, self.ranks = int(self.trainer["step"]), int(self.trainer["world_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailure(f"{folder / TRAINER_FILE}: damaged ({error!r}).") from error
        if self.trainer.get("format") != FORMAT:
            raise RunFailure(f"{folder}: written by another version of llama_ft, whose format this one does not read.")
        self.tensors: dict[str, StoredTensor] = {}
        self.whole: set[str] = set()
        self._pieces: dict[str, list[tuple[int, int, SafetensorsSource]]] = {}
        self._files = [SafetensorsSource([folder / rank_file(rank)]) for rank in range(self.ranks)]
        self._put_together()

    @property
    def run(self) -> Path:
        """The directory of the run that wrote it."""
        return self.folder.parent.parent

    def _put_together(self) -> None:
        parts: dict[str, list[tuple[int, SafetensorsSource]]] = defaultdict(list)
        for file in self._files:
            self.whole |= set(json.loads(file.metadata.get("whole", "[]")))
            for name in file.tensors:
                if not name.startswith("rng/"):
                    parts[name].append((int(file.metadata["shard"]), file))
        for name, files in parts.items():
            rows, pieces = 0, []
            for _, file in sorted(files, key=lambda it: it[0]):
                header = file.tensors[name]
                count = header.shape[0] if header.shape else 1
                pieces.append((rows, rows + count, file))
                rows += count
            self._pieces[name] = pieces
            shape = (rows, *header.shape[1:]) if header.shape else ()
            self.tensors[name] = StoredTensor(self.folder, shape, header.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0, in the dtype they are stored in; only they are read."""
        found = [
            file.read_rows(name, max(start, first) - first, min(stop, last) - first)
            for first, last, file in self._pieces[name]
            if first < stop and start < last
        ]
        if len(found) == 1:
            return found[0]
        header = self.tensors[name]
        return torch.cat(found) if found else torch.empty((0, *header.shape[1:]), dtype=header.dtype)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in the dtype it is stored in."""
        shape = self.tensors[name].shape
        return self.read_rows(name, 0, shape[0]) if shape else self._pieces[name][0][2].read(name)

    def generator_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Device type -> state of a rank's random number generator; nothing for a rank that did not write it."""
        if rank >= self.ranks:
            return {}
        file = self._files[rank]
        return {name.removeprefix("rng/"): file.read(name) for name in file.tensors if name.startswith("rng/")}

    def weights(self) -> "TrainedWeights":
        """The trained parameters by the model's own names."""
        return TrainedWeights(self)


class TrainedWeights:
    """The trained parameters of a checkpoint as a `models.source.WeightSource`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors = {
            name.removeprefix("model/"): header
            for name, header in checkpoint.tensors.items()
            if name.startswith("model/")
        }

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self._checkpoint.read_rows(f"model/{name}", start, stop)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return self._checkpoint.read(f"model/{name}")


def rank_file(rank: int) -> str:
    """Name of the file a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return run / "checkpoints" / f"step-{step:06d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, newest first. A directory of that name is complete, if undamaged."""
    found = [path for path in (run / "checkpoints").glob("step-*") if STEP_FOLDER.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: -int(path.name.removeprefix("step-")))


def damage(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Compare a checkpoint's files with their checksums, reading them whole.

    Args:
        folder: checkpoints/step-000100.
        part: which of `parts` equal shares of the files to look at, for ranks that share the work.
        parts: 1: all files.

    Returns:
        A line for each file that is missing or not what was written; nothing if all is well.
    """
    try:
        lines = (folder / CHECKSUMS_FILE).read_bytes().decode("ascii").split("\n")
    except FileNotFoundError:
        return [f"{CHECKSUMS_FILE} is missing"] if part == 0 else []
    except (OSError, UnicodeDecodeError) as error:
        return [f"{CHECKSUMS_FILE} cannot be read ({error})"] if part == 0 else []
    matches = [CHECKSUM_LINE.fullmatch(line) for line in lines[:-1]]
    listed = {match[2]: match[1] for match in matches if match}
    expected = {TRAINER_FILE, *(rank_file(rank) for rank in range(len(listed) - 1))}
    if lines[-1] or not all(matches) or len(listed) != len(matches) or listed.keys() != expected:
        return [f"{CHECKSUMS_FILE} is not what was written"] if part == 0 else []
    found = []
    for name in sorted(listed)[part::parts]:
        try:
            if file_digest(folder / name) != listed[name]:
                found.append(f"{name} is not what was written: its checksum is not that in {CHECKSUMS_FILE}")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def file_digest(file: Path) -> str:
    """xxh3_128 of a file's content, in hex."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
