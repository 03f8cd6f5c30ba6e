"""Files and folders that a configuration names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ft.config.data_names import kind_of_data

Files = Callable[..., None]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Create files below the working directory; a name that ends in / is a folder."""

    def create(*names: str, text: str = "x") -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True) if name.endswith("/") else path.write_text(text)

    return create


def test_a_valid_model_dataset_and_adapter_are_accepted(errors_of, files: Files) -> None:
    files(
        "m/config.json",
        "m/model-00001-of-00002.safetensors",
        "m/tokenizer.json",
        "a.jsonl",
        "b.parquet",
    )
    files("lora/adapter_config.json", "lora/adapter_model.safetensors")
    line = "--model_name m --tokenizer_name ./m --dataset a.jsonl --validation b.parquet --use_peft"
    assert errors_of(*line.split(), "--from_peft_checkpoint", "lora", paths=True) == []


def test_a_run_or_adapter_in_place_of_a_model_is_named_with_the_right_flags(
    errors_of, files: Files, tmp_path: Path
) -> None:
    files("lora/.llama_ft-run", "lora/model/adapter_model.safetensors", "full/.llama_ft-run")
    files("full/model/config.json", "full/model/model.safetensors", "new/.llama_ft-run")
    files("new/checkpoints/step-000004/trainer.json")
    (tmp_path / "lora" / "model" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "org/tiny"}'
    )
    use_adapter = "Use --model_name org/tiny --use_peft --from_peft_checkpoint lora/model."
    lines = {
        "--model_name ./lora": f"is a run; its result is an adapter. {use_adapter}",
        "--model_name ./lora/model": f"is an adapter. {use_adapter}",
        "--model_name ./full": "is a run; its result is a whole model. Use --model_name full/model.",
        "--model_name ./new": "is not a model. Make one of it: llama-ft export new OUT.",
        "--model_name ./new/checkpoints/step-000004": "llama-ft export new/checkpoints/step-000004 OUT",
        "--use_peft --from_peft_checkpoint lora": (
            "is a run; its result is an adapter. Use --from_peft_checkpoint lora/model."
        ),
        "--use_peft --from_peft_checkpoint full": "is a whole model. Use --model_name full/model.",
        "--use_peft --from_peft_checkpoint full/model": "is a whole model. Use --model_name full/model.",
        "--use_peft --from_peft_checkpoint new": "llama-ft export new OUT.",
    }
    for line, expected in lines.items():
        (message,) = errors_of(*line.split(), paths=True)
        assert expected in message, line


def test_pipes_and_devices_are_rejected_without_opening_them(
    errors_of, files: Files, tmp_path: Path
) -> None:
    files("model/config.json", "model/model.safetensors", "lora/adapter_config.json", "a.jsonl")
    os.mkfifo(tmp_path / "model" / "generation_config.json")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "zero.jinja").symlink_to("/dev/zero")
    (tmp_path / "lora" / "adapter_model.safetensors").symlink_to("/dev/zero")
    lines = {
        "--model_name model": "holds generation_config.json, which is a pipe or a device",
        "--dataset pipe.jsonl": "is a directory, a pipe or a device; expected a file.",
        "--dataset a.jsonl --validation zero.jsonl": "is a directory, a pipe or a device",
        "--chat_template zero.jinja": "is a directory, a pipe or a device",
        "--use_peft --from_peft_checkpoint lora": "holds no adapter_model.safetensors.",
    }
    for line, expected in lines.items():
        (message,) = errors_of(*line.split(), paths=True)
        assert expected in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--model_name ./modle", "--model_name ./modle: no such directory."),
        (
            "--model_name model/config.json",
            "--model_name model/config.json: is a file; expected a directory",
        ),
        ("--model_name empty", "--model_name empty: holds no config.json."),
        ("--model_name model", "--model_name model: holds no *.safetensors."),
        (
            "--use_peft --from_peft_checkpoint nope",
            "--from_peft_checkpoint nope: no such directory.",
        ),
        (
            "--use_peft --from_peft_checkpoint lora",
            "--from_peft_checkpoint lora: holds no adapter_model.safetensors.",
        ),
        (
            "--chat_template vicuna",
            "--chat_template vicuna: no such file. Built in are llama3, chatml, alpaca, mistral; ",
        ),
        ("--config data/my_dat.jsonl", "--config data/my_dat.jsonl: no such file. Did you mean "),
        (
            "--dataset data/my_dta.jsonl",
            "--dataset data/my_dta.jsonl: no such file. Did you mean data/my_data.jsonl?",
        ),
        ("--dataset empty", "--dataset empty: is a directory without data files."),
        ("--dataset data/*.csv", "--dataset data/*.csv: matches no file, or not only "),
        ("--dataset n*s.xlsx", "--dataset n*s.xlsx: matches no file, or not only "),
        (
            "--dataset notes.xlsx",
            "--dataset notes.xlsx: unknown suffix. Save it as .csv, in UTF-8.",
        ),
        ("--dataset a.tsv", "--dataset a.tsv: unknown suffix. Rename it to .csv: tabs are"),
        ("--validation 20%", "--validation 20%: expected a fraction of the samples: 0.2."),
        ("--validation 2.5%", "--validation 2.5%: expected a fraction of the samples: 0.025."),
        (
            "--validation data/my_data.jsonl,notes.xlsx",
            "--validation data/my_data.jsonl,notes.xlsx: no such file. Several validation sets",
        ),
        ("--dataset data/my_data.jsonl,nope.jsonl", "--dataset nope.jsonl: no such file."),
        ("--dataset dolly15", "--dataset dolly15: is neither data nor a built-in dataset"),
        ("--dataset code.py", "--dataset code.py: which function?"),
        ("--dataset codes.py:build", "--dataset codes.py:build: no such file."),
    ],
)
def test_each_wrong_path_has_its_message(errors_of, files: Files, line: str, expected: str) -> None:
    files(
        "model/config.json",
        "empty/",
        "lora/adapter_config.json",
        "data/my_data.jsonl",
        "notes.xlsx",
        "a.tsv",
    )
    files("code.py", text="raise SystemExit('this file was run')")
    (message,) = errors_of(*line.split(), paths=True)
    assert message.startswith(expected)


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "data/*.jsonl",
        "my.jsonl.gz",
        "org/dataset",
        "org/dataset:main",
        "samsum_dataset",
        "s3://bucket/x.jsonl",
    ],
)
def test_every_form_of_a_dataset_name_is_accepted(errors_of, files: Files, name: str) -> None:
    files("data/my_data.jsonl", "my.jsonl.gz")
    assert errors_of("--dataset", name, paths=True) == []


