"""README.md keeps its word: what it shows parses, loads and works, and what it names is there."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from pages import Page, write_tickets

from llama_ft.config import load
from llama_ft.config.paths import RUN_ENTRIES
from llama_ft.config.settings import DataConfig
from llama_ft.errors import UserError

PAGE = Page("README.md")
README = PAGE.text
EXAMPLE_OF_MISTAKES = "$ python recipes/finetuning.py "
BAD = Path("configs/bad.yaml")


def test_the_mistakes_shown_are_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BAD.parent.mkdir()
    [shown] = [block for block in PAGE.blocks("text") if block.startswith(EXAMPLE_OF_MISTAKES)]
    command, _, printed = shown.partition("\n")
    BAD.write_text("train:\n  learning_rate: 1e-4\n  num_epochs: 0\n")
    with pytest.raises(UserError) as refusal:
        load(shlex.split(command.removeprefix(EXAMPLE_OF_MISTAKES)), paths=False)
    assert str(refusal.value) == printed.rstrip("\n")


def prepared(dataset: str, save_tokenizer: Callable[..., Path], tmp_path: Path) -> Any:
    from llama_ft.data import prepare
    from llama_ft.models import load_tokenizer

    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer"), trust_remote_code=False)
    config = DataConfig(dataset=dataset)
    return prepare(config, tokenizer, context_length=128, cache=tmp_path / "cache", want_validation=True)


def test_the_custom_dataset_works(
    save_tokenizer: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tickets(tmp_path)
    data = prepared("my_dataset.py:tickets", save_tokenizer, tmp_path)
    assert (len(data.train), len(data.validation)) == (18, 2)
    assert data.chat_sample[0]["content"] == "Question 0?"


@pytest.mark.parametrize("row", [row for block in PAGE.blocks("json") for row in block.splitlines()])
def test_every_row_shown_can_be_trained_on(row: str, save_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(json.loads(row)) + "\n")
    assert len(prepared(str(path), save_tokenizer, tmp_path).train) == 1


def test_every_folder_of_the_package_is_described() -> None:
    package = REPOSITORY / "src" / "llama_ft"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    described = set(re.findall(r"^\| `(\w+)` \|", README.partition("| folder of ")[2], re.MULTILINE))
    assert described == folders


def test_every_metric_named_is_written_somewhere() -> None:
    table = README.partition("| key in `metrics.jsonl`")[2].partition("\n\n")[0]
    keys = re.findall(r"`([\w/]+)`", table)
    sources = [REPOSITORY / "recipes" / "finetuning.py", *(REPOSITORY / "src").rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    assert len(keys) >= 14
    assert not [key for key in keys if f'"{key}"' not in code]


def test_what_a_run_directory_holds_is_described() -> None:
    table = README.partition("## What a run directory holds")[2].partition("| key in ")[0]
    described = {name.partition("/")[0] for name in re.findall(r"`([\w.-]+/?[\w./-]*)`", table)}
    assert set(RUN_ENTRIES) <= described
