"""The phases of a run and the categories of memory, as used by plans, measurements and reports."""

from typing import Literal, Protocol, get_args

Phase = Literal["load", "generation", "forward", "backward", "optimizer step", "evaluation", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MemoryCategory = Literal[
    "sharded parameters",
    "quantized parts",
    "unsharded units",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "communication buffers",
    "temporaries",
]
MEMORY_CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)


class PhaseMonitor(Protocol):
    """An object that is informed about the phases of a run: the measurement of peaks, and the
    planner."""

    def enter(self, phase: Phase) -> None:
        """End the previous phase and begin this one."""

    def leave(self) -> object:
        """End the current phase, if there is one. No other one begins."""


class _NullMonitor:
    def enter(self, phase: Phase) -> None: ...
    def leave(self) -> None: ...


NULL_MONITOR: PhaseMonitor = _NullMonitor()
