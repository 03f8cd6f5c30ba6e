"""Memory as counted by the kernel and the CUDA allocator: now, the peak of each phase, and a
comparison of ranks.

Source: VmHWM, RssAnon and clear_refs in `man 5 proc`; torch.cuda.memory_stats.
"""

import contextlib
import ctypes
import math
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llama_ft.config.wording.messages import size_text
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.phases import PHASES, MemoryCategory, Phase
from llama_ft.runtime import Ranks, log
from llama_ft.runtime.shared_memory import SharedMemory

PROC_STATUS = Path("/proc/self/status")
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
FIELDS = re.compile(rb"\n(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB")
CPU = torch.device("cpu")
MIB = 2**20
# Phases that map checkpoints or write them. The kernel reports only the peak of all resident pages.
# At the end of these phases, pages of unmapped files cannot be separated from tensors in that peak.
PHASES_WITH_MAPPED_FILES: tuple[Phase, ...] = ("load", "save")
# steps of this process; in the first, optimizer states do not exist at the beginning
COMPARED_STEP = 2
LARGEST_SHARE = 1.05
# Tensors are counted exactly, but the CUDA allocator rounds up, and libraries take host memory at
# any time.
NOISE = {"device memory": 32 * MIB, "host memory": 128 * MIB}
# steps of this process: the second has all optimizer states, the third repeats it
SNAPSHOT_STEPS = 3


class MemoryUse(NamedTuple):
    """Memory of a process in bytes. Peaks are since `reset_peaks`. 0 means unknown or not
    existing."""

    anonymous: int = 0  # resident host memory without a file, and this rank's part of shared memory
    mapped: int = 0  # resident pages of files, and the rest of shared memory
    resident_peak: int = 0  # maximum of their sum
    device: int = 0  # tensors on the CUDA device
    device_peak: int = 0
    device_reserved_peak: int = 0  # maximum held by the CUDA allocator, including free blocks


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory of this process. Takes about 0.1 ms and does not synchronize with the
    device."""
    status = PROC_STATUS.read_bytes() if PROC_STATUS.exists() else b""  # Linux only
    host = dict[str, int]()
    for name, kilobytes in FIELDS.findall(status):
        host[name.decode()] = int(kilobytes) * 1024
    shared = host.get("RssShmem", 0)
    own = sum(memory.part_bytes() for memory in SharedMemory.in_use)
    use = MemoryUse(
        anonymous=host.get("RssAnon", 0) + own,
        mapped=host.get("RssFile", 0) + shared - own,
        resident_peak=host.get("VmHWM", 0),
    )
    if device.type != "cuda":
        return use
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:  # nothing was allocated yet
        return use
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return use._replace(
        device=allocated["current"],
        device_peak=allocated["peak"],
        device_reserved_peak=reserved["peak"],
    )


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks to the current use. If clear_refs cannot be written (macOS, some containers),
    the host peak remains that of the whole process."""
    with contextlib.suppress(OSError):
        PROC_CLEAR_REFS.write_bytes(b"5")  # sets VmHWM to the current resident size
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(peaks: torch.Tensor) -> dict[str, list[int]]:
    """Return keys and values for metrics.jsonl. `peaks` is [ranks, (host, device)] in bytes; 0 was
    not measured."""
    by_key = {"memory/host_peak_bytes": peaks[:, 0], "memory/device_peak_bytes": peaks[:, 1]}
    measured = {key: by_rank for key, by_rank in by_key.items() if by_rank.any()}
    return {key: by_rank.long().tolist() for key, by_rank in measured.items()}


PeaksByPhase = dict[Phase, dict[str, int]]  # phase -> name of the peak -> bytes


