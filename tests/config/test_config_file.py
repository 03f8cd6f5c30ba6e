"""YAML configs: what they set, and where their errors are."""

import os
import time
from pathlib import Path

import pytest

from llama_ft.config import load


def test_a_config_sets_its_values_with_line_numbers_as_origins(write_config) -> None:
    config, places = load(
        [write_config("# mine\ntrain:\n  lr: 1e-4\n\n  num_epochs: 2\npeft:\n  use_peft: yes\n")]
    )
    assert (config.train.lr, config.train.num_epochs, config.peft.use_peft) == (1e-4, 2, True)
    assert places == {
        "train.lr": "mine.yaml:3",
        "train.num_epochs": "mine.yaml:5",
        "peft.use_peft": "mine.yaml:7",
    }


def test_the_command_line_overrides_the_config(write_config) -> None:
    config, places = load([write_config("train:\n  lr: 1e-4\n  seed: 3\n"), "--lr", "2e-4"])
    assert (config.train.lr, config.train.seed) == (2e-4, 3)
    assert places == {"train.lr": "--lr", "train.seed": "mine.yaml:3"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "train:\n", "train: {}\nquantization:\n"])
def test_an_empty_config_or_section_is_accepted(write_config, text: str) -> None:
    assert load([write_config(text)])[1] == {}


def test_values_are_read_as_written_and_not_by_the_rules_of_yaml_1_1(write_config) -> None:
    text = (
        "train:\n  lr: 1e-4\n  activation_checkpointing: off\n"
        "tracking:\n  use_wandb: on\n  wandb_name: 2025-01-31\n  wandb_tags: [1e3, yes]\n"
        "data:\n  validation: 0.050\n  context_length: null\n"
    )
    config, _ = load([write_config(text)])
    assert config.train.lr == 1e-4
    assert config.train.activation_checkpointing == "off"
    assert (config.tracking.wandb_name, config.tracking.wandb_tags) == (
        "2025-01-31",
        ["1e3", "yes"],
    )
    assert (config.data.validation, config.data.context_length) == ("0.050", None)


@pytest.mark.parametrize("text", ["quantization: 4bit\n", "quantization:\n  mode: 4bit\n"])
def test_quantization_has_a_short_form(write_config, text: str) -> None:
    config, _ = load([write_config(f"{text}peft: {{use_peft: true}}\n")])
    assert config.quantization.mode == "4bit"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n\n  lrr: 1", "mine.yaml:3: train.lrr is not a setting. Did you mean train.lr?"),
        ("data:\n  lr: 1", "mine.yaml:2: data.lr is not a setting. Did you mean train.lr?"),
        (
            "train:\n  one_gpu: true",
            "mine.yaml:2: train.one_gpu, known from llama-recipes, is not used here: ",
        ),
        (
            "train:\n  groups: &g [{match: x, lr: *g}]",
            "--config mine.yaml:2: not valid YAML: an alias (*name) is",
        ),
        (
            "train: &t\n  lr: [*t]",
            "--config mine.yaml:1: not valid YAML: an alias (*name) is inside of its",
        ),
        ("lr: 1", "mine.yaml:1: lr is not a setting. Did you mean train.lr?"),
        ("trian:\n  lr: 1", "mine.yaml:1: trian is not a setting. Did you mean train?"),
        ("epochs: 3", "mine.yaml:1: epochs is not a setting. Did you mean train.num_epochs?"),
        (
            "peft:\n  lora_r: 16",
            "mine.yaml:2: peft.lora_r is not a setting. Did you mean peft.r?",
        ),
        (
            "log:\n  use_wandb: true",
            "mine.yaml:1: log is not a section. Its settings belong to tracking.",
        ),
        ("train: 5", "mine.yaml:1: train is a section;"),
        ("train:\n  lr: 1\n  lr: 2", "mine.yaml:3: train.lr is set twice, first in mine.yaml:2."),
        ("train:\n  lr:", "mine.yaml:2: train.lr none: must be a valid number."),
        (
            "checkpoint:\n  output_dir: ''",
            "mine.yaml:2: checkpoint.output_dir: the value is empty.",
        ),
        ("train:\n  lr: {a: 1}", "mine.yaml:2: train.lr {}: must be a valid number."),
        ("peft:\n  r: 0\n  use_peft: 1", "mine.yaml:2: peft.r 0: must be at least 1."),
        (
            "train:\n  precision: bf6",
            "mine.yaml:2: train.precision bf6: expected one of bf16_mixed, bf16_pure, ",
        ),
        ("- lr", "--config mine.yaml: a config is sections with settings"),
    ],
)
def test_each_error_in_a_config_names_its_line(
    errors_of, write_config, text: str, expected: str
) -> None:
    (message,) = errors_of(write_config(text))
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("text", "line"), [("train:\n  lr: [1\n", 3), ("train:\n\tlr: 1\n", 2), ("a: b: c\n", 1)]
)
def test_a_syntax_error_names_its_line(errors_of, write_config, text: str, line: int) -> None:
    (message,) = errors_of(write_config(text))
    assert message.startswith(f"--config mine.yaml:{line}: not valid YAML: ")
    assert "\n" not in message


def test_a_file_that_is_not_a_config_gives_one_error_and_no_further_ones(
    errors_of, tmp_path: Path
) -> None:
    """What the flags lack may have been in the file."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "model.bin").write_bytes(b"\x80\xff\x00")
    for name in ("nope.yaml", ".", "pipe.yaml", "model.bin"):
        (message,) = errors_of("--config", name, "--r", "3")
        assert message.startswith(f"--config {name}: ")


def test_thousands_of_errors_and_huge_values_are_reported_quickly(errors_of, write_config) -> None:
    """difflib alone would take minutes for all names."""
    start = time.monotonic()
    keys = "".join(f"  a_key_{number}: 1\n" for number in range(8_000))
    messages = errors_of(write_config(f"train:\n{keys}"))
    assert len(messages) == 21 and messages[-1] == "and 7,980 more errors."
    (message,) = errors_of(write_config(f"train:\n  lr: {'9x' * 50_000}\n"))
    assert len(message) < 1200 and "(100,000 characters): must be a valid number" in message
    (message,) = errors_of(write_config(f"train:\n  {'l' * 100_000}: 1\n"))
    assert len(message) < 1200
    (message,) = errors_of(write_config("# \n" * 100_000))
    assert message.startswith("--config mine.yaml: larger than 262,144 bytes")
    messages = errors_of(*(f"--a_flag_{number}=1" for number in range(5_000)))
    assert len(messages) == 21
    assert time.monotonic() - start < 60  # 4 s on an idle machine


def test_a_file_that_is_not_a_text_is_named(errors_of, tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  model_name: caf\xe9\n")
    (message,) = errors_of("--config", str(tmp_path / "latin.yaml"))
    assert message.endswith("latin.yaml: not a text in UTF-8 (byte 24).")
