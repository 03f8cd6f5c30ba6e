"""Memory as the kernel and the CUDA allocator count it: now, at the peak of each phase, and on the ranks side by side.

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
from llama_ft.runtime import Runtime, log

PROC_STATUS, PROC_CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FIELDS = re.compile(rb"\n(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB")
CPU = torch.device("cpu")
MIB = 2**20
# These map checkpoints into memory or write them. The kernel keeps the peak of all resident pages only, in which pages
# of files that are long unmapped at the phase's end cannot be told from tensors.
MAPS_FILES: tuple[Phase, ...] = ("load", "save")
COMPARED_STEP = 2  # of this process; the first has no optimizer states yet
LARGEST_SHARE = 1.05
# Tensors are counted exactly. The CUDA allocator rounds up; Python and its libraries take host memory when they like.
NOISE = {"device memory": 32 * MIB, "host memory": 128 * MIB}
SNAPSHOT_STEPS = 3  # of this process: the second has all optimizer states, the third repeats it


class MemoryUse(NamedTuple):
    """What a process holds, in bytes; peaks are since `reset_peaks`. 0 is what is not known, or not there."""

    anonymous: int = 0  # resident host memory no file stands behind
    mapped: int = 0  # resident pages of files and shared memory
    resident_peak: int = 0  # largest sum of both
    device: int = 0  # tensors on the CUDA device
    device_peak: int = 0
    device_reserved_peak: int = 0  # most that the CUDA allocator held, free blocks included


def memory_use(device: torch.device) -> MemoryUse:
    """What this process holds; takes about 0.1 ms, and waits for no kernel on the device."""
    found = FIELDS.findall(PROC_STATUS.read_bytes()) if PROC_STATUS.exists() else []  # Linux alone has it
    host = {name.decode(): int(size) * 1024 for name, size in found}
    counts = (host.get("RssAnon", 0), host.get("RssFile", 0) + host.get("RssShmem", 0), host.get("VmHWM", 0))
    stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    if not stats:  # nothing was ever allocated
        return MemoryUse(*counts)
    allocated = stats["allocated_bytes"]["all"]
    return MemoryUse(*counts, allocated["current"], allocated["peak"], stats["reserved_bytes"]["all"]["peak"])


def reset_peaks(device: torch.device) -> None:
    """Start a new phase: peaks count from the present use. Where clear_refs cannot be written (macOS, some containers)
    the host peak stays that of the whole process."""
    with contextlib.suppress(OSError):
        PROC_CLEAR_REFS.write_bytes(b"5")  # sets VmHWM to the present resident size
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(peaks: torch.Tensor) -> dict[str, list[int]]:
    """Metrics keys from every rank's host and device peak, [ranks, 2] in bytes; 0 was not measured."""
    measured = {"memory/host_peak_bytes": peaks[:, 0], "memory/device_peak_bytes": peaks[:, 1]}
    return {key: ranks.long().tolist() for key, ranks in measured.items() if ranks.any()}