class MemoryMonitor(contextlib.AbstractContextManager["MemoryMonitor"]):
    """Measures the memory of a whole run, as PhaseMonitor and context manager. Every rank has one.

    The kernel has no peak of anonymous memory, only of resident memory (VmHWM). The anonymous peak
    is VmHWM minus the mapped pages at the end of the phase; while files are mapped, it is sampled.
    Ranks are compared in the second step.

    Attributes:
        phase: the current phase; None outside of all phases.
        by_phase: the largest peaks in bytes, as in facts.json.
        host_peak_bytes: largest resident size since training began, up to the current phase.
        device_peak_bytes: the same for tensors on the CUDA device; 0 on the CPU.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.phase: Phase | None = None
        self.by_phase: PeaksByPhase = {}
        self.host_peak_bytes = 0
        self.device_peak_bytes = 0
        self._ranks = ranks
        self._is_cuda = ranks.device.type == "cuda"
        self._steps = 0
        self._before = MemoryUse()  # at the beginning of the phase
        self._base = MemoryUse()  # before loading
        self._sampled = 0  # largest sample of the anonymous memory in this phase
        self._sampling = threading.Event()
        self._training: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._facts = RunMetadata(Path(), enabled=False)
        # `by_phase` of each rank
        self._peaks_of_ranks: list[PeaksByPhase] = [{}] * ranks.world_size

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.leave()
        self._update_peaks(from_all_ranks=self._training is not None and error is None)

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self._before = self.leave()
        if phase == "load":
            _free_unused_heap()
            self._base = memory_use(CPU)  # memory of Python and its libraries
            self._before = self._base  # what was freed here is not in the peak of loading
        is_compared_step = self._steps == COMPARED_STEP - 1
        if phase == "optimizer step" and is_compared_step and self._training is not None:
            self._compare_ranks(*self._training)
        self.phase = phase
        reset_peaks(self._ranks.device)
        if phase in PHASES_WITH_MAPPED_FILES:
            self._sampled = 0
            self._sampling = threading.Event()
            arguments = (self._sampling,)
            sampler = threading.Thread(target=self._sample, args=arguments, daemon=True)
            sampler.start()

    def _sample(self, done: threading.Event) -> None:
        """Sample the anonymous memory every 10 ms until `done` is set. Reading it takes 0.1 ms."""
        while not done.wait(0.01):
            self._sampled = max(self._sampled, memory_use(CPU).anonymous)

    def leave(self) -> MemoryUse:
        """End the current phase and return the current use."""
        self._sampling.set()
        now = memory_use(self._ranks.device)
        self.host_peak_bytes = max(self.host_peak_bytes, now.resident_peak)
        self.device_peak_bytes = max(self.device_peak_bytes, now.device_peak)
        if self.phase is not None:
            if self.phase in PHASES_WITH_MAPPED_FILES:
                anonymous = self._sampled
            else:
                anonymous = now.resident_peak - now.mapped
            peaks = {"anonymous_peak_bytes": max(anonymous, self._before.anonymous, now.anonymous)}
            if self._is_cuda:
                peaks["device_peak_bytes"] = now.device_peak
                peaks["device_reserved_bytes"] = now.device_reserved_peak
            largest = self.by_phase.setdefault(self.phase, {})
            for name, peak in peaks.items():
                largest[name] = max(largest.get(name, 0), peak)
            self.phase = None
        return now

    def begin_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: RunMetadata,
    ) -> None:
        """Start to count steps. The peaks of the whole run begin here, after loading."""
        self._training = (model, optimizer)
        self._facts = facts
        facts.add(memory={"warnings": [], "base_bytes": self._base.anonymous})
        self.leave()
        _free_unused_heap()  # left from loading
        self.host_peak_bytes = 0
        self.device_peak_bytes = 0
        reset_peaks(self._ranks.device)

    def end_step(self) -> None:
        """Count an optimizer step, and compare the ranks after the second one. All ranks must call
        it."""
        self._steps += 1
        if self._steps == COMPARED_STEP:
            self._update_peaks(from_all_ranks=True)

    def _compare_ranks(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _free_unused_heap()
        use = memory_use(self._ranks.device)
        memory = {"device memory": use.device, "host memory": use.anonymous - self._base.anonymous}
        held = held_tensors(model, optimizer, memory)
        held_by_rank = self._ranks.gather(held)
        warnings = find_differences(held_by_rank)
        for warning in warnings:
            log.warning(warning)
        holders = [held.holders for held in held_by_rank]
        self._facts.add(memory={"holders": holders, "warnings": warnings})

    def _update_peaks(self, from_all_ranks: bool) -> None:
        # At the end other ranks may be gone: their last values stay. Only rank 0 writes the facts.
        self._peaks_of_ranks[0] = self.by_phase
        if from_all_ranks:
            self._peaks_of_ranks = self._ranks.gather(self.by_phase)
        phases = dict[str, list[dict[str, int]]]()
        for phase in PHASES:
            if phase in self.by_phase:
                phases[phase] = [by_phase.get(phase, {}) for by_phase in self._peaks_of_ranks]
        self._facts.add(memory={"phases": phases})


def _free_unused_heap() -> None:
    """Make the C library return free pages to the kernel, so that resident memory is memory in
    use."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class Held(NamedTuple):
    """Bytes that a rank holds. It should hold its shards of parameters, gradients and optimizer
    states only."""

    holders: dict[str, int]  # category -> bytes, each storage counted once
    memory: dict[str, int]  # as counted by the kernel and the CUDA allocator
    model: int  # bytes of all parameters over all ranks, as stored
    # trained bytes of a rank with full shards, over those of this rank; >= 1
    shard_ratio: float = 1.0


