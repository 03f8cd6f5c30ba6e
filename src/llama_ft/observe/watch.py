"""Memory while a run works: peaks by phase, what the ranks hold, the largest unit, leaks, and what is odd in them."""

from types import TracebackType
from typing import Self, cast

import torch
import torch.distributed as dist
from torch import nn

from llama_ft.observe.differences import (
    LARGEST_SHARE,
    MIB,
    Held,
    Moment,
    find_differences,
    gradient_bytes,
    held_tensors,
)
from llama_ft.observe.facts import RunFacts
from llama_ft.observe.growth import Growth
from llama_ft.observe.memory import MemoryUse, free_unused_heap, host_available_bytes, memory_use
from llama_ft.observe.peaks import PhasePeaks
from llama_ft.observe.step_trace import StepTrace
from llama_ft.phases import PHASES, Phase
from llama_ft.runtime import Runtime, log

TRACED_STEP = 2  # of this process; the first has no optimizer states yet
MOST_OF_THE_MODEL = 0.5  # as models.units refuses it
COLUMNS = {  # of facts.json -> of the table
    "device_peak_bytes": "allocated",
    "device_reserved_bytes": "reserved",
    "device_fragmented_bytes": "fragmented",
    "anonymous_peak_bytes": "host, anonymous",
}


