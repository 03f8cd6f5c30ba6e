"""Process group and device mesh from torchrun's environment variables; without torchrun, of one
process. A process group that the caller has started, as Ray Train does, is taken as it is.

The mesh has the dimension `shard`: the ranks that together hold one copy of the model. If there are
several copies, the dimension `replicate` comes first. All of llama_ft uses this mesh, so a single
process, data parallelism and sharding share one code path.
"""

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llama_ft.environment import Launch
from llama_ft.errors import UserError, exit_on_error, plural
from llama_ft.processes import cores
from llama_ft.runtime.attempts import Attempt, AttemptFile, earlier_attempt
from llama_ft.runtime.console import configure_console
from llama_ft.runtime.devices import claim_device, pick_device
from llama_ft.runtime.ends.exit import (
    FAILURE_KEY,
    ExitContext,
    Explainer,
    RunStatus,
    Stopped,
    exit_process,
)
from llama_ft.runtime.ends.signals import StopSignals
from llama_ft.runtime.ends.watchdog import SECONDS_AFTER_WATCHDOG, Watchdog
from llama_ft.runtime.fp32_matmuls import use_fp32_matmuls
from llama_ft.runtime.rendezvous import gather, meet, set_timeout, store_of_given_group
from llama_ft.runtime.run_lock import RunLock
from llama_ft.runtime.sequence import SequenceRank, share_sequences
from llama_ft.runtime.target import Target, computing_on

T = TypeVar("T")


@dataclass(frozen=True)
class DataRank:
    """Who gets which samples: a step's samples are divided among `size` data ranks, and this process
    computes those of one of them. Processes that share sequences are one data rank.

    Attributes:
        rank: 0 to size - 1.
        size: number of data ranks.
        processes: number of processes of a data rank.
    """

    rank: int
    size: int
    processes: int = 1


@dataclass(frozen=True)
class ShardRank:
    """Who holds which shard: `size` processes together hold one copy of the model.

    Attributes:
        rank: of this process's shard, 0 to size - 1.
        size: number of shards of a copy.
        copy: the copy of the model to which this process's shard belongs, 0 to copies - 1.
        copies: number of copies of the model, and so of processes with the same shard.
    """

    rank: int
    size: int
    copy: int
    copies: int


