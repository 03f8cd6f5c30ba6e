"""Units stay unsharded for the length of an answer, if they fit."""

from collections.abc import Iterator

import pytest
import torch
from tiny_llama import tiny_llama
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from llama_ft.config import FSDPConfig
from llama_ft.models import BuiltModel, apply_fsdp
from llama_ft.models.sharding import kept_units
from llama_ft.models.sharding.fsdp import free_unsharded
from llama_ft.models.sharding.kept_units import units_kept_if_they_fit
from llama_ft.runtime import PRECISIONS, Ranks

NEW_TOKENS = 5


@pytest.fixture
def model(runtime: Ranks) -> LlamaForCausalLM:
    """A sharded model. Its units are cast when they are unsharded."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=3).eval()
    precision = PRECISIONS["bf16_mixed"]
    apply_fsdp(BuiltModel(model), runtime.mesh, FSDPConfig(enable_fsdp=True), precision)
    return model


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


def answer(model: LlamaForCausalLM, ranks: Ranks) -> list[int]:
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad(), units_kept_if_they_fit(model, ranks):
        tokens = model.generate(
            prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    free_unsharded(model)
    return tokens[0].tolist()


def test_units_are_unsharded_once_per_answer_if_they_fit(
    model: LlamaForCausalLM,
    unsharded: list[FSDPParamGroup],
    runtime: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kept_units, "SHARE_FOR_UNITS", 0.0)
        expected = answer(model, runtime)
    # Two layers are freed after each token. The last layer and the root stay in any case.
    assert len(unsharded) == len(set(unsharded)) + 2 * (NEW_TOKENS - 1)
    unsharded.clear()
    assert answer(model, runtime) == expected
    assert len(unsharded) == len(set(unsharded)) > 2


def test_units_are_freed_after_their_forward_pass_again(
    model: LlamaForCausalLM, runtime: Ranks
) -> None:
    answer(model, runtime)
    first, *_ = model.model.layers
    assert isinstance(first, FSDPModule)
    model(input_ids=torch.tensor([[3, 1, 4]]))
    assert all(isinstance(parameter, DTensor) for parameter in first.parameters())


def test_a_model_without_units_is_not_changed(runtime: Ranks) -> None:
    plain = tiny_llama(num_hidden_layers=2).eval()
    assert len(answer(plain, runtime)) == 5 + NEW_TOKENS
