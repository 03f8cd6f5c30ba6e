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
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llama_ft.config.messages import size_text
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.phases import PHASES, MemoryCategory, Phase
from llama_ft.runtime import Ranks, log

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

    anonymous: int = 0  # resident host memory without a file behind it
    mapped: int = 0  # resident pages of files and shared memory
    resident_peak: int = 0  # maximum of their sum
    device: int = 0  # tensors on the CUDA device
    device_peak: int = 0
    device_reserved_peak: int = 0  # maximum held by the CUDA allocator, including free blocks


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory of this process. Takes about 0.1 ms and does not synchronize with the
    device."""
    found = FIELDS.findall(PROC_STATUS.read_bytes()) if PROC_STATUS.exists() else []  # Linux only
    host = {name.decode(): int(size) * 1024 for name, size in found}
    counts = (
        host.get("RssAnon", 0),
        host.get("RssFile", 0) + host.get("RssShmem", 0),
        host.get("VmHWM", 0),
    )
    stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    if not stats:  # nothing was allocated yet
        return MemoryUse(*counts)
    allocated = stats["allocated_bytes"]["all"]
    return MemoryUse(
        *counts, allocated["current"], allocated["peak"], stats["reserved_bytes"]["all"]["peak"]
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
    measured = {"memory/host_peak_bytes": peaks[:, 0], "memory/device_peak_bytes": peaks[:, 1]}
    return {
        key: held_by_rank.long().tolist()
        for key, held_by_rank in measured.items()
        if held_by_rank.any()
    }


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
        self.by_phase: dict[Phase, dict[str, int]] = {}
        self.host_peak_bytes = self.device_peak_bytes = 0
        self._ranks = ranks
        self._is_cuda = ranks.device.type == "cuda"
        self._steps = 0
        self._before = self._base = MemoryUse()
        self._sampled = 0
        self._sampling = threading.Event()
        self._training: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._facts = RunMetadata(Path(), enabled=False)
        self._peaks_of_ranks: list[dict[Phase, dict[str, int]]] = [{}] * ranks.world_size

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.leave()
        self._note_peaks(ask_others=self._training is not None and error is None)

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self._before = self.leave()
        if phase == "load":
            _free_unused_heap()
            self._base = memory_use(CPU)  # memory of Python and its libraries
        if (
            phase == "optimizer step"
            and self._training is not None
            and self._steps == COMPARED_STEP - 1
        ):
            self._compare_ranks(*self._training)
        self.phase = phase
        reset_peaks(self._ranks.device)
        if phase in PHASES_WITH_MAPPED_FILES:
            self._sampled = 0
            self._sampling = threading.Event()
            threading.Thread(target=self._sample, args=(self._sampling,), daemon=True).start()

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(0.01):
            self._sampled = max(self._sampled, memory_use(CPU).anonymous)

    def leave(self) -> MemoryUse:
        """End the current phase and return the current use."""
        self._sampling.set()
        now = memory_use(self._ranks.device)
        self.host_peak_bytes = max(self.host_peak_bytes, now.resident_peak)
        self.device_peak_bytes = max(self.device_peak_bytes, now.device_peak)
        if self.phase is not None:
            anonymous = (
                self._sampled
                if self.phase in PHASES_WITH_MAPPED_FILES
                else now.resident_peak - now.mapped
            )
            peaks = {"anonymous_peak_bytes": max(anonymous, self._before.anonymous, now.anonymous)}
            if self._is_cuda:
                peaks |= {
                    "device_peak_bytes": now.device_peak,
                    "device_reserved_bytes": now.device_reserved_peak,
                }
            kept = self.by_phase.setdefault(self.phase, {})
            kept.update({name: max(kept.get(name, 0), peak) for name, peak in peaks.items()})
            self.phase = None
        return now

    def begin_training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: RunMetadata
    ) -> None:
        """Start to count steps. The peaks of the whole run begin here, after loading."""
        self._training = (model, optimizer)
        self._facts = facts
        facts.add(memory={"warnings": [], "base_bytes": self._base.anonymous})
        self.leave()
        _free_unused_heap()  # left from loading
        self.host_peak_bytes = self.device_peak_bytes = 0
        reset_peaks(self._ranks.device)

    def end_step(self) -> None:
        """Count an optimizer step, and compare the ranks after the second one. All ranks must call
        it."""
        self._steps += 1
        if self._steps == COMPARED_STEP:
            self._note_peaks(ask_others=True)

    def _compare_ranks(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _free_unused_heap()
        use = memory_use(self._ranks.device)
        memory = {"device memory": use.device, "host memory": use.anonymous - self._base.anonymous}
        held_by_rank = [held_tensors(model, optimizer, memory)] * self._ranks.world_size
        dist.all_gather_object(held_by_rank, held_by_rank[0])
        warnings = find_differences(held_by_rank)
        for warning in warnings:
            log.warning(warning)
        self._facts.add(
            memory={"holders": [rank.holders for rank in held_by_rank], "warnings": warnings}
        )

    def _note_peaks(self, ask_others: bool) -> None:
        self._peaks_of_ranks[0] = (
            self.by_phase
        )  # at the end other ranks may be gone: their last values stay
        if ask_others:
            dist.all_gather_object(self._peaks_of_ranks, self.by_phase)
        phases = {
            phase: [rank.get(phase, {}) for rank in self._peaks_of_ranks]
            for phase in PHASES
            if phase in self.by_phase
        }
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
    model: nn.Module, optimizer: torch.optim.Optimizer | None, memory: dict[str, int]
) -> Held:
    """Return the bytes of this rank's parameters, gradients and optimizer states."""
    states = optimizer.state.values() if optimizer is not None else []
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    members: dict[MemoryCategory, list[Any]] = {
        "sharded parameters": [p for p in parameters if p.is_floating_point()],
        "quantized parts": [p for p in parameters if not p.is_floating_point()],
        "gradients": [p.grad for p in trained if p.grad is not None],
        "optimizer state": [
            value for state in states for value in state.values() if torch.is_tensor(value)
        ],
    }
    holders = {
        str(name): size for name, tensors in members.items() if (size := _storage_bytes(tensors))
    }
    # Sharding works like torch.chunk, so the last ranks may have fewer rows.
    ratio = sum(map(_full_shard_bytes, trained)) / max(
        1, sum(getattr(p, "_local_tensor", p).nbytes for p in trained)
    )
    return Held(holders, memory, sum(p.nbytes for p in parameters), ratio)


