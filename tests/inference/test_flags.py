import os
from pathlib import Path
from typing import Any

import pytest
from result_files import ADAPTER, MODEL, make

from llama_ft.config import Config, QuantizationConfig, TrainConfig, to_yaml
from llama_ft.config.paths import RUN_MARKER
from llama_ft.errors import UserError
from llama_ft.inference.flags import (
    columns_of_run,
    find_result,
    read_inference_flags,
    result_problem,
    settings_of_run,
)


def read(*words: str | Path) -> Any:
    return read_inference_flags([str(word) for word in words], "Ask a model.")


def test_llama_recipes_flags_name_the_model_and_the_adapter(tmp_path: Path) -> None:
    base = make(tmp_path / "base", *MODEL)
    adapter = make(tmp_path / "adapter", *ADAPTER)
    options = read("--model_name", base, "--peft_model", adapter, "--prompt", "Hi")
    assert (options.paths, options.base_model) == ([str(adapter)], str(base))
    assert read("--model-name", base, "--prompt=Hi", "--do_sample", "False").paths == [str(base)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--promt", "Hi"], "--promt is not a flag. Did you mean --prompt?"),
        (["--top_p", "2"], "--top_p 2: must be at most 1."),
        (["--base_model", "/gone"], "--base_model /gone: no such"),
        (["--chat"], "--prompt and --chat: "),
        (["second"], ". and second: cannot be combined"),
        (["--prompts", "a.json"], "--prompts a.json: no such file."),
        (["--prompts", "a.jsonl", "--output", "./link.jsonl"], "link.jsonl: exists already."),
        (
            ["--prompts", "a.jsonl", "--output", "a.jsonl/b.jsonl"],
            "--output a.jsonl/b.jsonl: ",
        ),
    ],
)
def test_invalid_values_are_reported_with_their_flag(
    flags: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(
        make(tmp_path, *MODEL, "a.jsonl", "second/config.json", "second/model.safetensors")
    )
    Path("link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(UserError) as refusal:
        read(".", *flags, *([] if "--prompts" in flags else ["--prompt", "Hi"]))
    [message] = refusal.value.messages
    assert expected in message


def test_a_run_gives_its_final_model_or_else_its_checkpoints(tmp_path: Path) -> None:
    step = "checkpoints/step-000010"
    run = make(tmp_path / "run", f"{step}/trainer.json", "config.yaml")
    assert find_result(run) == ("run", run) and find_result(run / step) == (
        "checkpoint",
        run / step,
    )
    make(run / "model", *ADAPTER)
    assert find_result(run) == ("adapter", run / "model") == find_result(run / "model")
    other = make(tmp_path / "other", f"{step}/trainer.json", *(f"model/{file}" for file in MODEL))
    assert find_result(other) == ("model", other / "model")
    assert (
        not result_problem(str(run))
        and not result_problem(str(other))
        and not result_problem("org/model")
    )
    make(tmp_path / "empty", "notes.txt")
    assert "holds no run" in str(result_problem(f"{tmp_path}/empty"))


def test_without_a_model_the_newest_run_that_has_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="MODEL is needed, since there is no run in output/"):
        read("--prompt", "Hi")
    for name, files, moment in (
        ("first", ["model/adapter_config.json", "model/adapter_model.safetensors"], 1),
        ("second", ["checkpoints/step-000010/trainer.json"], 2),
        ("empty", [], 3),  # it has saved nothing yet
    ):
        make(tmp_path / "output" / name, RUN_MARKER, "status.json", "config.yaml", *files)
        os.utime(tmp_path / "output" / name / "status.json", (moment, moment))
    assert read("--prompt", "Hi").paths == ["output/second"]
    assert "The newest run: output/second\n" in capsys.readouterr().err


def test_a_mistyped_run_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "runs" / "alpaca", RUN_MARKER, *(f"model/{file}" for file in MODEL))
    make(tmp_path / "models" / "tiny", *MODEL)
    monkeypatch.chdir(tmp_path)
    expected = "there is no run or model here."
    for name in ("runs/quickstart", "output/alpaca", "./alpaca", "a/b/c"):
        assert result_problem(name) == expected
    assert result_problem("runs/alpca") == f"{expected} Did you mean runs/alpaca?"
    assert result_problem("runs/alpaca/modle") == expected
    # these may be on the Hub
    for name in ("gpt2", "alpaca", "models/tiny", "models/other", "org/alpaca"):
        assert result_problem(name) is None
    monkeypatch.chdir(tmp_path / "runs")
    assert result_problem("alpca") == f"{expected} Did you mean alpaca?"
    assert result_problem("gpt2") is None


def test_the_settings_of_a_run_are_found_next_to_its_model_and_its_checkpoints(
    tmp_path: Path,
) -> None:
    run = make(
        tmp_path / "run",
        *(f"model/{file}" for file in ADAPTER),
        "checkpoints/step-000010/trainer.json",
    )
    settings = Config(train=TrainConfig(seed=7), quantization=QuantizationConfig(mode="4bit"))
    (run / "config.yaml").write_text(to_yaml(settings))
    for kind, held in (
        ("run", run),
        ("adapter", run / "model"),
        ("checkpoint", run / "checkpoints" / "step-000010"),
    ):
        found = settings_of_run(kind, held)
        assert found is not None
        assert found.train.seed == 7
        assert found.quantization.mode == "4bit"
    merged = settings_of_run("model", run / "model")
    # the bits were those of the adapter's base
    assert merged is not None and merged.quantization.mode == "none"
    (run / "config.yaml").write_text("train: {no_such_setting: 1}")
    assert settings_of_run("adapter", run / "model") is None


def test_a_result_of_a_run_knows_its_columns(tmp_path: Path) -> None:
    run = make(tmp_path / "run", RUN_MARKER, *(f"model/{name}" for name in MODEL))
    assert columns_of_run(str(run)) == columns_of_run("org/name") == []
    (run / "config.yaml").write_text("data: {columns: [instruction=frage, output=antwort]}")
    for place in (run, run / "model"):
        assert columns_of_run(str(place)) == ["instruction=frage", "output=antwort"]
