"""The phases of a run and what holds memory in them: the words that plans, measurements and reports share."""

from typing import Literal, Protocol, get_args

Phase = Literal["load", "forward", "backward", "optimizer step", "evaluation", "save"]
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
    """Whoever wants to know which phase a run is in: what measures peaks, and the planner."""

    def enter(self, phase: Phase) -> None:
        """From now on it is this one; the one before has ended."""


class _NullMonitor:
    def enter(self, phase: Phase) -> None: ...


NULL_MONITOR: PhaseMonitor = _NullMonitor()
