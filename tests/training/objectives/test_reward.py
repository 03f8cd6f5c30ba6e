"""Reward models against Transformers' AutoModelForSequenceClassification and the formula, and what
is not supported."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama
from torch.nn.functional import logsigmoid
from training.objectives.test_preferences import FILLER, batch
from transformers import AutoConfig, LlamaConfig, LlamaForSequenceClassification

from llama_ft.config import Config, ModelConfig, PreferenceConfig, QuantizationConfig
from llama_ft.data import Batch
from llama_ft.errors import UserError
from llama_ft.models import (
    BuiltModel,
    build_on_meta,
    choose_head,
    choose_quantization,
    load_model_config,
    quantize_linears,
    use_packed_attention,
)
from llama_ft.models.architecture.score_head import WEIGHT, add_score
from llama_ft.models.weights.conversion import open_model_weights
from llama_ft.training.objectives.reward import RewardModeling

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
}

CENTERED = Config(preference=PreferenceConfig(objective="reward", center_rewards_coefficient=0.05))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(
        LlamaConfig(**SHAPE, initializer_range=0.3, num_labels=1, pad_token_id=0)
    )


@pytest.mark.parametrize("pad", [0, 2], ids=["padding is no token", "padded with the end token"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_loss_gradients_and_logged_scores_are_those_of_transformers(
    model: Any, runtime: Any, is_packed: bool, pad: int
) -> None:
    theirs = copy.deepcopy(model)
    padded = batch(False)
    theirs.config.pad_token_id = pad
    ids = torch.where(padded.attention_mask == 1, padded.input_ids, pad)
    ours = copy.deepcopy(theirs).train()
    scores = theirs(input_ids=ids, attention_mask=padded.attention_mask).logits[:, 0]
    chosen = scores[0::2]
    rejected = scores[1::2]
    loss = (-logsigmoid(chosen - rejected) + 0.05 * (chosen + rejected) ** 2).sum()
    loss.backward()
    add_score(ours)
    built = BuiltModel(ours, has_score=True)
    examples = Batch(ids, padded.labels, padded.example_lengths, False, padded.locations)
    if is_packed:
        built.mixers = use_packed_attention(built)
        examples = batch(True)
    summed = RewardModeling(CENTERED).loss(built, examples, runtime)
    summed.loss.backward()
    assert summed.count == 2
    torch.testing.assert_close(summed.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(summed.logged["rewards/chosen"], chosen.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        summed.logged["rewards/margins"], (chosen - rejected).sum(), rtol=1e-5, atol=1e-6
    )
    assert summed.logged["rewards/accuracies"] == (chosen > rejected).sum()
    for (name, mine), parameter in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_rank_without_pairs_adds_nothing(model: Any, runtime: Any) -> None:
    ours = copy.deepcopy(model).train()
    add_score(ours)
    summed = RewardModeling(CENTERED).loss(BuiltModel(ours, has_score=True), FILLER, runtime)
    summed.loss.backward()
    assert summed.count == summed.loss.item() == 0
    assert not any(value.item() for value in summed.logged.values())
    assert not any(parameter.grad.any() for parameter in ours.parameters())


def scored(folder: Path, **changes: Any) -> BuiltModel:
    """The skeleton of a saved model with a score head, and its config."""
    config = load_model_config(folder, False)
    vars(config).update(changes)
    choose_head(config, has_score=True)
    return build_on_meta(config, ModelConfig(model_name=str(folder)))


def head(folder: Path, skeleton: BuiltModel, seed: int) -> torch.Tensor:
    return open_model_weights(folder, skeleton, seed).source.read(WEIGHT)


def test_a_new_head_depends_on_the_seed_alone_and_a_stored_one_is_kept(
    model: Any, tmp_path: Path
) -> None:
    language_model = tiny_llama(seed=1, **SHAPE, initializer_range=0.3)
    language_model.to(torch.bfloat16).save_pretrained(tmp_path / "lm")
    skeleton = scored(tmp_path / "lm")
    first, again, other = (head(tmp_path / "lm", skeleton, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.dtype == torch.bfloat16
    assert 0.2 < first.float().std().item() < 0.4
    assert (
        open_model_weights(tmp_path / "lm", skeleton).source.tensors.keys()
        == dict(skeleton.model.named_parameters()).keys()
    )
    model.save_pretrained(tmp_path / "scored")
    assert torch.equal(
        open_model_weights(tmp_path / "scored", scored(tmp_path / "scored")).source.read(WEIGHT),
        model.score.weight,
    )
    quantization = choose_quantization(
        QuantizationConfig(mode="4bit"), skeleton.model.config, use_peft=True
    )
    assert quantization is not None
    assert quantize_linears(skeleton, quantization).unchanged == ["score"]


@pytest.mark.parametrize(
    ("config", "objective", "message"),
    [
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "sft",
            "--objective reward, or",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "dpo",
            "no LM head",
        ),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "reward",
            "reward: Gemma3ForConditionalGeneration .* not supported. It needs a text model",
        ),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "reward",
            "MambaForCausalLM .* not supported",
        ),
    ],
)
def test_unsupported_heads_are_rejected_by_name(
    config: dict[str, Any], objective: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        choose_head(AutoConfig.from_pretrained(tmp_path), objective == "reward")


def test_a_classifier_that_is_an_encoder_is_rejected(tmp_path: Path) -> None:
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match="BertForSequenceClassification"):
        scored(tmp_path)