def find_differences(held_by_rank: list[Held]) -> list[str]:
    """Return a warning for each rank that holds over 5% more than others do and its shards need."""
    warnings = dict[int, str]()
    for name in [*dict.fromkeys(name for rank in held_by_rank for name in rank.holders), *NOISE]:
        sizes = [(rank.holders | rank.memory).get(name, 0) for rank in held_by_rank]
        due = [
            0 if name in NOISE else size * rank.shard_ratio
            for size, rank in zip(sizes, held_by_rank, strict=True)
        ]
        # the lower median: of two ranks, the smaller value
        usual = max(median_low(sizes), median_low(due))
        for rank, size in enumerate(sizes):
            if size > max(usual * LARGEST_SHARE, usual + NOISE.get(name, MIB)):
                warnings.setdefault(
                    rank,
                    f"rank {rank} holds {size_text(size)} of {name}, the other ranks {size_text(usual)}. The whole "
                    f"model is {size_text(held_by_rank[rank].model)}.\n"
                    "Look for code that runs only on that rank, such as "
                    "from_pretrained, torch.load or full_tensor under `if rank == 0`.",
                )
    return list(warnings.values())


def _full_shard_bytes(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    shards = math.prod(size for size, placement in placed if placement.is_shard())
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.nbytes // rows)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of whole local storages, because a view of a few rows keeps its whole
    storage alive."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
