"""checkpoints/step-000100/ from the outside: is it what was written, and any rows of any tensor, whoever wrote them.

    shard-00001-model-00001-of-00001.safetensors
                     one per rank, as torch.distributed.checkpoint names and reads them: rows of the trained parameters
                     (model.<name>) and optimizer states (optimizer.state.<name>.<state>), and the states of the rank's
                     random number generators (rng.<rank>.cpu, rng.<rank>.cuda)
    trainer.json     where the run was, and how it was set
    checksums.txt    what every other file must hold; `xxh128sum -c checksums.txt` checks it too

A header says at which row of its tensor a piece begins: nothing depends on the number of ranks that wrote it. Nothing
here is ever unpickled.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import xxhash

from llama_ft.errors import RunFailure, UserError
from llama_ft.models.source import DTYPES, StoredTensor

TRAINER_FILE = "trainer.json"
CHECKSUMS_FILE = "checksums.txt"
EARLIER_FILE = "rank-00000.safetensors"  # of format 1
STEP_FOLDER = re.compile(r"step-(\d{6,})")
CHECKSUM_LINE = re.compile(r"([0-9a-f]{32})  ([^/\n]+)")
READ_BYTES = 2**22
FORMAT = 2
SHARDING_INFO, SAVED_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names for where pieces begin


class Checkpoint:
    """A checkpoint, open for reading: headers and trainer.json are read, tensors when they are asked for. No file stays
    open or mapped: one that is deleted gives its space back.

    Args:
        folder: checkpoints/step-000100.

    Attributes:
        trainer: what trainer.json holds.
        step: optimizer steps done.
        tensors: whole shape and dtype of every tensor by name.

    Raises:
        UserError: the folder is no checkpoint, or a file of it is not safetensors.
        RunFailure: it is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / TRAINER_FILE).is_file():
            raise UserError(f"{folder}: no checkpoint; expected a directory step-... with {TRAINER_FILE} in it.")
        try:
            self.trainer: dict[str, Any] = json.loads((folder / TRAINER_FILE).read_text())
            self.step, ranks = int(self.trainer["step"]), int(self.trainer["world_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailure(f"{folder / TRAINER_FILE}: damaged ({error!r}).") from error
        if self.trainer.get("format") != FORMAT:
            raise _another_format(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._pieces: dict[str, list[tuple[int, int, Path, int]]] = {}  # first row, last, file, where in it
        for rank in range(ranks):
            self._add(folder / shard_file(rank))

    @property
    def run(self) -> Path:
        """The directory of the run that wrote it."""
        return self.folder.parent.parent

    def _add(self, file: Path) -> None:
        try:
            with open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size) if size < file.stat().st_size else b"")
            offsets = json.loads(header.pop("__metadata__")[SHARDING_INFO])
            for name, entry in header.items():
                shape, begin = tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
                start, count = (offsets[name][SAVED_OFFSETS][0], shape[0]) if shape else (0, 1)
                pieces = self._pieces.setdefault(name, [])
                pieces.append((start, start + count, file, begin))
                whole = (max(stop for _, stop, _, _ in pieces), *shape[1:]) if shape else ()
                self.tensors[name] = StoredTensor(self.folder, whole, DTYPES[entry["dtype"]])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: cannot be read as safetensors of a checkpoint ({error!r}).") from error

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0, in the dtype they are stored in; only they are read."""
        header = self.tensors[name]
        rows = torch.empty((stop - start, *header.shape[1:]) if header.shape else (), dtype=header.dtype)
        target, size = rows.view(-1).view(torch.uint8).numpy().data, rows.nbytes // max(1, stop - start)
        for first, last, file, begin in self._pieces[name]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                with open(file, "rb") as opened:
                    opened.seek(begin + (low - first) * size)
                    if opened.readinto(target[(low - start) * size : (high - start) * size]) != (high - low) * size:
                        raise RunFailure(f"{file}: truncated.")
        return rows

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in the dtype it is stored in."""
        return self.read_rows(name, 0, (self.tensors[name].shape or (1,))[0])

    def generator_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Device type -> state of a rank's random number generator; nothing for a rank that did not write it."""
        prefix = f"rng.{rank}."
        return {name.removeprefix(prefix): self.read(name) for name in self.tensors if name.startswith(prefix)}

    def weights(self) -> "TrainedWeights":
        """The trained parameters by the model's own names."""
        return TrainedWeights(self)


class TrainedWeights:
    """The trained parameters of a checkpoint as a `models.source.WeightSource`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors = {
            name.removeprefix("model."): header
            for name, header in checkpoint.tensors.items()
            if name.startswith("model.")
        }

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self._checkpoint.read_rows(f"model.{name}", start, stop)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return self._checkpoint.read(f"model.{name}")


def shard_file(rank: int) -> str:
    """Name of the file a rank writes: torch counts from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return run / "checkpoints" / f"step-{step:06d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, newest first. A directory of that name is complete, if undamaged."""
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

    Raises:
        RunFailure: it is of the earlier format.
    """
    try:
        lines = (folder / CHECKSUMS_FILE).read_bytes().decode("ascii").split("\n")
    except FileNotFoundError:
        return [f"{CHECKSUMS_FILE} is missing"] if part == 0 else []
    except (OSError, UnicodeDecodeError) as error:
        return [f"{CHECKSUMS_FILE} cannot be read ({error})"] if part == 0 else []
    matches = [CHECKSUM_LINE.fullmatch(line) for line in lines[:-1]]
    listed = {match[2]: match[1] for match in matches if match}
    if EARLIER_FILE in listed:
        raise _another_format(folder)
    expected = {TRAINER_FILE, *(shard_file(rank) for rank in range(len(listed) - 1))}
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


def _another_format(folder: Path) -> RunFailure:
    return RunFailure(
        f"{folder}: written by another version of llama_ft, whose format this one does not read.\nNothing was changed: "
        "use the version that wrote it, or start from scratch with another --output_dir."
    )
