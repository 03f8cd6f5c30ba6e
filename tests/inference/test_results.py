import json
from dataclasses import asdict
from pathlib import Path

import yaml
from result_files import ADAPTER, MODEL, make

from llama_ft.config.settings import Config, QuantizationConfig, TrainConfig
from llama_ft.inference.results import find_result, result_problem, settings_beside


def test_a_run_gives_its_result_and_without_one_its_checkpoints(tmp_path: Path) -> None:
    step = "checkpoints/step-000010"
    run = make(tmp_path / "run", f"{step}/trainer.json", "config.yaml")
    assert find_result(run) == ("run", run) and find_result(run / step) == ("checkpoint", run / step)
    make(run / "model", *ADAPTER)
    assert find_result(run) == ("adapter", run / "model") == find_result(run / "model")
    other = make(tmp_path / "other", f"{step}/trainer.json", *(f"model/{file}" for file in MODEL))
    assert find_result(other) == ("model", other / "model")
    assert not result_problem(str(run)) and not result_problem(str(other)) and not result_problem("org/model")
    make(tmp_path / "empty", "notes.txt")
    assert "holds no run" in str(result_problem(f"{tmp_path}/empty"))
    assert f"Did you mean {tmp_path}/other?" in str(result_problem(f"{tmp_path}/othre"))


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
    (run / "config.yaml").write_text("train: {no_such_setting: 1}")
    assert settings_beside("adapter", run / "model") is None
