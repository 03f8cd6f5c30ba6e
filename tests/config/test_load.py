"""From both sources to one configuration, with every mistake told at once."""

import os
import shlex
from pathlib import Path

import pytest

from llama_ft.config import Config, load
from llama_ft.config.dump import to_yaml


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr abc", '--lr abc: "abc" is not a number.'),
        ("--lr nan", '--lr nan: "nan" is not a number.'),
        ("--lr 0", "--lr 0: must be greater than 0."),
        ("--batch_size_training 0", "--batch_size_training 0: must be at least 1."),
        ("--num_epochs 0", "--num_epochs 0: must be at least 1."),
        ("--num_epochs 1.5", '--num_epochs 1.5: "1.5" is not a whole number.'),
        ("--train.num_epochs x", '--train.num_epochs x: "x" is not a whole number.'),
        ("--run_validation maybe", '--run_validation maybe: "maybe" is not true or false.'),
        ("--gamma 1.5 --lr_scheduler step", "--gamma 1.5: must be at most 1."),
        ("--lora_dropout 1 --use_peft", "--lora_dropout 1: must be less than 1."),
        ("--context_length 1", "--context_length 1: must be at least 2."),
        ("--lr none", '--lr none: "none" is not a number.'),
        ("--precision fp61", "--precision fp61: expected bf16_mixed, bf16_pure, fp32 or fp16. Did you mean fp16?"),
        ("--optimizer adamw", "--optimizer adamw: expected AdamW, anyprecision, AdamW8bit, SGD or Adafactor. "
                              "Did you mean AdamW?"),
        ("--use_peft --peft_method llama_adapter", "--peft_method llama_adapter: expected lora or loha."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_in_plain_words(mistakes, line: str, message: str) -> None:
    assert mistakes(*shlex.split(line)) == [message]


def test_a_wrong_choice_in_a_recipe_names_its_line_and_the_nearest_choice(mistakes, recipe) -> None:
    assert mistakes(recipe("train:\n  precision: bf61\n")) == [
        'mine.yaml:2: train.precision is "bf61"; expected bf16_mixed, bf16_pure, fp32 or fp16. Did you mean bf16_mixed?'
    ]


def test_mistakes_of_every_kind_are_told_together(mistakes, recipe) -> None:
    found = mistakes(
        recipe("train:\n  lrr: 1\n  num_epochs: 0\n  warmup_steps: 9\n"),
        "--seed", "x", "--typo_of_mine", "--max_train_step", "5", "--compile", "--use_liger",
        "--dataset", "nope.jsonl", paths=True,
    )  # fmt: skip
    assert found == [
        "mine.yaml:2: train.lrr is not a setting. Did you mean train.lr?",
        "--typo_of_mine is not a flag. --help lists them all.",
        "mine.yaml:3: train.num_epochs is 0; it must be at least 1.",
        '--seed x: "x" is not a whole number.',
        "mine.yaml:4: train.warmup_steps is 9, but training ends after 5 steps (max_train_step): lower --warmup_steps.",
        "--compile cannot be combined with use_liger: both fuse the same operations. Remove one.",
        "--dataset nope.jsonl: no such file.",
    ]


def test_no_message_shows_pydantics_words(mistakes) -> None:
    found = "\n".join(mistakes("--lr", "x", "--seed", "x", "--use_dora", "x", "--bias", "x", "--r", "0"))
    assert len(found.splitlines()) == 5
    assert "Input should" not in found and "pydantic" not in found


def test_a_rule_is_not_checked_on_a_value_that_could_not_be_read(mistakes) -> None:
    assert mistakes("--max_train_step", "x", "--warmup_steps", "50") == [
        '--max_train_step x: "x" is not a whole number.'
    ]


def test_a_misspelled_flag_brings_no_second_mistake_about_what_it_was_meant_to_set(mistakes) -> None:
    assert mistakes("--use_petf", "--r", "4") == ["--use_petf is not a flag. Did you mean --use_peft?"]


@pytest.fixture
def demo_recipe(tmp_path: Path) -> Path:
    file = tmp_path / "demo.yaml"
    file.write_text("train:\n  seed: 77\n")
    return file


@pytest.mark.parametrize("line", ["", "--enable_fsdp --low_cpu_fsdp", "--use_peft --num_epochs 1"])
def test_without_model_data_and_recipe_the_demo_recipe_is_read(demo_recipe: Path, line: str) -> None:
    config, places = load(line.split(), demo_recipe, paths=False)
    assert config.train.seed == 77
    assert places["train.seed"].endswith("demo.yaml:2")


@pytest.mark.parametrize("line", ["--model_name org/model", "--dataset mine.jsonl", "--data.dataset mine.jsonl"])
def test_with_a_model_or_data_the_demo_recipe_is_not_read(demo_recipe: Path, line: str) -> None:
    assert load(line.split(), demo_recipe, paths=False)[0].train.seed == Config().train.seed


def test_a_named_recipe_takes_the_place_of_the_demo_recipe(demo_recipe: Path, recipe) -> None:
    assert load([recipe("")], demo_recipe, paths=False)[0].train.seed == Config().train.seed


def test_the_home_directory_may_be_written_as_a_tilde() -> None:
    config, _ = load(["--output_dir=~/runs/a", "--model_name", "~/llama"], paths=False)
    assert config.checkpoint.output_dir == os.path.expanduser("~/runs/a")
    assert config.model.model_name == os.path.expanduser("~/llama")


def test_defaults_are_a_valid_configuration() -> None:
    assert load([])[0] == Config()


MIX = [{"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "split": "test"}, {"path": "c.jsonl"}]


@pytest.mark.parametrize(
    "text",
    [
        '[{"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "split": "test"}, {"path": "c.jsonl"}]',
        "[{path: a.jsonl, weight: 2.5}, {path: b.jsonl, split: test}, c.jsonl]",
    ],
)
def test_a_mix_is_read_from_flag_and_file_and_written_back(recipe, text: str) -> None:
    config, _ = load(["--dataset", text], paths=False)
    assert config.data.dataset == MIX
    below = "    - path: a.jsonl\n      weight: 2.5\n    - {path: b.jsonl, split: test}\n    - c.jsonl\n"
    assert load([recipe(f"data:\n  dataset:\n{below}")], paths=False)[0] == config
    assert load([recipe(to_yaml(config))], paths=False)[0].data == config.data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[{path: a.jsonl, weight: 0}]",
            "--dataset[0].weight is 0; expected a number greater than 0 and at most 1000.",
        ),
        (
            "[a.jsonl, {path: b.jsonl, weight: x}]",
            "--dataset[1].weight is x; expected a number greater than 0 and at most 1000.",
        ),
        (
            "[{path: a.jsonl, weight: .inf}]",
            "--dataset[0].weight is .inf; expected a number greater than 0 and at most 1000.",
        ),
        ("[{path: a, weight: 1e9}]", "--dataset[0].weight is 1e9; expected a number greater than 0 and at most 1000."),
        ("[{path: }]", "--dataset[0].path is empty; expected text."),
        ("[{path: [a, b]}]", "--dataset[0].path is a mapping; expected text."),
        ("[{path: a, wieght: 2}]", "--dataset[0].wieght is not known; a part has path, weight and split."),
        ("[{weight: 2}]", "--dataset[0].path is missing; a part has path, weight and split."),
        ("[]", "--dataset has no value; expected a name, or a list of parts with path, weight and split."),
    ],
)
def test_what_is_wrong_in_a_mix_is_told_with_its_part(mistakes, text: str, message: str) -> None:
    assert mistakes("--dataset", text) == [message]


def test_a_name_that_begins_with_a_bracket_stays_a_name() -> None:
    assert load(["--dataset", "[ab]*.jsonl"], paths=False)[0].data.dataset == "[ab]*.jsonl"


def test_a_split_of_data_without_splits_is_refused(mistakes) -> None:
    assert mistakes("--dataset", "a.jsonl", "--dataset_split", "test") == [
        "--dataset_split is test, and a.jsonl has no splits. Leave it out."
    ]
    assert mistakes("--dataset", "org/name", "--dataset_split", "test") == []


def test_eval_steps_need_data_that_may_bring_validation(mistakes) -> None:
    for dataset in ("a.jsonl.gz", "*.csv", "[a.jsonl, b.jsonl]"):
        (message,) = mistakes("--dataset", dataset, "--eval_steps", "5")
        assert message == "--eval_steps has no effect without validation data. Add validation 0.05, or a file."
    for dataset in ("org/name", "samsum", "code.py:build", "demo"):
        assert mistakes("--dataset", dataset, "--eval_steps", "5") == []
