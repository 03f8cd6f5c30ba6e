import math

import pytest
import torch

from llama_ft.config import TrainConfig
from llama_ft.training import build_optimizer, describe_optimizer, is_due, learning_rate


def rates(total: int, steps_per_epoch: int = 10, **settings: object) -> list[float]:
    train = TrainConfig(lr=1.0, **settings)
    return [learning_rate(train, step, total, step // steps_per_epoch) for step in range(total)]


def test_the_warm_up_rises_linearly_to_lr_and_its_first_step_is_not_wasted() -> None:
    assert rates(10, lr_scheduler="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]


def test_cosine_is_the_one_of_transformers_after_the_warm_up() -> None:
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
    expected = []
    for _ in range(40):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(40, warmup_steps=5)[5:] == pytest.approx(expected[5:])


def test_linear_falls_evenly_to_zero() -> None:
    found = rates(8, lr_scheduler="linear")
    assert found == pytest.approx([1 - step / 8 for step in range(8)])


def test_step_is_torchs_step_lr_once_an_epoch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    expected = []
    for _ in range(3):
        expected += [theirs.get_last_lr()[0]] * 10
        optimizer.step()
        theirs.step()
    assert rates(30, lr_scheduler="step", gamma=0.85) == pytest.approx(expected)


def test_norms_and_biases_are_not_decayed_and_frozen_weights_not_optimized() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.1))
    decayed, spared = optimizer.param_groups
    assert [p.shape for p in decayed["params"]] == [(4, 3)] and decayed["weight_decay"] == 0.1
    assert [p.shape for p in spared["params"]] == [(4,), (4,), (4,)] and spared["weight_decay"] == 0
    assert describe_optimizer(optimizer) == "AdamW (fused), weight decay 0.1 on 12 parameters; none on norms and biases"


def test_what_is_done_every_n_steps_is_due_at_multiples_of_n_only() -> None:
    assert [step for step in range(1, 10) if is_due(step, 3, otherwise=False)] == [3, 6, 9]
    assert [step for step in range(1, 4) if is_due(step, 0, otherwise=step == 2)] == [2]
    assert math.isclose(learning_rate(TrainConfig(lr=2e-3), 0, 1, 0), 2e-3)
