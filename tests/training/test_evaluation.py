from llama_ft.config import TrainConfig
from llama_ft.training.evaluation import BestLoss


def test_the_run_stops_after_as_many_evaluations_without_improvement_as_patience_says() -> None:
    best = BestLoss(TrainConfig(early_stopping_patience=2))
    assert [best.update(loss, step) for step, loss in enumerate([3.0, 2.0, 2.5, 2.4], start=1)] == [
        True,
        True,
        False,
        False,
    ]
    assert best.should_stop and (best.loss, best.step) == (2.0, 2)


def test_a_fall_smaller_than_min_delta_is_no_improvement() -> None:
    best = BestLoss(TrainConfig(early_stopping_patience=1, early_stopping_min_delta=0.1))
    assert best.update(2.0, 1)
    assert not best.update(1.95, 2) and best.should_stop


def test_without_patience_it_never_stops() -> None:
    best = BestLoss(TrainConfig())
    best.update(1.0, 1)
    for step in range(2, 50):
        best.update(2.0, step)
    assert not best.should_stop
