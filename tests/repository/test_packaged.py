"""Packaged configs are found by name from any directory; a file of the user is preferred."""

from pathlib import Path

import pytest
from conftest import REPOSITORY

from llama_ft.config import load
from llama_ft.errors import UserError


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def origin_of_lr(config: str) -> str:
    _, origins = load([f"--config={config}"], paths=False)
    return origins["train.lr"].rpartition(":")[0]


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart.yaml", "configs/quickstart", "configs/quickstart.yaml"]
)
def test_a_packaged_config_has_a_name_and_a_path(name: str) -> None:
    assert origin_of_lr(name) == str(REPOSITORY / "configs" / "quickstart.yaml")


def test_a_file_in_the_working_directory_is_preferred(empty_directory: Path) -> None:
    (empty_directory / "quickstart.yaml").write_text("train:\n  lr: 1e-5\n")
    assert origin_of_lr("quickstart.yaml") == "quickstart.yaml"
    (empty_directory / "alpaca_lora").mkdir()
    assert origin_of_lr("alpaca_lora") == str(REPOSITORY / "examples" / "alpaca_lora.yaml")


def test_an_example_brings_its_data_and_functions_along(empty_directory: Path) -> None:
    config, _ = load(["--config=support_tickets", "--score=examples/orders.py:fields"])
    assert config.data.dataset == str(REPOSITORY / "examples/data/support_tickets.jsonl")
    assert config.train.score == f"{REPOSITORY / 'examples/orders.py'}:fields"
    own = empty_directory / "examples" / "data" / "support_tickets.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text('{"text": "Lima"}\n')
    config, _ = load(["--config=support_tickets"])
    assert config.data.dataset == "examples/data/support_tickets.jsonl"


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("quickstrat", "with similar names: quickstart."),
        ("llama3.1_8b_4bit", "with similar names: llama3.1_8b_4bit_24gb, llama3.1_8b_4bit_4gb."),
        ("examples/alpaca.yaml", "with similar names: alpaca_lora."),
        ("mine/quickstart.yaml", "with similar names: quickstart."),
        ("QUICKSTART", "with similar names: quickstart."),
        ("qwen/qwen3.5-9b", "of this model: qwen3.5_9b_4bit_24gb, qwen3.5_9b_lora_24gb."),
        ("zzzz", "neither a file nor the name of a config in configs/ or examples/."),
    ],
)
def test_a_wrong_name_ends_in_one_message_with_the_nearest_names(name: str, ending: str) -> None:
    with pytest.raises(UserError) as error:
        load([f"--config={name}"])
    [message] = error.value.messages
    assert message.startswith(f"--config {name}: no such file. ")
    assert message.endswith(ending)
