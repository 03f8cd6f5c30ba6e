"""A number of the logits, such as the token accuracy, is logged with every objective by one change."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_copy import EditedCopy
from peft import LoraConfig, get_peft_model
from training.objectives.test_preferences import batch, made

from llama_ft.config import Config, PeftConfig, PreferenceConfig
from llama_ft.config.objectives import OBJECTIVES
from llama_ft.models import BuiltModel, use_chunked_loss, use_packed_attention
from llama_ft.models.computing import chunked_loss
from llama_ft.training import build_objective
from llama_ft.training.objectives import base

WITH_LOGITS = [name for name, entry in OBJECTIVES.items() if not entry.has_score]


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"token_accuracy": (logits.argmax(-1) == targets).float()}


@pytest.mark.parametrize("name", WITH_LOGITS)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("has_adapter", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "whole"])
def test_the_token_accuracy_is_that_of_plain_transformers(
    name: str,
    is_packed: bool,
    has_adapter: bool,
    is_chunked: bool,
    runtime: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks are padded and recomputed, and references are computed in the same step: each token
    counts once."""
    monkeypatch.setattr(base, "token_numbers", accuracy)
    monkeypatch.setattr(chunked_loss, "FEWEST_POSITIONS", 4)
    for limits in ("LOGITS_AT_ONCE", "LOGITS_WITH_TRAINED_HEAD"):
        monkeypatch.setattr(chunked_loss, limits, {"cpu": 50 * 4})
    model = made(0)
    trained = batch(is_packed, name)
    right = total = 0
    examples = trained.examples()[:: 2 if name == "kto" else 1]
    for number, (ids, labels) in enumerate(examples):
        if name == "orpo" and number % 2 == 0:  # the prompt of a chosen response, too
            labels = ids
        guesses = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].argmax(-1)
        is_target = labels[1:] != -100
        right += int((guesses == ids[1:])[is_target].sum())
        total += int(is_target.sum())
    ours = copy.deepcopy(model).train()
    if has_adapter:
        get_peft_model(ours, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    built = BuiltModel(ours)
    if is_packed:
        built.mixers = use_packed_attention(built)
    built.has_chunked_loss = is_chunked and use_chunked_loss(built)
    assert built.has_chunked_loss == is_chunked
    settings = PreferenceConfig(objective=name, distill_top_k=8)
    config = Config(preference=settings, peft=PeftConfig(use_peft=True))
    objective = build_objective(config)
    if first_pass := objective.first_pass(config):
        first_pass.fill_for_plan()  # any numbers of a teacher will do
    summed = objective.loss(built, trained, runtime)
    summed.loss.backward()
    assert summed.logged["token_accuracy"] == right
    assert summed.logged["count/token_accuracy"] == total
    sums = {key: value.item() for key, value in summed.logged.items()}
    means = base.logged_means(sums, summed.count)
    assert means["token_accuracy"] == pytest.approx(right / total)
    ours.eval()
    with torch.no_grad():
        assert "token_accuracy" not in objective.loss(built, trained, runtime).logged


def test_a_loss_function_may_return_numbers_of_its_own(runtime: Any) -> None:
    ours = made(0).train()

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> chunked_loss.TokenLoss:
        losses = chunked_loss.cross_entropy(logits, targets)
        return chunked_loss.TokenLoss(losses, {"largest": logits.detach().amax(-1)})

    whole = base.target_losses(BuiltModel(ours), batch(False), runtime.device, loss_fn)
    built = BuiltModel(ours)
    built.has_chunked_loss = use_chunked_loss(built)
    chunked = base.target_losses(built, batch(False), runtime.device, loss_fn)
    torch.testing.assert_close(chunked.sums, whole.sums)


CHECK = """
import torch
from types import SimpleNamespace
from transformers import LlamaConfig, LlamaForCausalLM
from llama_ft.data import Batch
from llama_ft.models import BuiltModel
from llama_ft.training import SupervisedFineTuning
shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=20)).train()
ids = torch.arange(10).unsqueeze(0)
summed = SupervisedFineTuning().loss(
    BuiltModel(model), Batch(ids, ids, [10], False, ["a"]), SimpleNamespace(device=ids.device)
)
assert 0 <= summed.logged["token_accuracy"] <= summed.logged["count/token_accuracy"] == 9
"""


@pytest.mark.slow
def test_the_token_accuracy_is_added_by_changing_at_most_two_files(tmp_path: Path) -> None:
    edited = EditedCopy(tmp_path)
    added = 'return {"token_accuracy": (logits.argmax(-1) == targets).float()}'
    file = "src/llama_ft/training/objectives/base.py"
    edited.replace(file, "    return {}\n", f"    {added}\n")
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    edited.run(script)
    assert len(edited.touched()) <= 2
