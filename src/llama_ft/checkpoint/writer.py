"""Writing checkpoints/step-000100/ while training goes on: complete or absent, whatever happens meanwhile.

Training waits while a rank copies its rows to host memory. A thread then has torch.distributed.checkpoint write them
under another name, over a process group of its own, and rank 0 renames the directory when all is on the disk.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from llama_ft.checkpoint import reader
from llama_ft.checkpoint.reader import complete_checkpoints, step_folder
from llama_ft.checkpoint.safetensors_file import SafetensorsFile
from llama_ft.checkpoint.state import Tensors, own_state
from llama_ft.config import CheckpointConfig
from llama_ft.config.messages import size_text
from llama_ft.config.paths import REFERENCE_FILE
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.models.shards import local_shard
from llama_ft.runtime import Runtime, log

SPACE_FOR_THE_REST = 2**20  # headers, trainer.json, checksums


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of one run, one at a time. All ranks make it, and call its methods, together.

    Args:
        output_dir: the run's directory.
        settings: when to save, save_async and keep_last.
        about: what every trainer.json says: the configuration and what else tells one run from another.
        runtime: all ranks write together.

    As a context manager it waits for the save in flight if the run ends on all ranks alike.

    Attributes:
        run: the run's directory.
        last: the newest complete checkpoint.
    """

    def __init__(
        self, output_dir: Path, settings: CheckpointConfig, about: Mapping[str, Any], runtime: Runtime
    ) -> None:
        self.run, self._settings, self._about, self._runtime = output_dir, settings, about, runtime
        self._folder = output_dir / "checkpoints"
        # Never the one training uses. Its ranks wait for the slowest disk, however long that takes.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        self._in_flight: Future[None] | None = None
        self._timings: dict[str, float] = {}
        if runtime.is_main:
            for leftover in (*self._folder.glob(".writing-step-*"), *self._folder.glob(".removing-step-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            self._tidy(newest=None)  # a kill may have come after the rename of a checkpoint and before this
        complete = runtime.broadcast_from_rank0(lambda: complete_checkpoints(output_dir))
        self.last: Path | None = next(iter(complete), None)

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed; `finish` then raises."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    def is_due(self, step: int, ends_epoch: bool, ends_run: bool) -> bool:
        """Whether the settings ask for a checkpoint after this step. A run that is stopped ends, too."""
        settings = self._settings
        by_steps = settings.save_steps > 0 and (ends_run or step % settings.save_steps == 0)
        return by_steps or (settings.save_model and (ends_run or (ends_epoch and settings.save_every_epoch)))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        asked: bool = True,
        best_loss: float | None = None,
    ) -> None:
        """Begin to write checkpoints/step-<step>, once the one before it is written.

        Args:
            step: optimizer steps done.
            model: its trained parameters are written, its frozen ones are not.
            optimizer: its states are written.
            trainer: position and counters, for trainer.json.
            asked: False if only its validation loss keeps it: it goes when a better one is complete.
            best_loss: the validation loss, if it is the best so far.

        Raises:
            RunFailure: this one or the one before could not be written; earlier checkpoints are untouched.
        """
        started = time.perf_counter()
        self.finish()
        record: dict[str, Any] = {"format": reader.FORMAT, "step": step, "world_size": self._runtime.world_size}
        record |= {"asked": asked, "best_loss": best_loss, **trainer, **self._about}
        live = own_state(model, optimizer, self._runtime)
        nbytes = self._runtime.all_gather_floats(sum(local_shard(tensor).nbytes for tensor in live.values()))
        total = int(nbytes.sum().item())
        free = self._runtime.broadcast_from_rank0(lambda: shutil.disk_usage(self.run).free)
        if free < (needed := total + SPACE_FOR_THE_REST):
            raise self._failure(step, f"it needs {size_text(needed)}, but only {size_text(free)} are free")
        copies = to_host(live)
        self._timings["perf/save_stall_seconds"] = stall = time.perf_counter() - started
        future = self._in_flight = Future[None]()

        def write() -> None:
            try:
                self._write(record, live, copies)
                self._timings["perf/save_seconds"] = seconds = time.perf_counter() - started
                done = f"{size_text(total)}, training waited {stall:.2f} s, written after {seconds:.2f} s"
                log.info(f"Checkpoint {step_folder(self.run, step).name}: {done}")
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        if not self._settings.save_async:
            self.finish()

    def finish(self) -> Path | None:
        """Wait until nothing is being written, and return the newest complete checkpoint; a RunFailure if the last one
        could not be written."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()
        return self.last

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None or isinstance(error, UserError):
            self.finish()

    def timings(self) -> dict[str, float]:
        """perf/save_stall_seconds and perf/save_seconds of a save that was begun or ended since the last call."""
        timings, self._timings = self._timings, {}
        return timings

    def _failure(self, step: int, cause: str) -> RunFailure:
        what = f"{step_folder(self.run, step)}: the checkpoint could not be written: {cause}."
        return RunFailure(f"{what}\nLast complete checkpoint: {self.last or 'none'}.")

    def _write(self, record: dict[str, Any], live: Tensors, copies: Tensors) -> None:
        final, planner = step_folder(self.run, record["step"]), dcp.DefaultSavePlanner(False, False)  # names stay
        aside = final.with_name(f".writing-{final.name}")
        storage = _ShardWriter(aside, self._runtime.rank, copies, partial(self._complete, record, aside, final))
        try:
            dcp.save(live, storage_writer=storage, planner=planner, process_group=self._group)
        except dcp.CheckpointException as error:
            if self._runtime.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            rank, (cause, _) = min(error.failures.items())
            raise self._failure(record["step"], f"rank {rank}: {reason(cause)}") from error
        self.last = final
        if self._runtime.is_main:
            try:
                self._tidy(final)
            except OSError as error:  # the checkpoint is there all the same
                log.warning(f"{self._folder}: could not delete older checkpoints: {reason(error)}")

    def _complete(self, record: dict[str, Any], aside: Path, final: Path, digests: dict[str, str]) -> None:
        """On rank 0, when all ranks have written: the small files, then the name that says it is complete."""
        if absent := [name for name in digests if not (aside / name).is_file()]:
            raise OSError(None, f"{absent[0]} is missing: all nodes must share one output_dir")
        _write_synced(aside / reader.TRAINER_FILE, json.dumps(record, indent=1) + "\n")
        small = [reader.TRAINER_FILE]
        if (reference := self.run / REFERENCE_FILE).exists():
            reader.place(reference, aside / REFERENCE_FILE)
            _sync(aside / REFERENCE_FILE)
            small.append(REFERENCE_FILE)
        digests |= {name: reader.file_digest(aside / name) for name in small}
        _write_synced(aside / reader.CHECKSUMS_FILE, "".join(f"{value}  {file}\n" for file, value in digests.items()))
        _sync(aside)
        with suppress(FileNotFoundError):
            _sync(self.run / "metrics.jsonl")  # it must not know less than a checkpoint that is there
        os.replace(aside, final)
        _sync(self._folder)

    def _tidy(self, newest: Path | None) -> None:
        """Have best.json name the newest of those that were the best when they were written. Of those older than
        `newest`, keep this one and the last keep_last that were asked for."""
        best, asked = None, 0
        for folder in complete_checkpoints(self.run):
            try:
                record = json.loads((folder / reader.TRAINER_FILE).read_text())
                is_asked, loss = record["asked"], record["best_loss"]
            except (OSError, ValueError, LookupError, TypeError):
                continue  # corrupted: not ours to delete
            asked += is_asked
            if loss is not None and best is None:
                best = {"checkpoint": folder.name, "step": record["step"], "eval/loss": loss}
                _write_synced(self._folder / ".best.json", json.dumps(best) + "\n")
                os.replace(self._folder / ".best.json", self._folder / "best.json")
            elif newest not in (None, folder) and (not is_asked or 0 < self._settings.keep_last < asked):
                doomed = folder.with_name(f".removing-{folder.name}")
                os.replace(folder, doomed)  # a half-deleted directory must not look like a whole checkpoint
                shutil.rmtree(doomed)
        if best is None:
            (self._folder / "best.json").unlink(missing_ok=True)


class _ShardWriter(dcp.HuggingFaceStorageWriter):
    """torch's safetensors storage, written tensor by tensor: torch's own builds the whole file in memory.

    The copies are written; the live tensors, which training changes, only say what they are shards of. `complete` is
    called on rank 0 when all ranks have written, with the checksum of each file."""

    def __init__(self, folder: Path, rank: int, copies: Tensors, complete: Callable[[dict[str, str]], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._file, self._copies, self._complete = folder / reader.shard_file(rank), copies, complete

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write a rank's file and sync it to disk; the result tells its checksum."""
        offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items}
        tensors = {name: self._copies[name] for name in offsets}
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        with SafetensorsFile(self._file, tensors, header) as file:
            for tensor in tensors.values():
                file.append(tensor)
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result([WriteResult(MetadataIndex(self._file.name), 0, file.digest.hexdigest())])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written."""
        self._complete({it.index.fqn: it.storage_data for written in results for it in written})


def to_host(tensors: Tensors) -> Tensors:
    """Copies of this rank's rows in host memory; from a GPU all of them at once, into pinned memory."""
    shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
    copies = {
        name: torch.empty(it.shape, dtype=it.dtype, pin_memory=it.is_cuda).copy_(it, non_blocking=True)
        for name, it in shards.items()
    }
    if any(it.is_cuda for it in shards.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
