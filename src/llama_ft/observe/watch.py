"""Memory while a run works: peaks by phase, what the ranks hold beside each other, and leaks."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from types import TracebackType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llama_ft.config.messages import size_text
from llama_ft.observe.memory import MemoryUse, PhasePeaks, free_unused_heap, memory_use
from llama_ft.observe.run_metadata import RunMetadata
from llama_ft.phases import PHASES, MemoryCategory, Phase
from llama_ft.runtime import Runtime, log

MIB = 2**20
Moment = Literal["loading", "the second step"]
COMPARED_STEP = 2  # of this process; the first has no optimizer states yet
LARGEST_SHARE = 1.05
# Tensors are counted exactly. The CUDA allocator rounds up; Python and its libraries take host memory when they like,
# and after loading one rank alone imports some (W&B, TensorBoard, the progress bar).
HOLDER_NOISE, DEVICE_NOISE, HOST_NOISE = MIB, 32 * MIB, {"loading": 32 * MIB, "the second step": 128 * MIB}
LEAST_LEAK_BYTES, LEAST_LEAK_SHARE = 64 * MIB, 0.01  # of what is held
COLUMNS = {  # of facts.json -> of the table
    "device_peak_bytes": "allocated",
    "device_reserved_bytes": "reserved",
    "device_fragmented_bytes": "fragmented",
    "anonymous_peak_bytes": "host, anonymous",
}


class MemoryMonitor:
    """A PhaseMonitor, and a context manager around the whole of a run; every rank has one.

    Ranks are compared after loading and after the second step; else a step costs its phases (see PhasePeaks) and one
    reading.

    Args:
        job: the ranks.

    Attributes:
        phase: the present one; None outside of any.
        host_peak_bytes: largest resident size since training began, up to the present phase.
        device_peak_bytes: largest sum of tensors on the CUDA device likewise; 0 on the CPU.
    """

    def __init__(self, job: Runtime) -> None:
        self._job, self._is_cuda = job, job.device.type == "cuda"
        self._peaks = PhasePeaks(job.device)
        self._facts: RunMetadata | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._base = MemoryUse()
        self._steps = self._gradients = 0
        self._growth = {"device": Growth(), "host": Growth()}
        self._warnings: list[str] = []
        self._logged: list[dict[Phase, dict[str, int]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peaks.leave()
        if self._facts is not None and error is None:
            self._log_peaks()
        elif self._facts is not None:  # the others may be gone: what they had when they were last asked
            self._add_phases([self._peaks.by_phase, *self._logged[1:]])

    @property
    def phase(self) -> Phase | None:
        return self._peaks.phase

    @property
    def host_peak_bytes(self) -> int:
        return self._peaks.resident

    @property
    def device_peak_bytes(self) -> int:
        return self._peaks.device

    def enter(self, phase: Phase) -> None:
        """See PhaseMonitor."""
        if phase == "load":
            free_unused_heap()
            self._base = memory_use(self._job.device)
        self._peaks.enter(phase)
        if phase == "optimizer step" and self._model is not None and self._steps == COMPARED_STEP - 1:
            self._gradients = _storage_bytes(p.grad for p in self._model.parameters() if p.grad is not None)

    def loaded(self, model: nn.Module) -> None:
        """Compare the ranks; the model has its weights, and nothing else is there yet. All ranks call it."""
        self._peaks.leave()
        self._compare(held_tensors(model), "loading", self._peaks.by_phase.get("load", {}))

    def begin_training(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: RunMetadata) -> None:
        """From now on steps follow."""
        self._model, self._optimizer, self._facts = model, optimizer, facts
        facts.add(memory={"unit": "device" if self._is_cuda else "anonymous", "warnings": self._warnings})
        self._peaks.start_over()

    def growth(self) -> tuple[float, float]:
        """Bytes that the device and the host lose with every step to a leak on this rank; 0 where none is found.
        `end_step` wants them of all ranks."""
        return self._growth["device"].bytes_per_step, self._growth["host"].bytes_per_step

    def end_step(self, growth: torch.Tensor) -> None:
        """An optimizer step is done, gradients are freed. All ranks call it.

        Args:
            growth: what `growth` said on each rank before this step's end, [ranks, 2].
        """
        assert self._model is not None and self._facts is not None
        self._steps += 1
        use = memory_use(self._job.device)
        for column, (kind, held) in enumerate((("device", use.device), ("host", use.anonymous))):
            self._growth[kind].note(held)
            rank = int(growth[:, column].argmax())
            if growth[rank, column] and not self._growth[kind].is_known:
                self._growth[kind].is_known = True
                self._warn(
                    f"{kind} memory grows with every step, by {growth[rank, column] / MIB:.1f} MiB on rank {rank}.\n"
                    "Something keeps what a step has made: a loss or another tensor that is put into a list needs "
                    ".item() or .detach()."
                )
        if self._steps == COMPARED_STEP:
            ranks = self._compare(held_tensors(self._model, self._optimizer, self._gradients), "the second step", {})
            self._facts.add(memory={"holders": [rank.holders for rank in ranks]})
            self._log_peaks()

    def _compare(self, held: "Held", moment: Moment, peak: dict[str, int]) -> list["Held"]:
        free_unused_heap()
        use = memory_use(self._job.device)
        base, largest = self._base.anonymous, peak.get("anonymous_peak_bytes", 0)
        held.memory = {"host memory": use.anonymous - base, "host memory at its peak": max(0, largest - base)}
        if self._is_cuda:
            held.memory |= {"device memory": use.device, "device memory at its peak": peak.get("device_peak_bytes", 0)}
        ranks = [held] * self._job.world_size
        dist.all_gather_object(ranks, held)
        for warning in find_differences(ranks, moment):
            self._warn(warning)
        return ranks

    def _warn(self, text: str) -> None:
        log.warning(text)
        self._warnings.append(text)
        if self._facts is not None:
            self._facts.add(memory={"warnings": self._warnings})

    def _log_peaks(self) -> None:
        """Ask all ranks, and log the table where it is new."""
        ranks: list[dict[Phase, dict[str, int]]] = [{}] * self._job.world_size
        dist.all_gather_object(ranks, self._peaks.by_phase)
        self._add_phases(ranks)
        before = self._logged or [{}] * len(ranks)
        if any(
            peak > LARGEST_SHARE * old.get(phase, {}).get(name, 0)
            for old, rank in zip(before, ranks, strict=True)
            for phase, peaks in rank.items()
            for name, peak in peaks.items()
        ):
            log.info(_table(ranks))
        self._logged = ranks

    def _add_phases(self, ranks: list[dict[Phase, dict[str, int]]]) -> None:
        assert self._facts is not None
        phases = [phase for phase in PHASES if any(phase in rank for rank in ranks)]
        self._facts.add(memory={"phases": {phase: [rank.get(phase, {}) for rank in ranks] for phase in phases}})


def _table(ranks: list[dict[Phase, dict[str, int]]]) -> str:
    """Peaks by phase, the largest of the ranks'; where they differ by more than 5 %, the least too and whose the
    largest is."""
    columns = [name for name in COLUMNS if any(name in peaks for rank in ranks for peaks in rank.values())]
    lines = [f"{'peaks in MiB':<16}" + "".join(f"{COLUMNS[name]:>26}" for name in columns)]
    for phase in PHASES:
        cells = []
        for name in columns:
            sizes = [rank.get(phase, {}).get(name, 0) for rank in ranks]
            differ = max(sizes) > LARGEST_SHARE * min(sizes)
            spread = f"{min(sizes) / MIB:,.0f} to ", f" (rank {sizes.index(max(sizes))})"
            cells.append(f"{max(sizes) / MIB:,.0f}".join(spread if differ else ("", "")) if any(sizes) else "")
        if any(cells):
            lines.append(f"  {phase:<14}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


@dataclass
class Held:
    """What a rank holds at a moment at which it should hold its shards and nothing else, in bytes.

    Attributes:
        holders: by what holds it, each storage once.
        due: what the rank should hold of it, with the padding of a last shard.
        model: all parameters of all ranks, as they are stored.
        largest: the largest of them.
        memory: as the kernel and the CUDA allocator count it.
    """

    holders: dict[MemoryCategory, int]
    due: dict[MemoryCategory, int]
    model: int
    largest: int
    memory: dict[str, int] = field(default_factory=dict)


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, gradients: int = 0) -> Held:
    """What this rank's parameters and states take.

    Args:
        model: sharded and loaded.
        optimizer: None while there is none.
        gradients: their bytes when there were some.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = optimizer.state.values() if optimizer is not None else []
    floating, packed = ([p for p in parameters if p.is_floating_point() is kind] for kind in (True, False))
    # A last shard has fewer rows: gradients and states of full ones are larger by as much.
    fuller = sum(map(_due_bytes, trained)) / max(1, sum(_own(p).nbytes for p in trained))
    state = _storage_bytes(v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    counted: dict[MemoryCategory, tuple[int, int]] = {
        "sharded parameters": (_storage_bytes(floating), sum(map(_due_bytes, floating))),
        "quantized parts": (_storage_bytes(packed), sum(map(_due_bytes, packed))),
        "gradients": (gradients, int(gradients * fuller)),
        "optimizer state": (state, int(state * fuller)),
    }
    holders = {name: size for name, (size, _) in counted.items() if size}
    sizes = [p.nbytes for p in parameters]
    return Held(holders, {name: counted[name][1] for name in holders}, sum(sizes), max(sizes))


def find_differences(ranks: list[Held], moment: Moment) -> list[str]:
    """A warning for each holder, and for memory without one, of which a rank has over 5 % more than is usual and due.

    Args:
        ranks: what each holds.
        moment: after what.
    """
    warnings, named = list[str](), set[int]()

    def look(what: str, sizes: list[int], due: int, noise: int, more: str) -> Iterable[int]:
        usual = max(median_low(sizes), due)  # of two ranks the smaller is usual
        for rank, size in enumerate(sizes):
            if size > max(usual * LARGEST_SHARE, usual + noise) and rank not in named:
                yield rank
                warnings.append(
                    f"after {moment}, rank {rank} holds {size_text(size)} of {what}, the other ranks "
                    f"{size_text(usual)}: {more.format(size_text(size - usual))}. The whole model is "
                    f"{size_text(ranks[rank].model)}.\nLook for what that rank alone does: from_pretrained, torch.load "
                    "or full_tensor where rank == 0 would do this."
                )

    found = set[int]()
    for holder in dict.fromkeys(name for rank in ranks for name in rank.holders):
        sizes = [rank.holders.get(holder, 0) for rank in ranks]
        due = median_low(rank.due.get(holder, 0) for rank in ranks)
        found |= set(look(holder, sizes, due, HOLDER_NOISE, "they are not sharded like theirs"))
    named |= found  # these ranks' memory is explained
    for kind in dict.fromkeys(name for rank in ranks for name in rank.memory):
        noise = DEVICE_NOISE if kind.startswith("device") else HOST_NOISE[moment]
        if kind.endswith("peak"):
            noise += 2 * ranks[0].largest  # a tensor on its way to other ranks, and its rows in another dtype
        sizes = [rank.memory.get(kind, 0) for rank in ranks]
        more = "{} belong to no sharded parameter and no state of the optimizer"
        named |= set(look(kind, sizes, 0, noise, more))
    return warnings


def _due_bytes(parameter: torch.Tensor) -> int:
    """Of a full shard: rows are dealt like torch.chunk, so it is the last ranks that have fewer."""
    shards = 1
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            shards *= size if placement.is_shard() else 1
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // shards) * (parameter.nbytes // max(1, rows))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's part of them: whole storages, since a view of a few rows keeps all of them."""
    storages = {(own := _own(tensor)).untyped_storage().data_ptr(): own for tensor in tensors}
    return sum(own.untyped_storage().nbytes() for own in storages.values())


class Growth:
    """Finds memory that grows with every step, looking at it at the same point of each.

    Steps are taken together in eight blocks, of which the least use counts: what a checkpoint or a long row needs for a
    moment is not in it. When the blocks are full, pairs become one and blocks are twice as long from then on: after 26
    steps of a run, 50, 98... each time over all of it. It is a leak when twice in a row every block is above the one
    before, both halves rise alike, and it is 64 MiB and 1 % in all.

    Attributes:
        bytes_per_step: of the leak; 0 while none is found.
        is_known: whether a leak on any rank has been reported.
    """

    def __init__(self) -> None:
        self.bytes_per_step = 0.0
        self.is_known = False
        self._skipped = 2  # optimizer states, caches and buffers are made
        self._block_steps = 3
        self._block: list[int] = []
        self._lows: list[int] = []
        self._suspected = False

    def note(self, held_bytes: int) -> None:
        """Take the use after one more step."""
        if self._skipped:
            self._skipped -= 1
            return
        self._block.append(held_bytes)
        if len(self._block) < self._block_steps:
            return
        self._lows.append(min(self._block))
        self._block = []
        if len(self._lows) < 8:
            return
        lows, rise = self._lows, self._lows[-1] - self._lows[0]
        halves = lows[3] - lows[0], lows[7] - lows[4]
        # What warms up rises less and less, and an evaluation or a save lifts the level once.
        is_steady = all(a < b for a, b in itertools.pairwise(lows)) and min(halves) >= 0.6 * max(halves)
        rises = is_steady and rise >= max(LEAST_LEAK_BYTES, LEAST_LEAK_SHARE * lows[-1])
        if rises and self._suspected and not self.bytes_per_step:
            self.bytes_per_step = rise / (7 * self._block_steps)
        self._suspected = rises
        self._lows = [min(pair) for pair in zip(lows[::2], lows[1::2], strict=True)]
        self._block_steps *= 2
