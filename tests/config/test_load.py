"""Load a configuration from YAML and flags. All errors are reported at once."""

import os
import shlex
from pathlib import Path

import pytest

from llama_ft.config import Config, load, with_present_names
from llama_ft.config.reading.dump import to_yaml


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr abc", "--lr abc: must be a valid number."),
        ("--lr auto", "--lr auto: must be a valid number. Leave it out for its default."),
        (
            "--context_length auto",
            "--context_length auto: must be a valid integer. Leave it out for its default.",
        ),
        ("--lr nan", "--lr nan: must be a finite number."),
        ("--num_epochs 1.5", "--num_epochs 1.5: must be a valid integer."),
        ("--train.num_epochs 0", "--train.num_epochs 0: must be at least 1."),
        ("--run_validation maybe", "--run_validation maybe: must be a valid boolean."),
        (
            "--optimizer adamw",
            "--optimizer adamw: expected one of AdamW, anyprecision, AdamW8bit, SGD, Adafactor, or "
            "path/to/file.py:function. Did you mean AdamW?",
        ),
        (
            "--objective ppo",
            "--objective ppo: PPO is not supported. Use TRL for it, or another objective.",
        ),
    ],
)
def test_a_wrong_value_is_reported_in_plain_words(errors_of, line: str, message: str) -> None:
    assert errors_of(*shlex.split(line)) == [message]


@pytest.mark.parametrize("flag", ["--lr", "--model_name ./", "--dataset"])
def test_a_secret_key_given_as_a_value_is_not_printed(errors_of, flag: str) -> None:
    key = "hf_a1B2c3D4e5F6g7H8i9J0"
    separator = "" if flag.endswith("/") else " "
    (message,) = errors_of(*f"{flag}{separator}{key}".split(), paths=True)
    assert key not in message and "hf_***" in message


def test_errors_of_the_config_and_the_flags_are_reported_together(errors_of, write_config) -> None:
    found = errors_of(
        write_config("train:\n  lrr: 1\n  num_epochs: 0\n"),
        "--seed",
        "x",
        "--typo_of_mine",
        "--compile",
        "--use_liger",
        "--dataset",
        "nope.jsonl",
        paths=True,
    )
    assert [message.partition(" ")[0] for message in found] == [
        "mine.yaml:2:",
        "--typo_of_mine",
        "mine.yaml:3:",
        "--seed",
        "--dataset",
    ]
    found = errors_of(
        "--compile", "--use_liger", "--dataset", "nope.jsonl", paths=True
    )  # rules, once all of it is valid
    assert [message.partition(" ")[0] for message in found] == ["--compile", "--dataset"]


def test_all_invalid_values_are_reported_together(errors_of) -> None:
    wrong = "--lr -1 --peft.r 0 --validation -0.1 --block_size 96 --resume_allow_changes lrr"
    found = errors_of(*shlex.split(wrong))
    assert [message.split()[0] for message in found] == [
        "--lr",
        "--peft.r",
        "--validation",
        "--resume_allow_changes",
        "--block_size",
    ]


@pytest.mark.parametrize(
    ("line", "seed"),
    [
        ("", 77),
        ("--enable_fsdp --low_cpu_fsdp", 77),
        ("--use_peft --num_epochs 1", 77),
        ("--model_name org/model", 42),
        ("--dataset mine.jsonl", 42),
        ("--data.dataset mine.jsonl", 42),
    ],
)
def test_without_model_data_and_config_the_demo_config_is_read(
    tmp_path: Path, line: str, seed: int
) -> None:
    (tmp_path / "demo.yaml").write_text("train:\n  seed: 77\n")
    config, places = load(line.split(), tmp_path / "demo.yaml", paths=False)
    assert (config.train.seed, "train.seed" in places) == (seed, seed == 77)


def test_the_home_directory_may_be_written_as_a_tilde() -> None:
    config, _ = load(["--output_dir=~/runs/a", "--model_name", "~/llama"], paths=False)
    assert config.checkpoint.output_dir == os.path.expanduser("~/runs/a")
    assert config.model.model_name == os.path.expanduser("~/llama")


MIX = [
    {"path": "a.jsonl", "weight": 2.5},
    {"path": "b.jsonl", "split": "test"},
    {"path": "c.jsonl"},
]


@pytest.mark.parametrize(
    "text",
    [
        '[{"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "split": "test"}, {"path": "c.jsonl"}]',
        "[{path: a.jsonl, weight: 2.5}, {path: b.jsonl, split: test}, c.jsonl]",
    ],
)
def test_a_dataset_mixture_is_read_from_a_flag_or_a_file_and_written_back(
    write_config, text: str
) -> None:
    config, _ = load(["--dataset", text], paths=False)
    assert config.data.dataset == MIX
    below = "    - path: a.jsonl\n      weight: 2.5\n    - {path: b.jsonl, split: test}\n    - c.jsonl\n"
    assert load([write_config(f"data:\n  dataset:\n{below}")], paths=False)[0] == config
    assert load([write_config(to_yaml(config))], paths=False)[0].data == config.data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{path: a.jsonl, weight: 0}]", "--dataset[0].weight: must be greater than 0."),
        ("[a.jsonl, {path: b.jsonl, weight: x}]", "--dataset[1].weight: must be a valid number."),
        ("[{path: a, weight: 1e9}]", "--dataset[0].weight: must be at most 1000."),
        (
            "[{path: a, wieght: 2}]",
            "--dataset[0].wieght: expected one of path, weight, split. Did you mean weight?",
        ),
        ("[{weight: 1}]", "--dataset[0].path: is required."),
        ("[]", "--dataset: the value is empty."),
    ],
)
def test_errors_in_a_dataset_mixture_name_the_dataset(errors_of, text: str, expected: str) -> None:
    (message,) = errors_of("--dataset", text)
    assert message.startswith(expected)


def test_early_stopping_needs_data_that_can_have_a_validation_split(errors_of) -> None:
    for dataset in ("a.jsonl.gz", "*.csv", "[a.jsonl, b.jsonl]"):
        (message,) = errors_of("--dataset", dataset, "--early_stopping_patience", "5")
        assert message.startswith(
            "--early_stopping_patience has no effect without validation data."
        )
    for dataset in ("org/name", "samsum", "code.py:build", "demo"):
        assert errors_of("--dataset", dataset, "--early_stopping_patience", "5") == []


def test_settings_of_a_run_saved_with_earlier_names_are_read() -> None:
    saved = {
        "memory": {"no_plan": True},
        "preference": {"label_smoothing": 0.2},
        "train": {"lr": 1},
    }
    config = Config(**with_present_names(saved))
    assert not config.memory.plan_memory
    assert config.preference.dpo_label_smoothing == 0.2
    assert config.train.lr == 1
    assert saved["memory"] == {"no_plan": True}
    for wrong in (None, {"memory": None}):
        with pytest.raises((TypeError, ValueError)):
            with_present_names(wrong)  # type: ignore[arg-type]
