"""Loss scaling for fp16, whose numbers end at 65,504 and fade out below 6e-5: gradients are computed times a factor.

Dynamic, with the constants of torch.amp.GradScaler, which itself does not know that every rank has to skip a step when
one of them has overflowed: here the gradient norm over all ranks decides, which all ranks know.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from llama_ft.runtime import log

INITIAL_FACTOR = 2.0**16
STEPS_TO_GROWTH = 2000
SMALLEST_FACTOR = 2.0


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass, and gradients divided by after it.

    A skipped step counts as a step: the learning rate goes on, and its rows are not seen again in that epoch.

    Attributes:
        factor: a power of two, so that scaling rounds nothing; 1 with precisions that need none.
        good_steps: steps since the factor last changed.
        skipped_steps: how many steps overflowed and left the weights as they were.
    """

    factor: float = 1.0
    good_steps: int = 0
    skipped_steps: int = 0

    @classmethod
    def for_precision(cls, precision: str) -> "LossScale":
        return cls(INITIAL_FACTOR) if precision == "fp16" else cls()

    @property
    def is_used(self) -> bool:
        return self.factor != 1.0

    def note(self, step: int, loss: float, norm: float) -> bool:
        """Adapt the factor to a step's outcome; returns whether the step is to be skipped.

        It is skipped when only its gradients overflowed. Where the loss itself is not a number, or the factor cannot
        fall any further, the run is to end: see stop_if_not_finite.

        Args:
            step: for the message.
            loss: of the global batch.
            norm: of its gradients over all ranks.
        """
        if not self.is_used:
            return False
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == STEPS_TO_GROWTH:
                self.factor, self.good_steps = self.factor * 2, 0
            return False
        if not math.isfinite(loss) or self.factor <= SMALLEST_FACTOR:
            return False
        self.factor, self.good_steps, self.skipped_steps = self.factor / 2, 0, self.skipped_steps + 1
        log.info(f"step {step} is skipped: its gradients overflowed fp16. The loss scale is now {self.factor:g}.")
        return True

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl; nothing where no scaling is used."""
        if not self.is_used:
            return {}
        return {"train/loss_scale": self.factor, "train/skipped_steps": self.skipped_steps}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that saved `state` would have."""
        self.factor, self.good_steps, self.skipped_steps = (
            float(state["factor"]),
            int(state["good_steps"]),
            int(state["skipped_steps"]),
        )
