"""How far a run is."""

from typing import Any

from llama_ft.config import TrainConfig
from llama_ft.training.evaluation import BestLoss
from llama_ft.training.loss_scale import LossScale


class TrainState:
    """What a resumed run must know besides weights, optimizer and random numbers. The rest follows from the step."""

    def __init__(self, train: TrainConfig) -> None:
        self.step = 0  # optimizer steps done
        self.target_tokens = 0  # tokens in the loss so far, over all ranks
        self.position: dict[str, int] = {}  # in streamed samples; empty otherwise
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
