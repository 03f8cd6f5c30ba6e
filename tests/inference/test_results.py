import json
from dataclasses import asdict
from pathlib import Path

import yaml
from result_files import ADAPTER, MODEL, make

from llama_ft.config.settings import Config, QuantizationConfig, TrainConfig
from llama_ft.inference.results import find_result, result_problem, settings_beside


def test_a_run_gives_its_result_and_without_one_its_checkpoints(tmp_path: Path) -> None:
    checkpoint = "checkpoints/step-000010/trainer.json"
    run = make(tmp_path / "run", checkpoint, "config.yaml")
    assert find_result(run) == ("run", run)
    assert find_result(run / "checkpoints" / "step-000010") == ("checkpoint", run / "checkpoints" / "step-000010")
    make(run / "model", *ADAPTER)
    assert find_result(run) == ("adapter", run / "model") == find_result(run / "model")
    other = make(tmp_path / "other", checkpoint, *(f"model/{file}" for file in MODEL))
    assert find_result(other) == ("model", other / "model")
    assert not result_problem(str(run)) and not result_problem(str(other)) and not result_problem("org/model")


def test_what_is_no_result_is_told(tmp_path: Path) -> None:
    make(tmp_path / "run", "checkpoints/step-000010/trainer.json")
    make(tmp_path / "bare", "adapter_config.json")
    make(tmp_path / "light", "config.json")
    make(tmp_path / "empty", "notes.txt")
    assert f"Name one of them, or the run: {tmp_path}/run." in str(result_problem(f"{tmp_path}/run/checkpoints"))
    assert "no adapter_model.safetensors" in str(result_problem(f"{tmp_path}/bare"))
    assert "no weights" in str(result_problem(f"{tmp_path}/light"))
    make(tmp_path / "lost" / "model", "model.safetensors")
    make(tmp_path / "stray", "adapter_model.safetensors")
    assert result_problem(f"{tmp_path}/lost") == "holds model/model.safetensors but no config.json beside it."
    assert "adapter_model.safetensors but no adapter_config.json" in str(result_problem(f"{tmp_path}/stray"))
    assert "is neither" in str(result_problem(f"{tmp_path}/empty"))
    assert "is a file" in str(result_problem(f"{tmp_path}/empty/notes.txt"))
    assert f"Did you mean {tmp_path}/light?" in str(result_problem(f"{tmp_path}/ligth"))


def test_settings_of_the_run_stand_beside_its_result_and_in_its_checkpoints(tmp_path: Path) -> None:
    settings = asdict(Config(train=TrainConfig(seed=7), quantization=QuantizationConfig(mode="4bit")))
    run = make(tmp_path / "run", *(f"model/{file}" for file in ADAPTER))
    step = make(run / "checkpoints" / "step-000010", "trainer.json")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (step / "trainer.json").write_text(json.dumps({"config": settings}))
    for kind, held in (("run", run), ("adapter", run / "model"), ("checkpoint", step)):
        beside = settings_beside(kind, held)
        assert beside is not None and beside.train.seed == 7 and beside.quantization.mode == "4bit"
    merged = settings_beside("model", run / "model")
    assert merged is not None and merged.quantization.mode == "none"  # the bits were those of the adapter's base


def test_settings_that_are_not_ours_say_nothing(tmp_path: Path) -> None:
    assert settings_beside("adapter", tmp_path / "model") is None
    for text in ("train: {no_such_setting: 1}", "- a list", "{", "train: {seed: soon}"):
        (tmp_path / "config.yaml").write_text(text)
        assert settings_beside("adapter", tmp_path / "model") is None
