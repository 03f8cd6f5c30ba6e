"""Settings that a run asks about before its first step."""

import pytest

from llama_ft.config import Config
from llama_ft.training import advice


def settings(
    model_name: str = "org/model", dataset: str = "x.csv", use_peft: bool = False, **train: object
) -> Config:
    config = Config()
    config.model.model_name = model_name
    config.data.dataset = dataset
    config.peft.use_peft = use_peft
    vars(config.train).update(train)
    return config


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (settings(lr=1e-5), ""),
        (settings(use_peft=True), ""),
        (settings("demo", "demo", lr=1.5e-3), ""),
        (settings(), "lr is 0.0001, usual is 1e-5"),
        (settings(optimizer="SGD"), "lr is 0.0001, usual is 1e-3"),
        (settings(use_peft=True, lr=1.0), "lr is 1, usual is 1e-4"),
        (settings(dataset="demo", use_peft=True), "dataset is demo"),
    ],
)
def test_only_unusual_settings_are_asked_about(config: Config, asked: str) -> None:
    found = advice(config, False, global_batch=8, size=8)
    assert len(found) == bool(asked) and "".join(found).startswith(asked)


def test_a_requested_demo_is_not_asked_about() -> None:
    assert not advice(settings(dataset="demo", use_peft=True), True, global_batch=8, size=8)


def test_a_global_batch_larger_than_an_epoch_is_asked_about() -> None:
    assert not advice(settings(lr=1e-5), True, global_batch=8, size=None)
    [found] = advice(settings(lr=1e-5), True, global_batch=8, size=7)
    assert found.startswith("the global batch (8) is larger than an epoch (7 packed sequences)")
