"""Write checkpoints/step-000100/ while training continues. A checkpoint is complete or does not
exist.

Training waits while a rank copies its rows to host memory. Then a thread writes them with
torch.distributed.checkpoint under a temporary name, over its own process group. Rank 0 renames the
directory when all files are on disk. If training waits until the end, rows on the host are written
without a copy.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
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
from llama_ft.checkpoint.host_block import HostBlock
from llama_ft.checkpoint.reader import complete_checkpoints, step_folder, step_of
from llama_ft.checkpoint.retention import SavedCheckpoint, surplus
from llama_ft.checkpoint.safetensors_file import SafetensorsFile
from llama_ft.checkpoint.state import Tensors, own_state
from llama_ft.config import CheckpointConfig
from llama_ft.config.objectives import FILES_OF_CHECKPOINTS
from llama_ft.config.wording.messages import size_text
from llama_ft.errors import RunFailure, UserError, reason
from llama_ft.models.base.shards import local_shard
from llama_ft.processes import flush_directory
from llama_ft.runtime import Ranks, log
from llama_ft.runtime.rendezvous import set_timeout

RESERVED_BYTES = 2**20  # for headers, trainer.json and checksums
_first_warning = threading.Lock()  # of a file system that cannot flush directories


@dataclass(frozen=True)
class SaveHooks:
    """What else happens to checkpoints, such as uploads.

    Attributes:
        saved: called with the step of each complete checkpoint, on all ranks, in another thread.
        in_use: returns the steps whose files must stay on the disk.
        failure: returns an error that must end the run, on any rank; else None.
        finish: waits at most so many seconds (None: any time) until no file is in use.
    """

    saved: Callable[[int], None] = lambda step: None
    in_use: Callable[[], set[int]] = set
    failure: Callable[[], RunFailure | None] = lambda: None
    finish: Callable[[float | None], None] = lambda seconds: None


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of a run, one at a time. All ranks create it and call its methods
    together.

    Args:
        output_dir: the run's directory.
        settings: when to save, save_async and keep_last.
        about: part of every trainer.json: the configuration and other data that identify the run.
        ranks: the ranks.
        hooks: what else happens to checkpoints.

    As a context manager it waits for a pending save, if the run ends in the same way on all ranks.

    Attributes:
        run: the run's directory.
        last: the newest complete checkpoint.
        durations: step -> seconds that training waited for the checkpoint, and seconds until it was
            written.
    """

    def __init__(
        self,
        output_dir: Path,
        settings: CheckpointConfig,
        about: Mapping[str, Any],
        ranks: Ranks,
        hooks: SaveHooks = SaveHooks(),
    ) -> None:
        self.run = output_dir
        self._hooks = hooks
        self._settings = settings
        self._about = about
        self._ranks = ranks
        self._folder = output_dir / "checkpoints"
        # Not the process group of training: these ranks wait for the slowest disk, for any time.
        # To create it they wait as long as for training.
        self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)
        set_timeout(timedelta(hours=6), self._group)
        self._host_block = HostBlock()
        self._in_flight: Future[None] | None = None
        self._timings: dict[str, float] = {}
        self.durations: dict[int, tuple[float, float]] = {}
        if ranks.leads_disk:
            for leftover in (
                *self._folder.glob(".writing-step-*"),
                *self._folder.glob(".removing-step-*"),
            ):
                shutil.rmtree(leftover, ignore_errors=True)
            # a kill may have come between the rename of a checkpoint and this call
            self._tidy(next(iter(complete_checkpoints(output_dir)), None))
        complete = ranks.on_each_disk(lambda: complete_checkpoints(output_dir))
        self.last: Path | None = next(iter(complete), None)

    @property
    def has_failed(self) -> bool:
        """Whether the pending save has failed, or another run has taken over the directory or
        --save_to. `finish` will raise the error."""
        if self._hooks.failure() is not None:
            return True
        lock = self._ranks.lock
        if lock is not None and not lock.is_exclusive and lock.taken_by():
            return True
        return (
            self._in_flight is not None
            and self._in_flight.done()
            and self._in_flight.exception() is not None
        )

    def is_due(self, step: int, ends_epoch: bool, ends_run: bool) -> bool:
        """Return whether the settings ask for a checkpoint after this step. A stopped run also has
        ends_run set."""
        settings = self._settings
        by_steps = settings.save_steps > 0 and (ends_run or step % settings.save_steps == 0)
        return by_steps or (
            settings.save_model and (ends_run or (ends_epoch and settings.save_every_epoch))
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        is_requested: bool = True,
        best_value: float | None = None,
        is_final: bool = False,
    ) -> None:
        """Start to write checkpoints/step-<step>, after waiting for the previous save.

        Args:
            step: optimizer steps done.
            model: its trained parameters are written, its frozen ones are not.
            optimizer: its states are written.
            trainer: position and counters, for trainer.json.
            is_requested: False if it is saved only for its validation loss: it is deleted after a better
                one is complete.
            best_value: the validation loss or other --best_by, if it is the best so far.
            is_final: no step follows: return when it is written.

        Raises:
            RunFailure: this or the previous checkpoint could not be written. Earlier checkpoints
                are unchanged.
        """
        started = time.perf_counter()
        self.finish()
        record: dict[str, Any] = {
            "format": reader.FORMAT,
            "step": step,
            "world_size": self._ranks.world_size,
        }
        record |= {"asked": is_requested, "best_loss": best_value, **trainer, **self._about}
        live = own_state(model, optimizer, self._ranks)
        rows = {name: local_shard(tensor) for name, tensor in live.items()}
        own_bytes = sum(tensor.nbytes for tensor in rows.values())
        total = self._check_disks(step, own_bytes)
        waits = is_final or not self._settings.save_async
        # Nothing changes the rows of a run that waits, so they need no copy. Copies from a GPU go
        # through pinned memory.
        needs_copies = not waits or any(tensor.is_cuda for tensor in rows.values())
        copies = self._host_block.copy(live) if needs_copies else rows
        stall = time.perf_counter() - started
        self._timings["perf/save_stall_seconds"] = stall
        future = Future[None]()
        self._in_flight = future

        def write() -> None:
            try:
                self._write(record, live, copies)
                seconds = time.perf_counter() - started
                self._timings["perf/save_seconds"] = seconds
                self.durations[step] = (stall, seconds)
                done = f"{size_text(total)}, training waited {stall:.2f} s, written after {seconds:.2f} s"
                log.info(f"Checkpoint {step_folder(self.run, step).name}: {done}")
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        if waits:
            self.finish()

    def _check_disks(self, step: int, own_bytes: int) -> int:
        """Return the bytes of all ranks. Raises RunFailure if they cannot be written."""
        all_bytes = self._ranks.all_gather_floats(own_bytes)[:, 0].tolist()
        for obstacle in self._ranks.from_each_disk(partial(self._obstacle, all_bytes)).values():
            if obstacle:
                raise self._failure(step, obstacle)
        return int(sum(all_bytes))

    def _obstacle(self, bytes_of_ranks: Sequence[float]) -> str:
        """Return why the files of this disk's ranks cannot be written: they do not fit on it, or
        another run has the directory. "" if they can."""
        if holder := self._other_holder():
            return holder
        needed = RESERVED_BYTES
        for rank, count in enumerate(bytes_of_ranks):
            if self._is_on_this_disk(rank):
                needed += int(count)
        free = shutil.disk_usage(self.run).free
        if free >= needed:
            return ""
        return f"it needs {size_text(needed)}, but only {size_text(free)} are free"

    def _other_holder(self) -> str:
        """Return that another run has taken the directory, which a lock does not prevent on every
        file system, or ""."""
        lock = self._ranks.lock
        holder = "" if lock is None else lock.taken_by()
        return holder and f"another run has taken the directory ({holder}), so this one stops"

    def _is_on_this_disk(self, rank: int) -> bool:
        leaders = self._ranks.disk_leaders
        return not leaders or leaders[rank] == self._ranks.disk_leader

    def finish(self) -> Path | None:
        """Wait for the pending save and return the newest complete checkpoint. Raises RunFailure if
        the last one could not be written, or another run has taken over --save_to."""
        in_flight = self._in_flight
        self._in_flight = None
        if in_flight is not None:
            in_flight.result()
        failure = self._hooks.failure()
        if failure is not None:
            raise failure
        lock = self._ranks.lock
        if lock is not None and not lock.is_exclusive and (holder := self._other_holder()):
            raise RunFailure(
                f"{self.run}: {holder}.\nLast complete checkpoint: {self.last or 'none'}."
            )
        return self.last

    def finish_uploads(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until no checkpoint is in use by the hooks, and abandon the rest.
        All ranks call it after `finish`."""
        self._hooks.finish(seconds)
        if self._ranks.leads_disk:
            self._tidy_or_warn()  # those that were in use

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None or isinstance(error, UserError):
            self.finish()
            self._host_block.free()

    def timings(self) -> dict[str, float]:
        """Return perf/save_stall_seconds and perf/save_seconds of saves that started or ended since
        the last call."""
        timings = self._timings
        self._timings = {}
        return timings

    def _failure(self, step: int, cause: str) -> RunFailure:
        what = f"{step_folder(self.run, step)}: the checkpoint could not be written: {cause}."
        return RunFailure(f"{what}\nLast complete checkpoint: {self.last or 'none'}.")

    def _write(
        self,
        record: dict[str, Any],
        live: Tensors,
        copies: Tensors,
    ) -> None:
        final = step_folder(self.run, record["step"])
        # names unchanged
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        aside = final.with_name(f".writing-{final.name}")
        storage = _ShardWriter(
            aside, self._ranks.rank, copies, partial(self._complete, record, aside, final)
        )
        try:
            dcp.save(live, storage_writer=storage, planner=planner, process_group=self._group)
        except dcp.CheckpointException as error:
            if self._ranks.leads_disk:
                shutil.rmtree(aside, ignore_errors=True)
            rank, (cause, _) = min(error.failures.items())
            raise self._failure(record["step"], f"rank {rank}: {reason(cause)}") from error
        if not self._ranks.shares_disk:
            self._complete_other_disks(record["step"], aside, final)
        self.last = final
        self._hooks.saved(record["step"])
        if self._ranks.leads_disk:
            self._tidy_or_warn()

    def _complete_other_disks(self, step: int, aside: Path, final: Path) -> None:
        """After rank 0 has completed its disk, do the same on the others, which hold only the
        shards of their own ranks. All ranks call it."""
        small = (reader.TRAINER_FILE, reader.CHECKSUMS_FILE)
        box: list[Any] = [None]
        if self._ranks.is_main:
            box = [{name: (final / name).read_text() for name in small}]
        dist.broadcast_object_list(box, src=0, group=self._group)
        error = ""
        try:
            if self._ranks.leads_disk and not self._ranks.is_main:
                for name in small:
                    _write_synced(aside / name, box[0][name])
                _sync(aside)
                os.replace(aside, final)
                _sync(self._folder)
        except OSError as problem:
            error = f"rank {self._ranks.rank}: {reason(problem)}"
        for error_of_rank in self._ranks.gather(error, self._group):
            if error_of_rank:
                raise self._failure(step, error_of_rank)

    def _tidy_or_warn(self) -> None:
        if self._other_holder():  # its checkpoints are not ours to delete
            return
        try:
            self._tidy(self.last)
        except OSError as error:  # the checkpoint itself is complete
            log.warning(f"{self._folder}: could not delete older checkpoints: {reason(error)}")

    def _complete(
        self,
        record: dict[str, Any],
        aside: Path,
        final: Path,
        digests: dict[str, str],
    ) -> None:
        """On rank 0, after all ranks have written: write the small files, then rename the
        directory."""
        # Without a store, a node with a directory of its own would write files that nobody finds.
        ranks = filter(self._is_on_this_disk, range(self._ranks.world_size))
        expected = digests.keys() & {reader.shard_file(rank) for rank in ranks}
        absent = sorted(name for name in expected if not (aside / name).is_file())
        if absent:
            raise OSError(
                None,
                f"{absent[0]} is missing: all nodes must share one output_dir, or upload with --save_to",
            )
        _write_synced(aside / reader.TRAINER_FILE, json.dumps(record, indent=1) + "\n")
        small = [reader.TRAINER_FILE]
        for name in FILES_OF_CHECKPOINTS:
            if (self.run / name).exists():
                # not a hard link: one corrupted block would break the file of all checkpoints
                shutil.copyfile(self.run / name, aside / name)
                _sync(aside / name)
                small.append(name)
        digests |= {name: reader.file_digest(aside / name) for name in small}
        lines = [f"{digest}  {name}\n" for name, digest in digests.items()]  # as of sha256sum
        _write_synced(aside / reader.CHECKSUMS_FILE, "".join(lines))
        _sync(aside)
        if holder := self._other_holder():
            raise OSError(None, holder)
        with suppress(FileNotFoundError):
            # metrics.jsonl must include the steps of every complete checkpoint
            _sync(self.run / "metrics.jsonl")
        # The rename is what makes a checkpoint complete. Without the sync of its directory, a power
        # loss could undo it.
        os.replace(aside, final)
        _sync(self._folder)

    def _tidy(self, newest: Path | None) -> None:
        """Write best.json, which names the newest of the checkpoints that were the best at their
        time. Delete checkpoints older than `newest`, except this one, the last keep_last requested
        ones, and those that are being uploaded."""
        checkpoints = list[SavedCheckpoint]()
        metrics = dict[int, str]()  # step -> --best_by
        for folder in complete_checkpoints(self.run):
            try:
                record = json.loads(reader.read_bytes(folder / reader.TRAINER_FILE))
                step = step_of(folder)
                checkpoints.append(SavedCheckpoint(step, record["asked"], record["best_loss"]))
                train = record.get("config", {}).get("train", {})
                metrics[step] = train.get("best_by", "eval/loss")
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue  # a corrupted checkpoint is not deleted
        newest_step = None if newest is None else step_of(newest)
        best, doomed = surplus(checkpoints, newest_step, self._settings.keep_last)
        if best is None:
            (self._folder / "best.json").unlink(missing_ok=True)
        else:
            name = step_folder(self.run, best.step).name
            value = {metrics[best.step]: best.best_value}
            text = json.dumps({"checkpoint": name, "step": best.step, **value})
            _write_synced(self._folder / ".best.json", text + "\n")
            os.replace(self._folder / ".best.json", self._folder / "best.json")
        in_use = self._hooks.in_use()
        for step in doomed:
            if step not in in_use:
                folder = step_folder(self.run, step)
                aside = folder.with_name(f".removing-{folder.name}")
                # an incompletely deleted directory must not look like a checkpoint
                os.replace(folder, aside)
                shutil.rmtree(aside)


class _ShardWriter(dcp.HuggingFaceStorageWriter):
    """torch's safetensors storage, but written tensor by tensor: torch's own builds the whole file
    in memory.

    It writes the copies; the live tensors, which training changes, only describe their shards.
    `complete` is called on rank 0 after all ranks have written, with the checksum of each file."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        copies: Tensors,
        complete: Callable[[dict[str, str]], None],
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._file = folder / reader.shard_file(rank)
        self._copies = copies
        self._complete = complete

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> TorchFuture[list[WriteResult]]:
        """Write this rank's file and sync it to disk. The result contains its checksum."""
        offsets = {}
        for item in plan.items:
            offset = list(item.index.offset or ())
            offsets[item.index.fqn] = {"saved_offsets": offset}
        tensors = {name: self._copies[name] for name in offsets}
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        with SafetensorsFile(self._file, tensors, header) as file:
            for tensor in tensors.values():
                file.append(tensor)
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(
            [WriteResult(MetadataIndex(self._file.name), 0, file.digest.hexdigest())]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 after all ranks have written."""
        digests = dict[str, str]()
        for written in results:
            digests |= {result.index.fqn: result.storage_data for result in written}
        self._complete(digests)


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    if path.is_dir():
        if not flush_directory(path):
            _warn_without_sync()
        return
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _warn_without_sync() -> None:
    if not _first_warning.acquire(blocking=False):
        return  # it is never released, so the first of several threads warns
    log.warning(
        "--output_dir: its file system cannot flush a directory (fsync). A power loss may undo a checkpoint."
    )
