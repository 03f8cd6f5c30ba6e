"""Units stay unsharded for the length of an answer and of the check before training, as planned, or
without a plan if they fit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_llama import tiny_llama
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from llama_ft.config import FSDPConfig
from llama_ft.models import BuiltModel, apply_fsdp, use_packed_attention
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.models.sharding.kept_units import (
    all_unsharded_if_they_fit,
    units_kept_if_they_fit,
)
from llama_ft.runtime import PRECISIONS, Ranks
from llama_ft.training import check_packing

NEW_TOKENS = 5


@pytest.fixture
def built(runtime: Ranks) -> BuiltModel:
    """A sharded model. Its units are cast when they are unsharded."""
    torch.manual_seed(0)
    built = BuiltModel(tiny_llama(num_hidden_layers=3).eval())
    settings = FSDPConfig(enable_fsdp=True)
    built.sharding = apply_fsdp(built, runtime.mesh, settings, PRECISIONS["bf16_mixed"])
    return built


@pytest.fixture
def unsharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FSDPParamGroup]]:
    """The units that were unsharded, once per time."""
    found: list[FSDPParamGroup] = []
    unshard = FSDPParamGroup._to_unsharded

    def record(group: FSDPParamGroup) -> None:
        found.append(group)
        unshard(group)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", record)
    yield found


def answer(built: BuiltModel, ranks: Ranks, share: float = 0.0) -> list[int]:
    model: Any = built.model
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad(), units_kept_if_they_fit(built, ranks, share):
        tokens = model.generate(
            prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    free_unsharded(model)
    ids: list[int] = tokens[0].tolist()
    return ids


@pytest.mark.parametrize(
    ("planned", "share", "is_kept"),
    # without a plan the free memory decides
    [(None, 0.0, False), (None, 0.5, True), (False, 0.5, False), (True, 0.0, True)],
)
def test_units_are_unsharded_once_per_answer_if_planned_or_if_they_fit(
    planned: bool | None,
    share: float,
    is_kept: bool,
    built: BuiltModel,
    unsharded: list[FSDPParamGroup],
    runtime: Ranks,
) -> None:
    built.keeps_units = not is_kept
    expected = answer(built, runtime)
    unsharded.clear()
    built.keeps_units = planned
    assert answer(built, runtime, share) == expected
    # Two layers are freed after each token. The last layer and the root stay in any case.
    again = 0 if is_kept else 2 * (NEW_TOKENS - 1)
    assert len(unsharded) == len(set(unsharded)) + again > 2


def test_units_are_freed_after_their_forward_pass_again(built: BuiltModel, runtime: Ranks) -> None:
    built.keeps_units = True
    answer(built, runtime)
    model: Any = built.model
    first, *_ = model.model.layers
    assert isinstance(first, FSDPModule)
    model(input_ids=torch.tensor([[3, 1, 4]]))
    assert all(isinstance(parameter, DTensor) for parameter in first.parameters())


@pytest.mark.parametrize("planned", [True, False])
def test_a_model_that_is_unsharded_as_planned_needs_no_all_gathers(
    planned: bool, built: BuiltModel, unsharded: list[FSDPParamGroup], runtime: Ranks
) -> None:
    model: Any = built.model
    prompt = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        expected = model(input_ids=prompt).logits
        built.keeps_units = planned
        with all_unsharded_if_they_fit(built, runtime) as are_unsharded:
            unsharded.clear()
            assert torch.equal(model(input_ids=prompt).logits, expected)
            assert torch.equal(model(input_ids=prompt).logits, expected)
            assert are_unsharded == planned == (not unsharded)
    free_unsharded(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_the_check_of_packed_samples_unshards_each_unit_once(
    unsharded: list[FSDPParamGroup], runtime: Ranks
) -> None:
    built = BuiltModel(tiny_llama(num_hidden_layers=3))
    built.mixers = use_packed_attention(built)
    settings = FSDPConfig(enable_fsdp=True)
    built.sharding = apply_fsdp(built, runtime.mesh, settings, PRECISIONS["bf16_mixed"])
    ids = [[3, 1, 4, 1], [5, 9, 2]]
    samples = {"input_ids": ids, "labels": ids, "source": ["x", "x"], "desirable": [None, None]}
    check_packing(built, Dataset.from_dict(samples), 64, torch.bfloat16, runtime)
    assert len(unsharded) == len(set(unsharded)) == len(built.sharding.units)
    assert all(isinstance(parameter, DTensor) for parameter in built.model.parameters())


def test_a_model_without_units_is_not_changed(runtime: Ranks) -> None:
    plain = tiny_llama(num_hidden_layers=2).eval()
    assert len(answer(BuiltModel(plain), runtime)) == 5 + NEW_TOKENS
