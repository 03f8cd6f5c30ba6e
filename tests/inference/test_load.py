"""What open_model makes of what a run leaves, against transformers' and peft's own loading of the
same weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_by_hand import load, logits, save_checkpoint, tuned
from conftest import build_model

from llama_ft.config import (
    Config,
    ModelConfig,
    PeftConfig,
    QuantizationConfig,
    TrainConfig,
    to_yaml,
)
from llama_ft.errors import UserError
from llama_ft.inference.flags import InferenceFlags
from llama_ft.inference.load import LoadedModel, open_model
from llama_ft.runtime import Ranks

LORA = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 6, "lora_dropout": 0}
TEMPLATE = "{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"


def opened(place: Path, runtime: Ranks, **flags: Any) -> LoadedModel:
    return open_model(
        str(place), InferenceFlags(**{"precision": "fp32", **flags}), runtime, build_model()
    )


def settings(base: Path, **sections: Any) -> Config:
    return Config(
        model=ModelConfig(model_name=str(base)), train=TrainConfig(precision="fp32"), **sections
    )


@pytest.fixture
def full(tiny_model: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A run of full tuning with a checkpoint and no result, and its model as transformers holds
    it."""
    model = load(tiny_model)
    save_checkpoint(tmp_path / "full", tuned(model), settings(tiny_model), chat_template=TEMPLATE)
    return tmp_path / "full", model


@pytest.fixture
def adapted(tiny_model: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A finished run with LoRA, and its model as peft holds it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(tiny_model), LoraConfig(task_type="CAUSAL_LM", **LORA))
    config = settings(tiny_model, peft=PeftConfig(use_peft=True, **LORA))
    save_checkpoint(tmp_path / "lora", tuned(model), config)
    model.peft_config["default"].base_model_name_or_path = str(tiny_model)
    model.save_pretrained(tmp_path / "lora" / "model", save_embedding_layers=False)
    (tmp_path / "lora" / "config.yaml").write_text(to_yaml(config))
    return tmp_path / "lora", model.eval()


def test_a_model_directory_is_loaded_as_transformers_loads_it(
    tied_model: Path, runtime: Ranks
) -> None:
    found = opened(tied_model, runtime)
    assert torch.equal(logits(found.model), logits(load(tied_model)))
    assert not found.model.training and found.about == f"{tied_model}, fp32, cpu"


def test_a_run_without_a_final_model_gives_its_newest_checkpoint(
    full: tuple[Path, Any], runtime: Ranks
) -> None:
    run, reference = full
    found = opened(run, runtime)
    assert torch.equal(logits(found.model), logits(reference))
    assert found.tokenizer.chat_template == TEMPLATE
    assert found.model.generation_config.eos_token_id == [2, 1], (
        "config.json's, and the end of the template's turns"
    )


def test_an_adapter_is_loaded_onto_its_base_from_a_run_or_a_checkpoint(
    adapted: tuple[Path, Any], tiny_model: Path, tmp_path: Path, runtime: Ranks
) -> None:
    run, reference = adapted
    moved = shutil.copytree(run / "model", tmp_path / "moved")
    places = {
        "run": run,
        "result": run / "model",
        "checkpoint": run / "checkpoints" / "step-000012",
        "moved": moved,
    }
    for name, place in places.items():
        found = opened(place, runtime)
        torch.testing.assert_close(
            logits(found.model), logits(reference), rtol=1e-5, atol=1e-5, msg=name
        )
        assert found.about.startswith(
            f"{run / 'model' if name == 'run' else place} (with {tiny_model})"
        )
    assert not torch.allclose(logits(reference), logits(load(tiny_model)), atol=1e-2)

    elsewhere = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    settings_file = moved / "adapter_config.json"
    lost = json.loads(settings_file.read_text()) | {"base_model_name_or_path": "/gone/model"}
    settings_file.write_text(json.dumps(lost))
    found = opened(moved, runtime, base_model=str(elsewhere))
    torch.testing.assert_close(logits(found.model), logits(reference), rtol=1e-5, atol=1e-5)


def test_an_adapter_is_used_with_the_quantization_of_its_run(
    adapted: tuple[Path, Any], tiny_model: Path, runtime: Ranks
) -> None:
    run, reference = adapted
    config = settings(
        tiny_model,
        peft=PeftConfig(use_peft=True, **LORA),
        quantization=QuantizationConfig(mode="8bit"),
    )
    (run / "config.yaml").write_text(to_yaml(config))
    as_trained, plain, asked = (
        opened(run, runtime, quantization=mode) for mode in (None, "none", "8bit")
    )
    assert torch.equal(logits(as_trained.model), logits(asked.model))
    assert not torch.equal(logits(as_trained.model), logits(plain.model))
    assert ", 8bit, " in as_trained.about and "bit" not in plain.about.removeprefix(str(run))
    reference.merge_and_unload().save_pretrained(run / "merged")
    merged = opened(run / "merged", runtime, tokenizer_name=str(tiny_model))
    assert torch.equal(logits(merged.model), logits(load(run / "merged"))), (
        "the run's bits are the adapter's base's"
    )


def test_a_fully_fine_tuned_checkpoint_is_quantized_from_its_own_weights(
    full: tuple[Path, Any], tiny_model: Path, runtime: Ranks
) -> None:
    run, reference = full
    reference.save_pretrained(run / "other")
    found = opened(run, runtime, quantization="8bit")
    torch.testing.assert_close(logits(found.model), logits(reference), rtol=0, atol=0.15)
    same = opened(run / "other", runtime, quantization="8bit", tokenizer_name=str(tiny_model))
    assert torch.equal(logits(found.model), logits(same.model)) and ", 8bit, " in same.about
    assert not torch.equal(logits(found.model), logits(reference))


def test_a_model_that_cannot_be_loaded_is_reported(
    adapted: tuple[Path, Any], tiny_model: Path, runtime: Ranks
) -> None:
    run, _ = adapted
    file = run / "model" / "adapter_config.json"
    good = json.loads(file.read_text())
    for changed, message in {
        ("peft_type", "PISSA"): "peft_type = PISSA is not supported here",
        ("base_model_name_or_path", "/gone"): "--base_model overrides it",
    }.items():
        file.write_text(json.dumps(good | dict([changed])))
        with pytest.raises(UserError, match=message):
            opened(run, runtime)
    with pytest.raises(UserError, match="^error: --tokenizer_name /gone: "):
        opened(tiny_model, runtime, tokenizer_name="/gone")