def test_only_files_with_a_similar_name_before_the_suffix_are_suggested(
    errors_of, files: Files
) -> None:
    files("b/roles.jsonl", "b/tickets.json", "b/.tikets.jsonl")
    assert errors_of("--dataset", "b/nope.jsonl", paths=True) == [
        "--dataset b/nope.jsonl: no such file."
    ]
    for name in ("b/tickets.jsonl", "b/tikets.json"):
        [message] = errors_of("--dataset", name, paths=True)
        assert message.endswith("no such file. Did you mean b/tickets.json?")


def test_a_secret_in_a_url_is_not_printed(errors_of) -> None:
    (message,) = errors_of(
        "--model_name", "demo", "--datset=http://me:hunter2@host/a.jsonl", "--dataset", "demo"
    )
    assert "hunter2" not in message


def test_overwrite_does_not_delete_a_dataset_of_the_mixture(errors_of, files: Files) -> None:
    files("run/.llama_ft-run", "run/status.json", "run/model/rows.jsonl", "my.jsonl")
    line = ["--dataset", "[my.jsonl, run/model/rows.jsonl]", "--output_dir", "run", "--overwrite"]
    (message,) = errors_of(*line, paths=True)
    assert (
        "--overwrite would delete run/model, which dataset run/model/rows.jsonl reads." in message
    )


def test_validation_can_name_a_split_if_the_dataset_has_splits(errors_of, files: Files) -> None:
    files("my.jsonl", "data/train.jsonl")
    for dataset in ("org/name", "data", "samsum"):
        assert errors_of("--dataset", dataset, "--validation", "test", paths=True) == []
    for dataset in ("my.jsonl", "[data]"):
        (message,) = errors_of("--dataset", dataset, "--validation", "test", paths=True)
        assert message.startswith("--validation test: ")


def test_a_local_directory_comes_before_a_built_in_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kind_of_data("alpaca") == "ready"
    (tmp_path / "alpaca").mkdir()
    assert kind_of_data("alpaca") == "folder"


@pytest.mark.parametrize(
    "line",
    [
        "--dataset ~nobody-here/a.jsonl",
        "--dataset ~nobody-here/*.jsonl",
        "--validation ~nobody-here/a.jsonl",
        "--model_name ~nobody-here/m",
        "--output_dir ~nobody-here/run",
        "--optimizer ~nobody-here/mine.py:make",
    ],
)
def test_the_home_directory_of_an_unknown_user_is_an_error(errors_of, line: str) -> None:
    flag, value = line.split()
    values = {"--model_name": "demo", "--dataset": "demo", flag: value}
    words = [word for pair in values.items() for word in pair]
    [error] = errors_of(*words, paths=True)
    assert "~nobody-here is not a user's home directory" in error