class MemoryWatch:
    """A PhaseWatch, and a context manager around the whole of a run; every rank has one.

    Ranks are compared after loading and after the second step, told of at the end, and else left alone: a step costs
    its phases (see PhasePeaks) and one reading. The second step alone has hooks on it.

    Args:
        job: the ranks.

    Attributes:
        phase: the present one; None outside of any.
        host_peak_bytes: largest resident size since training began, up to the present phase.
        device_peak_bytes: largest sum of tensors on the CUDA device likewise; 0 on the CPU.
    """

    def __init__(self, job: Runtime) -> None:
        self._job = job
        self._peaks = PhasePeaks(job.device)
        self._facts: RunFacts | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._base = MemoryUse()
        self._steps = self._gradients = 0
        self._trace: StepTrace | None = None
        self._device_growth, self._host_growth = Growth(), Growth()
        self._warnings: list[str] = []
        self._leaks: set[str] = set()
        self._told: list[dict[Phase, dict[str, int]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peaks.leave()
        if self._facts is None:
            return
        if error is None:
            self._tell_peaks()
        else:  # the others may be gone: what they had when they were last asked
            self._told = [self._peaks.by_phase, *self._told[1:]]
            self._add_phases()

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
        """See PhaseWatch."""
        if phase == "load":
            free_unused_heap()
            self._base = memory_use(self._job.device)
        self._peaks.enter(phase)
        if self._trace is None:
            return
        if phase == "forward":
            self._trace.begin_micro_batch()
        elif phase == "optimizer step":
            self._trace.note(phase)
            self._gradients = gradient_bytes(cast(nn.Module, self._model))

    def loaded(self, model: nn.Module) -> None:
        """Compare the ranks; the model has its weights, and nothing else is there yet. All ranks call it."""
        self._peaks.leave()
        self._compare(held_tensors(model), "loading", self._peaks.by_phase.get("load", {}))

    def begin_training(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: RunFacts) -> None:
        """From now on steps follow."""
        self._model, self._optimizer, self._facts = model, optimizer, facts
        facts.add(memory={"unit": "device" if self._job.device.type == "cuda" else "anonymous"})
        self._add_warnings()
        self._peaks.start_over()

    def growth(self) -> tuple[float, float, float]:
        """Bytes that the device and the host lose with every step to a leak on this rank, and for how many steps
        more there is room; 0 where none is found. `end_step` wants them of all ranks."""
        device, host = self._device_growth.bytes_per_step, self._host_growth.bytes_per_step
        steps = []
        if host and (available := host_available_bytes()):
            steps.append(available / host)
        if device:
            steps.append(torch.cuda.mem_get_info(self._job.device)[0] / device)
        return device, host, min(steps, default=0.0)

    def end_step(self, growth: torch.Tensor) -> None:
        """An optimizer step is done, gradients are freed. All ranks call it.

        Args:
            growth: what `growth` said on each rank before this step's end, [ranks, 3].
        """
        assert self._model is not None
        self._steps += 1
        use = memory_use(self._job.device)
        self._device_growth.note(use.device)
        self._host_growth.note(use.anonymous)
        self._warn_of_growth(growth)
        if self._trace is not None:
            self._trace.note("step ends")
            self._trace.stop()
            self._end_trace(self._trace)
            self._trace = None
        if self._steps == TRACED_STEP - 1:
            self._trace = StepTrace(self._model, lambda: self.phase, self._held_now)

    def _held_now(self) -> int:
        use = memory_use(self._job.device)
        return use.device if self._job.device.type == "cuda" else use.anonymous

    def _end_trace(self, trace: StepTrace) -> None:
        assert self._model is not None and self._facts is not None
        held = held_tensors(self._model, self._optimizer, self._gradients)
        everyone = self._compare(held, "the second step", {})
        largest = max(trace.gathered, key=lambda name: trace.gathered[name])
        share = trace.gathered[largest] / (sum(trace.gathered.values()) or 1)
        if share:  # else one process uses all weights as they are stored
            log.info(
                f"Largest unit gathered: {largest or 'the rest of the model'}, "
                f"{trace.gathered[largest] / MIB:,.1f} MiB, {share:.0%} of the model"
            )
        if share > MOST_OF_THE_MODEL and trace.layers[largest] > 1 and self._job.mesh["shard"].size() > 1:
            self._warn(
                f"the unit {largest or 'at the root'} gathers {trace.gathered[largest] / MIB:,.0f} MiB on every rank, "
                f"{share:.0%} of the model, {trace.layers[largest]} decoder layers at a time: nothing is saved by "
                "sharding.\nEach decoder layer should be a unit of its own: --fsdp_wrap_policy hybrid does that."
            )
        self._facts.add(
            memory={
                "holders": [rank.holders for rank in everyone],
                "step": trace.moments,
                "largest_unit": largest,
                "largest_unit_bytes": trace.gathered[largest],
            }
        )
        self._tell_peaks()

    def _compare(self, held: Held, moment: Moment, peak: dict[str, int]) -> list[Held]:
        free_unused_heap()
        use = memory_use(self._job.device)
        base, largest = self._base.anonymous, peak.get("anonymous_peak_bytes", 0)
        held.memory = {"host memory": use.anonymous - base, "host memory at its peak": max(0, largest - base)}
        if self._job.device.type == "cuda":
            held.memory |= {"device memory": use.device, "device memory at its peak": peak.get("device_peak_bytes", 0)}
        everyone = [held] * self._job.world_size
        dist.all_gather_object(everyone, held)
        for warning in find_differences(everyone, moment):
            self._warn(warning)
        return everyone

    def _warn_of_growth(self, growth: torch.Tensor) -> None:
        for column, kind in enumerate(("device", "host")):
            rank = int(growth[:, column].argmax())
            per_step = growth[rank, column].item()
            if per_step and kind not in self._leaks:
                self._leaks.add(kind)
                left = growth[rank, 2].item()
                until = f" In {left:,.0f} steps more what is free will be used up." if left else ""
                self._warn(
                    f"{kind} memory grows with every step, by {per_step / MIB:.1f} MiB on rank {rank}.{until}\n"
                    "Something keeps what a step has made: a loss or another tensor that is put into a list needs "
                    ".item() or .detach()."
                )

    def _warn(self, text: str) -> None:
        log.warning(text)
        self._warnings.append(text)
        self._add_warnings()

    def _add_warnings(self) -> None:
        if self._facts is not None:
            self._facts.add(memory={"warnings": self._warnings})

    def _tell_peaks(self) -> None:
        """Ask all ranks, and show the table where it is new."""
        told: list[dict[Phase, dict[str, int]]] = [{}] * self._job.world_size
        dist.all_gather_object(told, self._peaks.by_phase)
        before, self._told = self._told, told
        self._add_phases()
        if not before or _has_changed(before, told):
            log.info(_table(told))

    def _add_phases(self) -> None:
        assert self._facts is not None
        phases = [phase for phase in PHASES if any(phase in rank for rank in self._told)]
        self._facts.add(memory={"phases": {phase: [rank.get(phase, {}) for rank in self._told] for phase in phases}})


def _has_changed(before: list[dict[Phase, dict[str, int]]], now: list[dict[Phase, dict[str, int]]]) -> bool:
    return any(
        peak > LARGEST_SHARE * old.get(phase, {}).get(name, 0)
        for old, rank in zip(before, now, strict=True)
        for phase, peaks in rank.items()
        for name, peak in peaks.items()
    )


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