@dataclass
class Ranks:
    """This process's rank, devices and process groups.

    `rank` and `world_size` count processes: use them for logs, files, and work that any process can
    do. For samples use `data`, for parameters `shard`. Losses, loss tokens and squares of gradients
    are summed over all processes, gradients over the mesh's groups.
    """

    rank: int  # of this process, 0 to world_size - 1
    world_size: int  # number of processes
    local_rank: int  # on this node, 0 to local_world_size - 1
    local_world_size: int
    device: torch.device  # where this process computes
    # of parameters and optimizer state: `device`, or the CPU with cpu_offload
    storage_device: torch.device
    device_note: str  # description of the device, for the log
    mesh: DeviceMesh  # ("shard",), or ("replicate", "shard") with several copies of the model
    store: dist.Store | None  # the rendezvous store, with a prefix for this attempt; None in a plan
    # for the next attempt, if torchrun starts the ranks again
    attempt_file: AttemptFile | None = None
    earlier: Attempt | None = None  # the run of an earlier attempt of this launch
    status: RunStatus | None = None  # set on each rank as soon as the run has a directory
    signals: StopSignals = field(default_factory=StopSignals)  # requests to stop the run
    explainer: Explainer | None = None  # see `explain_errors_with`
    target: Target = Target()  # what the run computes on, also in a plan
    # this process's part of the tokens of each packed sequence; None: it has all of them
    sequence: SequenceRank | None = None
    # how long a rank waits for others before torch raises an error; the watchdog is earlier
    timeout: timedelta = timedelta(minutes=30)
    lock: RunLock | None = None  # where leads_disk, of the run's directory; see `take_lock`
    # per rank the one that creates and deletes directories on its disk of --output_dir; empty: all
    # nodes share it. See `use_disks`.
    disk_leaders: tuple[int, ...] = ()
    _turns: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data(self) -> DataRank:
        """Which samples this process computes."""
        processes = 1 if self.sequence is None else self.sequence.size
        return DataRank(self.rank // processes, self.world_size // processes, processes)

    @property
    def answering(self) -> DataRank:
        """Which prompts this process answers: every process answers its own."""
        return DataRank(self.rank, self.world_size)

    @property
    def shard(self) -> ShardRank:
        """Which shard of the parameters this process holds."""
        shards = self.mesh["shard"]
        copies = self.mesh.size() // shards.size()
        copy = self.mesh["replicate"].get_local_rank() if copies > 1 else 0
        return ShardRank(shards.get_local_rank(), shards.size(), copy, copies)

    @property
    def disk_leader(self) -> int:
        """The rank that creates and deletes directories on this rank's disk of --output_dir."""
        return self.disk_leaders[self.rank] if self.disk_leaders else 0

    @property
    def leads_disk(self) -> bool:
        return self.disk_leader == self.rank

    @property
    def shares_disk(self) -> bool:
        """Whether all ranks see the same --output_dir."""
        return not any(self.disk_leaders)

    def use_disks(self, leaders: Sequence[int]) -> None:
        """Set what a `RemoteRun` has found: `disk_leaders`."""
        self.disk_leaders = tuple(leaders)

    def take_lock(self, lock: RunLock) -> None:
        """Hold the lock of the run's directory, and release an earlier one. A request to stop is
        announced to runs that wait for the directory."""
        self.release_lock()
        self.lock = lock
        self.signals.at_request = lock.announce_end

    def release_lock(self) -> None:
        """Let other runs have the directory."""
        if self.lock is not None:
            self.lock.close()
        self.lock = None

    def explain_errors_with(self, explainer: Explainer) -> None:
        """If an error about memory ends this process, `explainer` adds where the memory went."""
        self.explainer = explainer

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of each node, then on its others, which find the
        results in the cache.

        The others poll the store. A collective would time out, because tokenizing much data takes
        hours.
        """
        if self.store is None or self.world_size == 1:
            yield
            return
        leaders = int(self.all_gather_floats(self.local_rank == 0).sum())
        self._turns += 1
        done = f"turn {self._turns}"
        if self.local_rank == 0:
            yield
            self.store.add(done, 1)
        pause = 0.01
        while self.store.add(done, 0) < leaders:
            # the watchdog would take time.sleep for waiting on the device
            threading.Event().wait(pause)
            pause = min(0.2, 2 * pause)
        if self.local_rank != 0:
            yield

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 only, and return its result on every rank."""
        box = [make() if self.is_main else None]
        dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])

    def from_each_disk(self, make: Callable[[], T]) -> dict[int, T]:
        """Run `make` on the leader of each disk, and return all results, by the leaders' ranks."""
        if self.shares_disk:
            return {0: self.broadcast_from_rank0(make)}
        results: list[Any] = self.gather(make() if self.leads_disk else None)
        return {rank: results[rank] for rank in sorted(set(self.disk_leaders))}

    def on_each_disk(self, make: Callable[[], T]) -> T:
        """Run `make` on the leader of each disk, and return the result of this rank's disk."""
        return self.from_each_disk(make)[self.disk_leader]

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Return the value of each rank, by rank. All ranks must call it, or all of `group` if there
        is one. pickle must be able to copy the value."""
        return gather(value, group)

    def all_gather_floats(self, *numbers: float) -> torch.Tensor:
        """Return the numbers of all ranks, float64 [world_size, len(numbers)]. It does not wait for
        the device."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def check_stop(self) -> None:
        """Abandon an evaluation if a signal has asked any rank to stop. --stop_after waits for its
        end. All ranks must call it together; it does not wait for the device.

        Raises:
            Stopped: on all ranks.
        """
        requests = self.all_gather_floats(self.signals.request())
        stop = self.signals.agreed(requests[:, 0])
        if stop is not None and stop.exit_code != 0:
            raise Stopped(stop)

    def mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks, without gradient, on the value's device. All ranks must
        call it."""
        mean = value.detach().clone()
        if self.world_size == 1:  # a collective of a CUDA tensor would start NCCL
            return mean
        dist.all_reduce(mean)
        return mean / self.world_size

    @property
    def earlier_run(self) -> Path | None:
        """The run directory of an earlier attempt of this launch (torchrun restarts); None if there
        was none."""
        return None if self.earlier is None else Path(self.earlier.directory)

    def begin_run(
        self,
        output_dir: Path,
        step: int = 0,
        at_end: Callable[[], None] = lambda: None,
        global_batch: int = 0,
    ) -> None:
        """Keep status.json in `output_dir` current from now on. The rank that ends the run calls
        `at_end`. If torchrun starts the ranks again, the next attempt resumes in this directory,
        with this global batch."""
        self.status = RunStatus(output_dir, at_end, step, self.lock)
        if self.local_rank == 0 and self.attempt_file is not None:
            self.attempt_file.write(Attempt(str(output_dir), global_batch))
        # A rank that has failed already has written, or will write, how the run ended.
        has_failed = self.store is not None and self.store.check([FAILURE_KEY])
        if self.leads_disk and not has_failed:
            self.status.write("running")
        # otherwise "running" could overwrite the "failed" of a rank that fails at once
        dist.barrier()

    def record_step(self, step: int) -> None:
        """Tell status.json the number of completed optimizer steps."""
        if self.status is not None:
            self.status.record_step(step, writes=self.leads_disk)

    def describe(
        self,
        batch_size: int,
        micro_batches: int,
        global_batch: int,
        unit: Literal["sample", "packed sequence"] = "sample",
        setting: str = "",
    ) -> str:
        """Return a text about the devices, and how parameters and batches are distributed. All
        ranks must call it.

        Args:
            batch_size: samples, or packed sequences, per micro-batch of one rank.
            micro_batches: number per optimizer step of one rank.
            global_batch: samples, or packed sequences, per optimizer step of all ranks.
            unit: what these numbers count.
            setting: the setting that is the global batch; empty: it is the product of the others.
        """
        notes = self.gather(self.device_note)
        is_one_process = self.world_size == 1
        lines = []
        if not is_one_process:
            copies = self.shard.copies
            layout = f"{copies} copies of the model, each sharded over {self.shard.size} ranks"
            if copies == 1:
                layout = "the model is sharded over all of them"
            elif self.shard.size == 1:
                layout = "each has a copy of the model"
            lines.append(f"{self.world_size} ranks: {layout}")
        for note, count in Counter(notes).items():
            lines.append(f"{count} x {note}")
        if self.storage_device != self.device:
            lines.append("parameters and optimizer state in host memory")
        if setting:
            product = setting
        elif global_batch == self.data.size * batch_size * micro_batches:
            shared = ""
            if self.data.processes > 1:
                shared = f" / sequence_parallel_size ({self.data.processes})"
            product = f"ranks ({self.world_size}){shared} x micro-batch ({batch_size}) x accumulation ({micro_batches})"
        else:  # the resumed run began on another number of ranks
            product = f"as before, at most {batch_size} per rank and micro-batch"
            product += describe_uneven(global_batch, self.data.size, self.data.processes)
        lines.append(f"global batch: {plural(global_batch, unit)} = {product}")
        separator = "; " if is_one_process else "\n  "
        return separator.join(lines)


@contextmanager
def start(
    device: Literal["auto", "cuda", "cpu"],
    shard_degree: int | Literal["node", "world"],
    cpu_offload: bool = False,
    memory_fraction: float | None = None,
    timeout_seconds: float = 1800.0,
    sequence_size: int = 1,
) -> Iterator[Ranks]:
    """Start the process group, unless there is one, and end the process as described in
    `runtime.exit` if the block fails.

    Args:
        device: auto is CUDA if there is a GPU, else the CPU.
        shard_degree: number of ranks that share one copy of the model; world: all ranks, node:
            those of one node.
        cpu_offload: keep parameters and optimizer state in host memory.
        memory_fraction: largest share of its GPU that each rank may allocate, 0 to 1; None: all.
        timeout_seconds: how long a rank waits for others.
        sequence_size: number of ranks that share each packed sequence.

    Yields:
        The Ranks. NCCL carries CUDA tensors, gloo CPU tensors.

    Raises:
        UserError: there are more processes than GPUs, or the ranks do not divide into such groups.
    """
    is_given = dist.is_initialized()
    with exit_on_error():
        launch = Launch.from_environment(os.environ, is_given)
    configure_console(launch.rank)
    _silence_libraries(launch.rank)
    signals = StopSignals()
    ranks: Ranks | None = None
    store: dist.Store = dist.HashStore()
    watchdog: Watchdog | None = None

    def end(error: BaseException) -> NoReturn:
        exit_process(error, _exit_context(launch, store, signals, ranks, watchdog))

    with signals.listening(end):
        try:
            if is_given:
                store = store_of_given_group()
            elif launch.world_size > 1 or dist.is_torchelastic_launched():
                store = meet(launch.rank, launch.world_size, timeout_seconds)
            place = pick_device(
                device, torch.cuda.device_count(), launch.local_rank, launch.local_world_size
            )
            storage = torch.device("cpu") if cpu_offload else place
            _configure_cpu(storage, launch.local_world_size)
            degree = resolve_degree(shard_degree, launch.world_size, launch.local_world_size)
            devices = _Devices(place, storage, claim_device(place, memory_fraction))
            timeout = timedelta(seconds=timeout_seconds + SECONDS_AFTER_WATCHDOG)
            groups = _open_groups(launch, place, store, _Sizes(degree, sequence_size), timeout)
            ranks = _make_ranks(launch, devices, groups, store, signals, timeout)
            if launch.world_size > 1:
                watchdog = Watchdog(store, groups.mesh, timeout_seconds, end)
            with _watched_until_all_leave(watchdog), computing_on(ranks.target):
                yield ranks
            _finish(ranks)
            if not is_given:
                dist.destroy_process_group()
        except BaseException as error:
            signals.closing(error)
            end(error)


class _Devices(NamedTuple):
    """See the attributes of `Ranks`."""

    device: torch.device
    storage: torch.device
    note: str


class _Sizes(NamedTuple):
    """Ranks that share one copy of the model, and that share a packed sequence."""

    shard: int
    sequence: int


class _Groups(NamedTuple):
    """See the attributes of `Ranks`."""

    mesh: DeviceMesh
    sequence: SequenceRank | None


def _make_ranks(
    launch: Launch,
    devices: _Devices,
    groups: _Groups,
    store: dist.Store,
    signals: StopSignals,
    timeout: timedelta,
) -> Ranks:
    attempt_file = AttemptFile()
    return Ranks(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        device=devices.device,
        storage_device=devices.storage,
        device_note=devices.note,
        mesh=groups.mesh,
        sequence=groups.sequence,
        store=store,
        attempt_file=attempt_file,
        earlier=earlier_attempt(attempt_file.read()),
        signals=signals,
        target=Target.of(devices.device),
        timeout=timeout,
    )


def _exit_context(
    launch: Launch,
    store: dist.Store,
    signals: StopSignals,
    ranks: Ranks | None,
    watchdog: Watchdog | None,
) -> ExitContext:
    """Return what ending the process needs. An error may come before there are ranks or a
    watchdog."""
    return ExitContext(
        rank=launch.rank,
        store=store,
        status=ranks.status if ranks is not None else None,
        end_requested=signals.end_requested,
        describe_lost=watchdog.describe_lost if watchdog is not None else str,
        explainer=ranks.explainer if ranks is not None else None,
        leads_disk=ranks is not None and ranks.leads_disk,
    )


def _configure_cpu(storage: torch.device, local_world_size: int) -> None:
    """Set how this process uses the cores, oneDNN's cache and the way of bf16 products. `storage`
    holds the parameters and the optimizer state."""
    # torchrun sets 1. That leaves cores idle if the CPU computes or updates the weights.
    is_torchruns_default = os.environ.get("OMP_NUM_THREADS", "1") == "1"
    if storage.type == "cpu" and local_world_size > 1 and is_torchruns_default:
        torch.set_num_threads(max(1, cores() // local_world_size))
    # oneDNN compiles a 16-bit matmul per shape on the CPU. Its default, 1,024, takes 0.9 GiB; this
    # takes half.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if storage.type == "cpu":
        use_fp32_matmuls()


def _open_groups(
    launch: Launch,
    device: torch.device,
    store: dist.Store,
    sizes: _Sizes,
    timeout: timedelta,
) -> _Groups:
    """Start the process group, unless there is one, and return the groups of these sizes."""
    is_cuda = device.type == "cuda"
    # With a device_id torch starts NCCL at once, and barriers use it. One process needs neither:
    # without it barriers use gloo, so a machine where NCCL fails can train.
    device_id = device if is_cuda and launch.world_size > 1 else None
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            timeout=timeout,
            world_size=launch.world_size,
            rank=launch.rank,
            store=store,
            device_id=device_id,
        )
    mesh = mesh_over(device.type, launch.world_size, sizes.shard)
    for group in mesh.get_all_groups():
        # init_device_mesh uses torch's default: 10 min with NCCL
        set_timeout(timeout, group)
    sequence = share_sequences(device.type, launch.world_size, sizes.sequence, timeout)
    return _Groups(mesh, sequence)


@contextmanager
def _watched_until_all_leave(watchdog: Watchdog | None) -> Iterator[None]:
    """Run the block under the watchdog, until all ranks have left it. After an error this rank does
    not wait, unless all ranks have agreed to stop."""
    with watchdog or nullcontext():
        try:
            yield
        except Stopped as stopped:
            if stopped.agreed:
                # a rank that exits earlier would look like one that died during the save
                dist.barrier()
            raise
        dist.barrier()


def _finish(ranks: Ranks) -> None:
    """Record that the run has finished."""
    if ranks.leads_disk and ranks.status is not None:
        ranks.status.write("finished", 0)
    if ranks.is_main and ranks.status is not None:
        ranks.status.at_end()
    ranks.release_lock()


def mesh_over(device_type: str, world_size: int, degree: int) -> DeviceMesh:
    """Return a mesh of [copies of the model, `degree` ranks that share one copy]."""
    copies = world_size // degree
    if copies == 1:
        return init_device_mesh(device_type, (degree,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (copies, degree), mesh_dim_names=("replicate", "shard"))


def resolve_degree(shard_degree: int | str, world_size: int, local_world_size: int) -> int:
    """Return the number of ranks that share one copy. Raises a UserError if it does not divide the
    number of ranks."""
    if shard_degree == "world":
        return world_size
    degree = local_world_size if shard_degree == "node" else int(shard_degree)
    if world_size % degree:
        raise UserError(
            f"--sharding_group_size {degree}: {world_size} ranks do not divide into groups of {degree}. "
            f"Start a multiple of {degree} ranks, or choose another size."
        )
    return degree


def describe_uneven(global_batch: int, ranks: int, processes: int = 1) -> str:
    """Return a note on a global batch that a number of ranks cannot divide evenly, or "". It stays
    the same, but in the last micro-batch some ranks have nothing to compute. `ranks` may be groups of
    several `processes` that share sequences."""
    if global_batch % ranks == 0:
        return ""
    unit = "ranks" if processes == 1 else f"groups of {processes} ranks"
    even = [number for number in range(1, global_batch + 1) if global_batch % number == 0]
    numbers = ", ".join(map(str, even))
    return f"; {ranks} {unit} do not divide it, so some wait for others ({numbers} {unit} do)"


def _silence_libraries(rank: int) -> None:
    """Hide warnings of libraries that users cannot act on. Only rank 0 shows the other warnings."""
    # it warns about forks after its threads started
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # NCCL warns about single sends, which distribute and collect weights here.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if rank != 0:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