class MemoryMonitor(contextlib.AbstractContextManager["MemoryMonitor"]):
    """A PhaseMonitor, and a context manager around the whole of a run; every rank has one.

    The kernel has a peak of resident memory (VmHWM), not of its anonymous part: that is taken as VmHWM less the mapped
    pages at the phase's end; while files are mapped it is sampled. Ranks are compared in the second step.

    Attributes:
        phase: the present one; None outside of any.
        by_phase: the largest peaks in bytes, as facts.json has them.
        host_peak_bytes: largest resident size since training began, up to the present phase.
        device_peak_bytes: largest sum of tensors on the CUDA device likewise; 0 on the CPU.
    """

    def __init__(self, job: Runtime) -> None:
        self.phase: Phase | None = None
        self.by_phase: dict[Phase, dict[str, int]] = {}
        self.host_peak_bytes = self.device_peak_bytes = 0
        self._job, self._is_cuda, self._steps = job, job.device.type == "cuda", 0
        self._before = self._base = MemoryUse()
        self._sampled, self._sampling = 0, threading.Event()
        self._training: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._facts = RunMetadata(Path(), enabled=False)
        self._ranks: list[dict[Phase, dict[str, int]]] = [{}] * job.world_size

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.leave()
        self._note_peaks(ask_others=self._training is not None and error is None)

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        self._before = self.leave()
        if phase == "load":
            _free_unused_heap()
            self._base = memory_use(CPU)  # Python and its libraries
        if phase == "optimizer step" and self._training is not None and self._steps == COMPARED_STEP - 1:
            self._compare_ranks(*self._training)
        self.phase = phase
        reset_peaks(self._job.device)
        if phase in MAPS_FILES:
            self._sampled, self._sampling = 0, threading.Event()
            threading.Thread(target=self._sample, args=(self._sampling,), daemon=True).start()

    def _sample(self, done: threading.Event) -> None:
        while not done.wait(0.01):
            self._sampled = max(self._sampled, memory_use(CPU).anonymous)

    def leave(self) -> MemoryUse:
        """End the present phase; returns the use right now."""
        self._sampling.set()
        now = memory_use(self._job.device)
        self.host_peak_bytes = max(self.host_peak_bytes, now.resident_peak)
        self.device_peak_bytes = max(self.device_peak_bytes, now.device_peak)
        if self.phase is not None:
            anonymous = self._sampled if self.phase in MAPS_FILES else now.resident_peak - now.mapped
            peaks = {"anonymous_peak_bytes": max(anonymous, self._before.anonymous, now.anonymous)}
            if self._is_cuda:
                peaks |= {"device_peak_bytes": now.device_peak, "device_reserved_bytes": now.device_reserved_peak}
            kept = self.by_phase.setdefault(self.phase, {})
            kept.update({name: max(kept.get(name, 0), peak) for name, peak in peaks.items()})
            self.phase = None
        return now

    def begin_training(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: RunMetadata) -> None:
        """From now on steps follow. Loading is no part of the peaks of the whole run."""
        self._training, self._facts = (model, optimizer), facts
        facts.add(memory={"warnings": [], "base_bytes": self._base.anonymous})
        self.leave()
        _free_unused_heap()  # of loading
        self.host_peak_bytes = self.device_peak_bytes = 0
        reset_peaks(self._job.device)

    def end_step(self) -> None:
        """An optimizer step is done. All ranks call it."""
        self._steps += 1
        if self._steps == COMPARED_STEP:
            self._note_peaks(ask_others=True)
            self._log_peaks()

    def _compare_ranks(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _free_unused_heap()
        use = memory_use(self._job.device)
        memory = {"device memory": use.device, "host memory": use.anonymous - self._base.anonymous}
        ranks = [held_tensors(model, optimizer, memory)] * self._job.world_size
        dist.all_gather_object(ranks, ranks[0])
        warnings = find_differences(ranks)
        for warning in warnings:
            log.warning(warning)
        self._facts.add(memory={"holders": [rank.holders for rank in ranks], "warnings": warnings})

    def _note_peaks(self, ask_others: bool) -> None:
        self._ranks[0] = self.by_phase  # rank 0 writes the facts; the others may be gone, with what they had last
        if ask_others:
            dist.all_gather_object(self._ranks, self.by_phase)
        phases = {phase: [rank.get(phase, {}) for rank in self._ranks] for phase in PHASES if phase in self.by_phase}
        self._facts.add(memory={"phases": phases})

    def _log_peaks(self) -> None:
        """Compare the ranks, if there are several. facts.json and the report have the peaks of every run."""
        lines = ["peaks in MiB, the least and the largest of all ranks"]
        for phase, own in self.by_phase.items():
            for kind in own:
                sizes = [rank.get(phase, {}).get(kind, 0) / MIB for rank in self._ranks]
                name = f"{phase}, {kind.removesuffix('_bytes').replace('_', ' ')}"
                rank = sizes.index(max(sizes))
                lines.append(f"  {name:<38} {min(sizes):>9,.0f} {sizes[rank]:>9,.0f} (rank {rank})")
        if len(self._ranks) > 1:
            log.info("\n".join(lines))


def _free_unused_heap() -> None:
    """Have the C library give back the pages it keeps for later, so that what is resident is in use."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


class Held(NamedTuple):
    """What a rank holds where it should hold its shards, their gradients and states, and nothing else, in bytes."""

    holders: dict[str, int]  # by what holds it, each storage once
    memory: dict[str, int]  # as the kernel and the CUDA allocator count it
    model: int  # all parameters of all ranks, as they are stored
    fuller: float = 1.0  # how many times as much as this rank one with full shards has of what is trained


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, memory: dict[str, int]) -> Held:
    """What this rank's parameters, gradients and optimizer states take."""
    states = optimizer.state.values() if optimizer is not None else []
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    members: dict[MemoryCategory, list[Any]] = {
        "sharded parameters": [p for p in parameters if p.is_floating_point()],
        "quantized parts": [p for p in parameters if not p.is_floating_point()],
        "gradients": [p.grad for p in trained if p.grad is not None],
        "optimizer state": [value for state in states for value in state.values() if torch.is_tensor(value)],
    }
    holders = {str(name): size for name, tensors in members.items() if (size := _storage_bytes(tensors))}
    # Rows are dealt like torch.chunk, so it is the last ranks that have fewer.
    fuller = sum(map(_full_shard_bytes, trained)) / max(1, sum(getattr(p, "_local_tensor", p).nbytes for p in trained))
    return Held(holders, memory, sum(p.nbytes for p in parameters), fuller)


def find_differences(ranks: list[Held]) -> list[str]:
    """A warning for each rank that has over 5 % more than is usual and due, about the first thing of which it has."""
    warnings = dict[int, str]()
    for name in [*dict.fromkeys(name for rank in ranks for name in rank.holders), *NOISE]:
        sizes = [(rank.holders | rank.memory).get(name, 0) for rank in ranks]
        due = [0 if name in NOISE else size * rank.fuller for size, rank in zip(sizes, ranks, strict=True)]
        usual = max(median_low(sizes), median_low(due))  # of two ranks the smaller is usual
        for rank, size in enumerate(sizes):
            if size > max(usual * LARGEST_SHARE, usual + NOISE.get(name, MIB)):
                warnings.setdefault(
                    rank,
                    f"rank {rank} holds {size_text(size)} of {name}, the other ranks {size_text(usual)}. The whole "
                    f"model is {size_text(ranks[rank].model)}.\nLook for code that runs only on that rank, such as "
                    "from_pretrained, torch.load or full_tensor under `if rank == 0`.",
                )
    return list(warnings.values())


def _full_shard_bytes(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    shards, rows = math.prod(size for size, placement in placed if placement.is_shard()), parameter.shape[0]
    return -(-rows // shards) * (parameter.nbytes // rows)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's part of them: whole storages, since a view of a few rows keeps all of them."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def record_memory() -> None:
    """Have torch record who allocates what on the current CUDA device; 2 us an allocation, torch says. The last 100,000
    are kept: a larger snapshot is too much for the viewer's browser."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)


def write_snapshot(run: Path, rank: int, moment: str) -> Path:
    """Write memory/rank-<rank>-<moment>.pickle in the run's directory, for pytorch.org/memory_viz: sizes, times and
    lines of code that allocated, with their paths; no content of any tensor."""
    file = run / "memory" / f"rank-{rank}-{moment}.pickle"
    file.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    return file
