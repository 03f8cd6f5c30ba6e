"""Freed memory that is kept, and memory that ranks share, if there is room for both."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_shapes import write_llama
from transformers import AutoConfig, AutoModelForCausalLM

from llama_ft.config import load
from llama_ft.models import BuiltModel
from llama_ft.plan import spare_memory
from llama_ft.plan.spare_memory import most_bytes_added, use_spare_memory

PLANNED = ["--dataset", "demo", "--context_length", "256"]


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was used. glibc stays as it is, for the other tests."""
    calls = list[str]()
    for name in ("keep_freed_memory", "return_freed_memory", "share_memory"):
        monkeypatch.setattr(spare_memory, name, lambda *_, name=name: calls.append(name) or True)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.json and no weights."""
    return write_llama(tmp_path / "model", num_hidden_layers=2)


def unloaded(folder: Path) -> BuiltModel:
    with torch.device("meta"):
        return BuiltModel(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))


def use(built: BuiltModel, folder: Path, share: float | None, device: str = "cpu") -> None:
    config, _ = load(["--model_name", str(folder), *PLANNED], paths=False)
    ranks: Any = SimpleNamespace(device=torch.device(device), mesh=None, local_world_size=1)
    ranks.all_gather_floats = lambda mine: torch.tensor([[mine]], dtype=torch.float64)
    use_spare_memory(share, built, config, None, ranks)


BOTH = ["keep_freed_memory", "share_memory"]


@pytest.mark.parametrize(
    ("share", "expected", "said"),
    [
        (0.6, BOTH, "Freed memory is kept for the next tensors, since the plan leaves room for it"),
        (0.7, ["return_freed_memory"], "Freed memory is returned at once"),
    ],
)
def test_spare_memory_is_used_if_the_plan_leaves_room(
    share: float,
    expected: list[str],
    said: str,
    uses: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="llama_ft")
    use(unloaded(folder), folder, share)
    assert uses == expected
    assert caplog.text.count("Freed memory is") == caplog.text.count(said) == 1
    use(unloaded(folder), folder, share, "cuda")
    assert uses == expected, "a GPU needs neither"


@pytest.mark.parametrize(
    ("free_mib", "expected", "said"),
    [
        (1000, BOTH, "is kept for the next tensors: without a plan, training adds at most "),
        (1, [], "is not kept for the next tensors: without a plan, training adds at most "),
    ],
)
def test_without_a_plan_an_upper_bound_decides(
    free_mib: int,
    expected: list[str],
    said: str,
    uses: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(spare_memory, "free_bytes", lambda *_: free_mib * 2**20)
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)
    caplog.set_level(logging.INFO, logger="llama_ft")
    use(unloaded(folder), folder, None)
    assert uses == expected
    assert caplog.text.count("Freed memory") == caplog.text.count(said) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--precision fp32 --batching_strategy padding", marks=pytest.mark.slow),
        "--use_peft --batch_size_training 2",
        pytest.param("--objective simpo --val_batch_size 8", marks=pytest.mark.slow),
        "--save_steps 1",
    ],
)
def test_the_upper_bound_is_above_the_plan(
    flags: str, folder: Path, plan: Callable[..., Any]
) -> None:
    words = [*PLANNED[2:], *flags.split()]
    planned = plan(folder, 1, *words).device_bytes
    built = unloaded(folder)
    config, _ = load(["--model_name", str(folder), "--dataset", "demo", *words], paths=False)
    loaded = sum(parameter.nbytes for parameter in built.model.parameters())
    assert planned < most_bytes_added(built, config, None) + loaded


def test_without_a_plan_models_with_other_large_tensors_get_no_spare_memory(
    folder: Path, uses: list[str]
) -> None:
    config, _ = load(["--model_name", str(folder), *PLANNED], paths=False)
    for change in ("eager attention", "a convolution", "images"):
        built = unloaded(folder)
        if change == "eager attention":
            built.model.set_attn_implementation("eager")
        elif change == "a convolution":
            built.model.add_module("conv", torch.nn.Conv1d(8, 8, 4))
        else:
            built.towers = ["tower"]
        assert math.isinf(most_bytes_added(built, config, None)), change
        use(built, folder, None)
    assert uses == []
