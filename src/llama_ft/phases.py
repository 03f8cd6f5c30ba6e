"""The phases of a run and what holds memory in them: the words that plans, measurements and reports share."""

from typing import Literal, Protocol, get_args

Phase = Literal["load", "forward", "backward", "optimizer step", "evaluation", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Holder = Literal[
    "sharded parameters",
    "quantized parts",
    "gathered units",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "communication buffers",
    "temporaries",
]
HOLDERS: tuple[Holder, ...] = get_args(Holder)


class PhaseWatch(Protocol):
    """Whoever wants to know which phase a run is in: what measures peaks, and the planner."""

    def enter(self, phase: Phase) -> None:
        """From now on it is this one; the one before has ended."""


class _Nobody:
    def enter(self, phase: Phase) -> None: ...


NOBODY: PhaseWatch = _Nobody()
