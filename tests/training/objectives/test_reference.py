"""Log-probabilities that are computed once, and found again by the tokens of an example."""

import copy
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_losses import write_pairs
from training.objectives.test_preferences import EXAMPLES, FILLER, batch, log_probabilities, made
from transformers import AutoConfig, AutoTokenizer

from llama_ft.config import Config, DataConfig, ModelConfig, PreferenceConfig
from llama_ft.data import Batch, BatchLayout, DataRequest, collate, prepare
from llama_ft.errors import RunFailure, UserError
from llama_ft.models import BuiltModel, ModelRequest, use_packed_attention
from llama_ft.phases import NULL_MONITOR
from llama_ft.training import PassInputs, build_objective
from llama_ft.training.objectives.first_pass import check_same_tokens
from llama_ft.training.objectives.reference import ReferencePass, StoredReference

FINGERPRINT = {"model": "abc", "dataset": "def", "precision": "fp32"}


@pytest.fixture
def stored(runtime: Any) -> StoredReference:
    """Of all examples, packed, by a model in training mode with dropout; a rank may also have a batch
    without examples."""
    model = made(0).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    built = BuiltModel(model)
    built.mixers = use_packed_attention(built)
    stored = StoredReference()
    stored.compute(built, [FILLER, batch(True)], runtime)
    assert model.training
    return stored


def test_each_example_has_its_log_probability_in_any_batch(
    stored: StoredReference, runtime: Any
) -> None:
    """Padded instead of packed, in another order, and with other examples: no model is asked."""
    model: Any = None
    expected = [log_probabilities(made(0), example).sum().item() for example in EXAMPLES]
    for is_packed in (True, False):
        found = stored.log_probabilities(model, batch(is_packed), runtime)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(expected, rel=1e-5)
    last = Batch(
        torch.tensor([EXAMPLES[3]]),
        torch.tensor([[-100, -100, *EXAMPLES[3][2:]]]),
        [6],
        False,
        ["x"],
    )
    assert stored.log_probabilities(model, last, runtime).tolist() == pytest.approx(
        expected[3:], rel=1e-5
    )
    assert stored.log_probabilities(model, FILLER, runtime).tolist() == [0.0]


def test_an_example_that_was_not_scored_is_an_error(stored: StoredReference, runtime: Any) -> None:
    known = batch(False)
    other = copy.deepcopy(batch(False))
    other.labels[2, 1] = other.input_ids[2, 1]  # the same tokens, one more of them in the loss
    other.locations[2] = "pairs.jsonl:3"
    stored.log_probabilities(BuiltModel(made(0)), known, runtime)
    with pytest.raises(RunFailure, match=r"pairs\.jsonl:3: .*was not computed before training"):
        stored.log_probabilities(BuiltModel(made(0)), other, runtime)


def test_the_file_holds_the_log_probabilities_bit_for_bit(
    stored: StoredReference, runtime: Any, tmp_path: Path
) -> None:
    read = StoredReference()
    file = tmp_path / "reference.safetensors"
    stored.save(file, FINGERPRINT)
    read.load(file, {name: FINGERPRINT[name] for name in ("dataset", "precision")})
    built = BuiltModel(made(0))
    before = stored.log_probabilities(built, batch(True), runtime)
    after = read.log_probabilities(built, batch(True), runtime)
    assert before.equal(after)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_equal_numbers_are_written_as_equal_bytes(stored: StoredReference, tmp_path: Path) -> None:
    """safetensors writes several texts of a header in a random order."""
    contents = set()
    for _ in range(12):
        stored.save(tmp_path / "file", FINGERPRINT)
        contents.add((tmp_path / "file").read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("name", FINGERPRINT)
def test_a_file_of_another_run_is_rejected(
    stored: StoredReference, tmp_path: Path, name: str
) -> None:
    stored.save(tmp_path / "file", FINGERPRINT)
    with pytest.raises(
        UserError, match=rf"file: .*computed with another {name}\.\n.*--reference_model"
    ):
        StoredReference().load(tmp_path / "file", {**FINGERPRINT, name: "other"})


def test_a_missing_or_corrupted_file_is_rejected(stored: StoredReference, tmp_path: Path) -> None:
    file = tmp_path / "file"
    stored.save(file, FINGERPRINT)
    content = file.read_bytes()
    damaged = {
        "absent": None,
        "text": b"{}",
        "sums": content[:-1] + bytes([content[-1] ^ 1]),
        "fingerprint": content.replace(b"abc", b"abd"),
    }
    for name, written in damaged.items():
        if written is not None:
            (tmp_path / name).write_bytes(written)
        with pytest.raises(ValueError, match=f"{name}: cannot be read as log-probabilities"):
            StoredReference().load(tmp_path / name, FINGERPRINT)


def test_a_reference_model_scores_all_examples_and_is_freed(
    finetuning: ModuleType, runtime: Any, tiny_model: Path, tied_model: Path, tmp_path: Path
) -> None:
    parameters = list[Any]()

    def build_model(*arguments: Any, **more: Any) -> Any:
        built = finetuning.build_model(*arguments, **more)
        assert not any(parameter.requires_grad for parameter in built.model.parameters())
        parameters.extend(weakref.ref(parameter) for parameter in built.model.parameters())
        return built

    settings = PreferenceConfig(objective="dpo", reference_model=str(tied_model))
    data = DataConfig(
        dataset=str(write_pairs(tmp_path / "pairs.jsonl", 9)),
        dataset_format="preference",
        validation="0.3",
    )
    config = Config(model=ModelConfig(model_name=str(tiny_model)), preference=settings, data=data)
    objective: Any = build_objective(config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    dataset = prepare(
        data,
        tokenizer,
        DataRequest(context_length=64, want_validation=True, examples=objective.examples),
        cache=tmp_path,
    )
    request = ModelRequest(config, tiny_model, AutoConfig.from_pretrained(tiny_model))
    layout = BatchLayout(data_size=1, data_rank=0, micro_batch=4, pack_length=64)
    inputs = PassInputs(request, tokenizer, dataset, layout, runtime)
    scoring = objective.first_pass(config)
    assert scoring is not None
    scoring.prepare(inputs, build_model, NULL_MONITOR)
    assert len(parameters) > 10 and not any(parameter() is not None for parameter in parameters)
    for samples in (dataset.train, dataset.validation):
        assert samples is not None
        found = objective.reference.log_probabilities(
            BuiltModel(made(0)), collate(samples, range(len(samples)), 0), runtime
        )
        assert found.isfinite().all()
        assert len(found) == len(samples) > 0
        assert (found < 0).all()
    scoring.complete(BuiltModel(made(0)), tmp_path)
    # of an attempt that ended before its first checkpoint
    count = len(parameters)
    again: Any = build_objective(config)
    inputs = replace(inputs, unfinished=tmp_path)
    ReferencePass(config, again.reference).prepare(inputs, build_model, NULL_MONITOR)
    assert len(parameters) == count
    batch = collate(samples, range(len(samples)), 0)
    assert found.equal(again.reference.log_probabilities(BuiltModel(made(0)), batch, runtime))
    config.quantization.mode = "8bit"
    ReferencePass(config, again.reference).prepare(inputs, build_model, NULL_MONITOR)
    assert len(parameters) > count


def test_a_reference_model_with_other_tokens_is_rejected(tiny_model: Path) -> None:
    ours, theirs = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    check_same_tokens("--reference_model", "base", theirs, ours)
    theirs.add_tokens(["<tool>"])
    with pytest.raises(UserError, match=r"--reference_model base: .* in 1 token \(<tool>\)"):
        check_same_tokens("--reference_model", "base", theirs, ours)
