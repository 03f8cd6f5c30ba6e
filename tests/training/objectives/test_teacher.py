"""The pass of a teacher in one process: it is freed, and its probabilities are those of plain
Transformers."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_losses import load_model, write_tokenized
from transformers import AutoConfig, AutoTokenizer

from llama_ft.config import Config, DataConfig, ModelConfig, PreferenceConfig
from llama_ft.data import BatchLayout, DataRequest, collate, prepare
from llama_ft.errors import RunFailure
from llama_ft.models import BuiltModel, ModelRequest
from llama_ft.phases import NULL_MONITOR
from llama_ft.training import PassInputs, build_objective
from llama_ft.training.objectives.distill import Distillation


@pytest.mark.parametrize("quantization", ["none", "8bit"])
def test_a_teacher_is_freed_and_its_most_likely_tokens_are_found_in_any_batch(
    finetuning: ModuleType,
    runtime: Any,
    tiny_model: Path,
    tied_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: Any,
) -> None:
    """Of padded batches in another order, although the teacher saw packed sequences."""
    monkeypatch.setenv("LLAMA_FT_CACHE", str(tmp_path))
    parameters = list[Any]()

    def build_model(*arguments: Any) -> Any:
        built = finetuning.build_model(*arguments)
        assert not any(parameter.requires_grad for parameter in built.model.parameters())
        parameters.extend(weakref.ref(parameter) for parameter in built.model.parameters())
        return built

    settings = PreferenceConfig(
        objective="distill",
        teacher_model=str(tied_model),
        teacher_quantization=quantization,
        distill_top_k=7,
    )
    file = write_tokenized(tmp_path / "rows.jsonl", [9, 30, 12, 5, 17], seed=4)
    config = Config(
        model=ModelConfig(model_name=str(tiny_model)),
        preference=settings,
        data=DataConfig(dataset=str(file)),
    )
    config.train.precision = "fp32"
    objective = build_objective(config)
    assert isinstance(objective, Distillation)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    request = DataRequest(context_length=32, want_validation=False, examples=objective.examples)
    dataset = prepare(config.data, tokenizer, request, cache=tmp_path)
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=2, pack_length=32)
    model = ModelRequest(config, tiny_model, AutoConfig.from_pretrained(tiny_model))
    inputs = PassInputs(model, tokenizer, dataset, layout, runtime, unfinished=tmp_path)
    teaching = objective.first_pass(config)
    teaching.prepare(replace(inputs, unfinished=None), build_model, NULL_MONITOR)
    assert len(parameters) > 10 and not any(parameter() is not None for parameter in parameters)

    assert dataset.train is not None and objective.teacher is not None
    batch = collate(dataset.train, [3, 0, 4], 0)
    token_ids, log_probabilities = objective.teacher.of(batch)
    expected = []
    for ids, labels in batch.examples():
        logits = load_model(tied_model)(input_ids=ids.unsqueeze(0)).logits[0, :-1]
        expected.append(logits.log_softmax(-1)[labels[1:] != -100])
    theirs = torch.cat(expected)
    tolerance = 1e-4 if quantization == "none" else 0.3
    found = theirs.gather(1, token_ids)
    torch.testing.assert_close(log_probabilities, found, rtol=0, atol=tolerance)
    highest = theirs.topk(7).values
    torch.testing.assert_close(log_probabilities, highest, rtol=0, atol=tolerance)

    batch.input_ids[1, 2] += 1
    with pytest.raises(RunFailure, match=r"rows\.jsonl:1: .* of this sample are not stored"):
        objective.teacher.of(batch)
    teaching.complete(BuiltModel(load_model(tied_model)), tmp_path)
    assert (tmp_path / "teacher.safetensors").exists()
    assert not list((tmp_path / "teachers").iterdir())

    def build_none(*_: Any) -> Any:
        raise AssertionError("the teacher runs again")

    again = build_objective(config)
    assert isinstance(again, Distillation)
    again.first_pass(config).prepare(inputs, build_none, NULL_MONITOR)
    assert again.teacher is not None
    batch.input_ids[1, 2] -= 1
    assert again.teacher.of(batch)[1].equal(log_probabilities)
    config.train.precision = "bf16_mixed"
    with pytest.raises(AssertionError, match="runs again"):
        again.first_pass(config).prepare(inputs, build_none, NULL_MONITOR)
