"""Dynamic loss scaling for fp16, with the constants of torch.amp.GradScaler. That one does not know that every rank has
to skip a step if one of them has overflowed: here the gradient norm over all ranks decides."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from llama_ft.runtime import log

INITIAL_FACTOR = 2.0**16
STEPS_TO_GROWTH = 2000
SMALLEST_FACTOR = 2.0


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass. Skipped steps count as steps."""

    factor: float = 1.0  # a power of two, so that scaling rounds nothing; 1 with precisions that need none
    good_steps: int = 0  # since the factor last changed
    skipped_steps: int = 0  # overflowed and left the weights as they were

    @classmethod
    def for_precision(cls, precision: str) -> "LossScale":
        return cls(INITIAL_FACTOR) if precision == "fp16" else cls()

    @property
    def is_used(self) -> bool:
        return self.factor != 1.0

    def note(self, step: int, loss: float, norm: float) -> bool:
        """Adapt the factor to the loss and gradient norm of a step over all ranks; returns whether to skip the step.

        It is skipped if only its gradients overflowed. If the loss itself is not a number, or the factor cannot fall
        any further, the run ends: see stop_if_not_finite.
        """
        if self.is_used and math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == STEPS_TO_GROWTH:
                self.factor, self.good_steps = self.factor * 2, 0
        if not self.is_used or math.isfinite(norm) or not math.isfinite(loss) or self.factor <= SMALLEST_FACTOR:
            return False
        self.factor, self.good_steps, self.skipped_steps = self.factor / 2, 0, self.skipped_steps + 1
        log.info(f"step {step} is skipped: its gradients overflowed fp16. The loss scale is now {self.factor:g}.")
        return True

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl; nothing without scaling."""
        return {"train/loss_scale": self.factor, "train/skipped_steps": self.skipped_steps} if self.is_used else {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that saved `state` would have."""
        self.factor = float(state["factor"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