def held_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    memory: dict[str, int],
) -> Held:
    """Return the bytes of this rank's parameters, gradients and optimizer states."""
    states = list[Any]()
    for state in optimizer.state.values() if optimizer is not None else ():
        states += [value for value in state.values() if torch.is_tensor(value)]
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    members: dict[MemoryCategory, list[Any]] = {
        "sharded parameters": [p for p in parameters if p.is_floating_point()],
        "quantized parts": [p for p in parameters if not p.is_floating_point()],
        "gradients": [p.grad for p in trained if p.grad is not None],
        "optimizer state": states,
    }
    holders = dict[str, int]()
    for name, tensors in members.items():
        size = _storage_bytes(tensors)
        if size:
            holders[name] = size
    # Sharding works like torch.chunk, so the last ranks may have fewer rows.
    full_bytes = sum(_full_shard_bytes(p) for p in trained)
    local_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in trained)
    return Held(
        holders=holders,
        memory=memory,
        model=sum(p.nbytes for p in parameters),
        shard_ratio=full_bytes / max(1, local_bytes),
    )


def find_differences(held_by_rank: list[Held]) -> list[str]:
    """Return a warning for each rank that holds over 5% more than others do and its shards need."""
    warnings = dict[int, str]()  # rank -> its first warning
    names = dict[str, None]()  # a set that keeps the order
    for held in held_by_rank:
        names.update(dict.fromkeys(held.holders))
    names.update(dict.fromkeys(NOISE))
    for name in names:
        sizes = [(held.holders | held.memory).get(name, 0) for held in held_by_rank]
        # What each rank's shards need. Of the process as a whole that is unknown.
        if name in NOISE:
            due = [0.0] * len(sizes)
        else:
            pairs = zip(sizes, held_by_rank, strict=True)
            due = [size * held.shard_ratio for size, held in pairs]
        # the lower median: of two ranks, the smaller value
        usual = max(median_low(sizes), median_low(due))
        limit = max(usual * LARGEST_SHARE, usual + NOISE.get(name, MIB))
        for rank, size in enumerate(sizes):
            if size > limit:
                model_size = size_text(held_by_rank[rank].model)
                warnings.setdefault(
                    rank,
                    f"rank {rank} holds {size_text(size)} of {name}, the other ranks {size_text(usual)}. The whole "
                    f"model is {model_size}.\n"
                    "Look for code that runs only on that rank, such as "
                    "from_pretrained, torch.load or full_tensor under `if rank == 0`.",
                )
    return list(warnings.values())


def _full_shard_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter's first shard, which has the most rows."""
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    dimensions = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    shards = math.prod(size for size, placement in dimensions if placement.is_shard())
    rows = parameter.shape[0]
    rows_per_shard = -(-rows // shards)  # rounded up
    return rows_per_shard * (parameter.nbytes // rows)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of whole local storages, because a view of a few rows keeps its whole
    storage alive."""
    bytes_by_address = dict[int, int]()
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        bytes_by_address[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_by_address.values())


def record_memory() -> None:
    """Record the last 100,000 allocations on the current CUDA device; the viewer in the browser
    cannot show more. torch documents 2 us per allocation."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)


def write_snapshot(run: Path, rank: int, moment: str) -> Path:
    """Write memory/rank-<rank>-<moment>.pickle in the run's directory, for pytorch.org/memory_viz.
    It holds sizes, times and the source lines that allocated, with file paths, but no tensor
    values."""
    file = run / "memory" / f"rank-{rank}-{moment}.pickle"
    file.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
