"""The state of a run that is saved in addition to weights, optimizer states and random number
generators."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llama_ft.config import TrainConfig
from llama_ft.errors import UserError
from llama_ft.runtime import log

INITIAL_FACTOR = 2.0**16
STEPS_TO_GROWTH = 2000
SMALLEST_FACTOR = 2.0


@dataclass
class LossScale:
    """The factor on the loss before the backward pass in fp16. Skipped steps count as steps.

    The constants are those of torch.amp.GradScaler. GradScaler does not know that all ranks must
    skip a step if one rank's gradients overflow. Here the gradient norm over all ranks decides.
    """

    factor: float  # a power of two, so scaling never rounds; 1 for other precisions
    good_steps: int = 0  # since the last change of the factor
    skipped_steps: int = 0  # steps with an overflow, which did not change the weights

    @property
    def is_used(self) -> bool:
        return self.factor != 1.0

    def update(self, step: int, loss: float, norm: float) -> bool:
        """Adapt the factor to the loss and gradient norm of a step over all ranks. Return whether
        to skip the step.

        The step is skipped if only its gradients overflowed. If the loss itself is not finite, or
        the factor cannot become smaller, the run ends: see read_loss_or_stop.
        """
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == STEPS_TO_GROWTH:
                self.factor = self.factor * 2
                self.good_steps = 0
            return False
        if not math.isfinite(loss) or self.factor <= SMALLEST_FACTOR:
            return False
        self.factor = self.factor / 2
        self.good_steps = 0
        self.skipped_steps = self.skipped_steps + 1
        log.info(
            f"step {step} was skipped: its gradients overflowed fp16. The loss scale is now {self.factor:g}."
        )
        return True

    def metrics(self) -> dict[str, float]:
        """Return entries for metrics.jsonl; none without loss scaling."""
        return (
            {"train/loss_scale": self.factor, "train/skipped_steps": self.skipped_steps}
            if self.is_used
            else {}
        )


class Best:
    """Keeps the best value of the metric --best_by, and counts evaluations since then. `train` has
    the settings of early stopping."""

    def __init__(self, train: TrainConfig) -> None:
        self.metric = train.best_by
        is_lower_better = self.metric.endswith(("loss", "perplexity"))
        self._sign = 1 if is_lower_better else -1
        self.value = self._sign * math.inf
        self.step = 0
        self.evaluations_since = 0
        self._patience = train.early_stopping_patience
        self._min_delta = train.early_stopping_min_delta

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise a UserError if an evaluation does not have the metric, before steps are wasted: a
        mean over nothing is left out."""
        if self.metric not in metrics:
            raise UserError(
                f"--best_by {self.metric}: the evaluation has only {', '.join(metrics)}.\n"
                "Rewards of chosen and rejected responses, and their margin, need validation samples of both labels. "
                "Name one of these metrics, or use another validation set."
            )

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Count an evaluation. Return whether its value is the best so far."""
        value = metrics[self.metric]
        if self._sign * value < self._sign * self.value - self._min_delta:
            self.value = value
            self.step = step
            self.evaluations_since = 0
            return True
        self.evaluations_since += 1
        return False

    @property
    def title(self) -> str:
        return "validation loss" if self.metric == "eval/loss" else self.metric

    @property
    def should_stop(self) -> bool:
        return 0 < self._patience <= self.evaluations_since


class TrainState:
    """The progress of a run. Everything else follows from the step."""

    def __init__(self, train: TrainConfig) -> None:
        self.step = 0  # optimizer steps done
        self.target_tokens = 0  # tokens in the loss so far, over all ranks
        self.position: dict[str, int] = {}  # position in streamed samples; empty without streaming
        self.best = Best(train)
        self.scale = LossScale(INITIAL_FACTOR if train.precision == "fp16" else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return all fields for trainer.json. JSON has no infinity."""
        best = {
            "metric": self.best.metric,
            "value": self.best.value if math.isfinite(self.best.value) else None,
            "step": self.best.step,
        }
        return {
            "step": self.step,
            "target_tokens": self.target_tokens,
            "position": self.position,
            "best": {**best, "evaluations_since": self.best.evaluations_since},
            "scale": asdict(self.scale),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields that `state_dict` returned."""
        self.step = state["step"]
        self.target_tokens = state["target_tokens"]
        self.position = dict(state["position"])
        self.scale = LossScale(**state["scale"])
        best = state["best"]
        # checkpoints of version 0.1 have "loss"
        value = best.get("value", best.get("loss"))
        is_same = best.get("metric", "eval/loss") == self.best.metric
        if is_same and value is not None:
            self.best.value = value
            self.best.step = best["step"]
            self.best.evaluations_since = best["evaluations_since"]
