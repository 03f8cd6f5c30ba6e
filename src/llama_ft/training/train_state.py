"""How far a run is."""

from typing import Any

from llama_ft.config import TrainConfig
from llama_ft.training.evaluation import BestLoss
from llama_ft.training.loss_scale import LossScale


class TrainState:
    """What a resumed run must know besides weights, optimizer and random numbers. The rest follows from the step.

    Args:
        train: precision and early stopping.

    Attributes:
        step: optimizer steps done.
        target_tokens: tokens learned from so far, over all ranks.
        position: where streamed rows stand; empty otherwise.
        best: the best validation loss.
        scale: fp16's loss scale.
    """

    def __init__(self, train: TrainConfig) -> None:
        self.step = 0
        self.target_tokens = 0
        self.position: dict[str, int] = {}
        self.best = BestLoss(train)
        self.scale = LossScale.for_precision(train.precision)

    def state_dict(self) -> dict[str, Any]:
        """All of it, for trainer.json."""
        counts = {"step": self.step, "target_tokens": self.target_tokens, "position": self.position}
        return {**counts, "best": self.best.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that saved `state` would have."""
        self.step, self.target_tokens = int(state["step"]), int(state["target_tokens"])
        self.position = dict(state["position"])
        self.best.load_state_dict(state["best"])
        self.scale.load_state_dict(state["scale"])
