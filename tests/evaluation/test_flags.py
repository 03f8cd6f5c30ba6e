"""The command line of recipes/evaluate.py: resolved flags, and errors, which are all reported at
once."""

import json
from pathlib import Path

import pytest
from conftest import write_rows

from llama_ft.config import Config, to_yaml
from llama_ft.errors import UserError
from llama_ft.evaluation.flags import read_evaluate_flags


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, rows, and directories of runs with a result each."""
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "plain", "kept/model", "none/model", "other/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text('{"hidden_size": 8}')
        (tmp_path / folder / "model.safetensors").touch()
    write_rows(tmp_path / "rows.jsonl", 8)
    write_rows(tmp_path / "rows.json", 8)
    (tmp_path / "found.json").write_text("{}")
    for run, validation in {"kept": "0.25", "none": None, "other": "0.5"}.items():
        config = Config()
        config.model.model_name = "base"
        config.data.dataset = "rows.jsonl"
        config.data.validation = validation
        config.data.labels = "all"
        config.train.precision = "fp32"
        config.train.val_batch_size = 3
        (tmp_path / run / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def test_a_run_gives_its_validation_samples_and_its_precision(place: Path) -> None:
    what = read_evaluate_flags(["kept", "--base", "--labels", "completion", "--precision=bf16"], "")
    [asked] = what.models
    assert asked.run is not None and (asked.place, asked.base, asked.run.train.precision) == (
        "kept",
        "base",
        "fp32",
    )
    assert (what.config.data.dataset, what.config.data.validation, what.split) == (
        "rows.jsonl",
        "0.25",
        None,
    )
    assert (what.config.data.labels, what.config.train.val_batch_size) == ("completion", 3)
    assert what.flags.precision == "bf16" and what.samples == "the validation set of kept (0.25)"


def test_the_responses_of_samples_are_compared_after_a_run_on_their_prompts(place: Path) -> None:
    """--objective grpo reads samples of any format as prompts."""
    config = place / "kept" / "config.yaml"
    config.write_text(config.read_text().replace("dataset_format: auto", "dataset_format: prompts"))
    prompts = read_evaluate_flags(["kept"], "")
    assert prompts.models[0].run is not None
    assert prompts.models[0].run.data.dataset_format == "prompts"
    assert prompts.config.data.dataset_format == "auto"


def test_a_dataset_is_evaluated_whole_without_validation(place: Path) -> None:
    whole = read_evaluate_flags(["kept", "--dataset", "rows.jsonl"], "")
    assert (whole.samples, whole.config.data.validation) == ("all samples of rows.jsonl", None)
    named = read_evaluate_flags(["kept", "--dataset", "rows.jsonl", "--dataset_split", "train"], "")
    assert (whole.split, named.split) == ("validation", "train")
    part = read_evaluate_flags(["plain", "--dataset", "rows.jsonl", "--validation", "0.5"], "")
    assert (part.split, part.config.data.validation) == (None, "0.5")


def test_tasks_alone_need_no_samples(place: Path) -> None:
    for model in ("plain", "none"):
        what = read_evaluate_flags([model, "--tasks", "mine.yaml, hellaswag"], "")
        assert (what.samples, what.flags.tasks) == ("", ["mine.yaml", "hellaswag"])
    assert read_evaluate_flags(["kept", "--tasks", "mine.yaml"], "").samples


def test_model_and_adapter_have_their_llama_recipes_flags(place: Path) -> None:
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "gone/base/model"})
    )
    (place / "adapter" / "adapter_model.safetensors").touch()
    flags = ["--peft_model", "adapter", "--base", "--dataset", "rows.jsonl"]
    assert read_evaluate_flags([*flags, "--model_name", "base"], "").models == [
        ("adapter", None, "base")
    ]
    with pytest.raises(
        UserError, match="adapter: its base model gone/base/model: no such directory"
    ):
        read_evaluate_flags(flags, "")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["MODEL is needed"]),
        (["./kapt"], ["./kapt: there is no run or model here."]),
        (["kept", "--lables", "all"], ["--lables is not a flag. Did you mean --labels?"]),
        (["plain"], ["plain: no run with a validation set is there"]),
        (["kept", "--validation", "0.5"], ["--validation: needs --dataset"]),
        (["kept", "other"], ["The runs have different validation sets."]),
        (
            ["plain", "--base", "--dataset", "rows.jsonl"],
            ["--base: plain does not say what it was fine-tuned from."],
        ),
        (["kept", "--dataset", "row.jsonl"], ["--dataset row.jsonl: no such file."]),
        (["kept", "--output", "found.json"], ["--output found.json: exists already."]),
        (["kept", "--streaming"], ["--streaming: is for training only."]),
        (["kept", "--tasks="], ["--tasks: the value is empty."]),
        (
            ["./kapt", "--output", "base"],
            ["./kapt: there is no run or model here.", "--output base: exists already."],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_are_reported_together(
    place: Path, flags: list[str], expected: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        read_evaluate_flags(flags, "")
    messages = refusal.value.messages
    assert len(messages) == len(expected)
    assert all(
        message.startswith(beginning) for message, beginning in zip(messages, expected, strict=True)
    )
