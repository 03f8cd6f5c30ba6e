"""Files and folders that a configuration names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_a_good_model_data_and_adapter_pass(mistakes, files: Files) -> None:
    files("m/config.json", "m/model-00001-of-00002.safetensors", "m/tokenizer.json", "a.jsonl", "b.parquet")
    files("lora/adapter_config.json", "lora/adapter_model.safetensors")
    line = "--model_name m --tokenizer_name ./m --dataset a.jsonl --validation b.parquet --use_peft"
    assert mistakes(*line.split(), "--from_peft_checkpoint", "lora", paths=True) == []


@pytest.mark.parametrize("name", ["demo", "meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_hub_name_is_not_looked_for_on_this_machine(mistakes, name: str) -> None:
    assert mistakes("--model_name", name, "--tokenizer_name", name, paths=True) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model_name ./modle", "--model_name ./modle: no such folder. Did you mean model?"),
        ("--model_name /nowhere/m", "--model_name /nowhere/m: no such folder."),
        ("--model_name a/b/c", "--model_name a/b/c: no such folder."),
        ("--model_name model/config.json", "--model_name model/config.json: is a file; expected a folder with "
                                           "config.json and *.safetensors."),
        ("--model_name empty", "--model_name empty: holds no config.json."),
        ("--model_name run", "--model_name run: holds no config.json. Did you mean run/model?"),
        ("--model_name lora", "--model_name lora: holds an adapter, not a model. Use from_peft_checkpoint, with its "
                              "base model as model_name."),
        ("--model_name bare", "--model_name bare: holds config.json but no weights (*.safetensors)."),
        ("--model_name old", "--model_name old: holds old.bin but no *.safetensors, which are what is read here. "
                             "transformers converts it:\nAutoModelForCausalLM.from_pretrained(...).save_pretrained("
                             "folder)"),
        ("--tokenizer_name bare", "--tokenizer_name bare: holds no tokenizer (tokenizer.json, tokenizer_config.json, "
                                  "tokenizer.model, vocab.json)."),
        ("--use_peft --from_peft_checkpoint nope", "--from_peft_checkpoint nope: no such folder."),
        ("--use_peft --from_peft_checkpoint empty", "--from_peft_checkpoint empty: holds no adapter_config.json, so no "
                                                    "adapter."),
        ("--use_peft --from_peft_checkpoint lora", "--from_peft_checkpoint lora: holds no adapter_model.safetensors, "
                                                   "so no adapter."),
        ("--chat_template chatlm", "--chat_template chatlm: no such file. Did you mean chatml? "
                                   "Built in are llama3, chatml, alpaca, mistral."),
    ],
)  # fmt: skip
def test_each_wrong_folder_has_its_message(mistakes, files: Files, line: str, message: str) -> None:
    files("model/config.json", "model/a.safetensors", "empty/", "run/model/config.json", "lora/adapter_config.json")
    files("bare/config.json", "old/config.json", "old/old.bin")
    assert mistakes(*line.split(), paths=True) == [message]


FORMS = (
    "Data are .jsonl, .json, .csv (also .gz, .zst), .parquet and .arrow, folders and globs of them, hub names "
    "(org/name), and path/to/file.py:function."
)
BUILT_IN = "is neither data nor a built-in dataset (demo, samsum, grammar, alpaca)."


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("data/my_dta.jsonl", "no such file. Did you mean data/my_data.jsonl?"),
        ("other.jsonl", "no such file."),
        ("empty", f"is a folder without data files. {FORMS}"),
        ("data/*.csv", "no file matches."),
        ("n*s.xlsx", f"what notes.xlsx holds is not known. {FORMS}"),
        ("s3://bucket/rows", "is no URL of a data file; that of a folder ends in /."),
        ("a.jsonl,b.jsonl", "no such file. Several are written '[a.jsonl, b.jsonl]'."),
        ("empty.jsonl", "is empty."),
        ("notes.xlsx", f"what a .xlsx holds is not known. {FORMS}"),
        ("samsun", f"{BUILT_IN} Did you mean samsum? {FORMS}"),
        ("dolly15", f"{BUILT_IN} {FORMS}"),
        ("code.py", "which function? Write code.py:function."),
        ("codes.py:build", "no such file. Did you mean code.py?"),
    ],
)
def test_each_wrong_dataset_has_its_message(mistakes, files: Files, name: str, problem: str) -> None:
    files("data/my_data.jsonl", "notes.xlsx", "empty/")
    files("empty.jsonl", text="")
    files("code.py")
    assert mistakes("--dataset", name, paths=True) == [f"--dataset {name}: {problem}"]


@pytest.mark.parametrize(
    "name",
    ["data", "data/*.jsonl", "my.jsonl.gz", "org/dataset", "org/dataset:main", "samsum_dataset", "s3://bucket/x.jsonl"],
)
def test_what_may_be_a_dataset_is_not_refused(mistakes, files: Files, name: str) -> None:
    files("data/my_data.jsonl", "my.jsonl.gz")
    assert mistakes("--dataset", name, paths=True) == []


def test_every_part_of_a_mix_must_be_there(mistakes, files: Files) -> None:
    files("my.jsonl")
    assert mistakes("--dataset", "[my.jsonl, {path: yours.jsonl, weight: 2}]", paths=True) == [
        "--dataset: yours.jsonl: no such file."
    ]
    assert mistakes("--dataset", "[{path: my.jsonl, weight: 2}, org/name]", paths=True) == []


def test_a_secret_in_a_url_is_told_once_and_not_repeated(mistakes, files: Files) -> None:
    for url in ("http://me:hunter2@host/a.jsonl", "https://h/a?token=hunter2", "s3://me:hunter/2@bucket/a.jsonl"):
        (message,) = mistakes("--model_name", "demo", "--dataset", url, paths=True)
        assert message.startswith("--dataset has a password, key or signature in its URL") and "hunter" not in message
    (message,) = mistakes("--model_name", "demo", "--datset=http://me:hunter2@host/a.jsonl", "--dataset", "demo")
    assert "hunter2" not in message


def test_overwriting_a_run_does_not_delete_a_part_of_a_mix(mistakes, files: Files) -> None:
    files("run/.llama_ft-run", "run/status.json", "run/model/rows.jsonl", "my.jsonl")
    line = ["--dataset", "[my.jsonl, run/model/rows.jsonl]", "--output_dir", "run", "--overwrite"]
    (message,) = mistakes(*line, paths=True)
    assert "--overwrite would delete run/model, which dataset[1].path reads." in message


def test_validation_may_be_a_split_of_data_that_have_splits(mistakes, files: Files) -> None:
    files("my.jsonl", "data/train.jsonl")
    for dataset in ("org/name", "data", "samsum"):
        assert mistakes("--dataset", dataset, "--validation", "test", paths=True) == []
    for dataset in ("my.jsonl", "[data]"):
        (message,) = mistakes("--dataset", dataset, "--validation", "test", paths=True)
        assert message.endswith("As the name of a split it needs one dataset that has splits.")


def test_a_python_file_that_is_there_is_looked_into_when_it_is_imported(mistakes, files: Files) -> None:
    files("code.py", text="raise SystemExit('this file was run')")
    assert mistakes("--dataset", "code.py:nothing_of_it", paths=True) == []


def test_a_recipe_names_the_line_of_a_wrong_path(mistakes, recipe) -> None:
    assert mistakes(recipe("data:\n  dataset: my.jsonl\n"), paths=True) == [
        "mine.yaml:2: data.dataset my.jsonl: no such file."
    ]


def test_a_path_that_cannot_even_be_asked_for_is_a_mistake_and_no_crash(mistakes) -> None:
    (message,) = mistakes("--dataset", "a" * 5000 + ".jsonl", paths=True)
    assert message.endswith("cannot be looked at: File name too long.")
    messages = mistakes("--dataset", "a" * 5000 + ".jsonl", "--eval_steps", "5", paths=True)
    assert messages[1] == message and messages[0].startswith("--eval_steps has no effect without validation data.")


def test_a_pipe_and_a_link_to_nowhere_are_no_data_files(mistakes, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (message,) = mistakes("--dataset", "pipe.jsonl", paths=True)
    assert message.startswith("--dataset pipe.jsonl: is not a regular file")
    for name in ("link.jsonl", "loop.jsonl"):
        assert mistakes("--dataset", name, paths=True) == [f"--dataset {name}: no such file."]
