import pytest

from llama_ft.config import TrainConfig
from llama_ft.training.train_state import BestLoss


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "best", "stops"),
    [
        (2, 0.0, [3.0, 2.0, 2.5, 2.4], (2.0, 2), True),
        (1, 0.1, [2.0, 1.95], (2.0, 1), True),
        (0, 0.0, [1.0] + [2.0] * 50, (1.0, 1), False),
    ],
)
def test_the_run_stops_after_as_many_evaluations_without_improvement_as_patience_says(
    patience: int, min_delta: float, losses: list[float], best: tuple[float, int], stops: bool
) -> None:
    found = BestLoss(
        TrainConfig(early_stopping_patience=patience, early_stopping_min_delta=min_delta)
    )
    for step, loss in enumerate(losses, start=1):
        assert found.update(loss, step) == (
            loss < min([*losses[: step - 1], float("inf")]) - min_delta
        )
    assert (found.loss, found.step) == best and found.should_stop == stops
