"""What --dataset may name."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from llama_ft.config.sections import DataConfig
from llama_ft.data import open_source, read_rows
from llama_ft.errors import UserError

CUSTOM = """
import datasets
from dataclasses import dataclass


@dataclass
class Pair:
    text: str


def pairs(data_config, tokenizer, split):
    rows = [{"instruction": "Hi", "output": f"{split} {data_config.dataset_format} {tokenizer.eos_token}"}]
    return datasets.Dataset.from_list(rows)


def a_list(data_config, tokenizer, split):
    return [{"instruction": "Hi", "output": "yes"}]


def deep(data_config, tokenizer, split):
    return int(split)  # line 21
"""


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    path = tmp_path / "my_data.py"
    path.write_text(CUSTOM)
    return path


def opened(dataset: str, tokenizer: PreTrainedTokenizerFast, cache: Path, split: str = "train") -> list:
    config = DataConfig(dataset=dataset)
    return list(read_rows(dataset, split, config=config, tokenizer=tokenizer, cache=cache))  # type: ignore[arg-type]


def test_function_is_called_with_config_tokenizer_and_split(
    custom: Path, llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = opened(f"{custom}:pairs", llama3, tmp_path, "validation")
    assert rows == [(f"{custom}:pairs row 1", {"instruction": "Hi", "output": "validation auto <|eot_id|>"})]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("a_list", ":a_list returned a list; expected a datasets.Dataset."),
        ("deep", ":21: deep raised ValueError: invalid literal for int() with base 10: 'train'"),
        ("pair", ": there is no function pair. Did you mean pairs?"),
        ("xyz", ": there is no function xyz. It has: Pair, pairs, a_list, deep."),
    ],
)
def test_what_is_wrong_with_a_function_is_told(
    custom: Path, llama3: PreTrainedTokenizerFast, tmp_path: Path, function: str, text: str
) -> None:
    with pytest.raises(UserError) as caught:
        opened(f"{custom}:{function}", llama3, tmp_path)
    assert caught.value.messages[0].startswith(f"{custom}{text}")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1\nraise RuntimeError('no luck')\n", ":2: cannot be imported: RuntimeError: no luck"),
        ("x = 1\n\ndef f(:\n", ":3: cannot be imported: SyntaxError: "),
        ("import no_such_library\n", ":1: cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
    ],
)
def test_file_that_cannot_be_imported_is_told(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, code: str, text: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(UserError) as caught:
        opened(f"{path}:f", llama3, tmp_path)
    assert caught.value.messages[0].startswith(f"{path}{text}")


def test_function_of_a_formatted_dataset_gives_plain_lists(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "tensors.py"
    path.write_text(
        "import datasets\n"
        "def f(config, tokenizer, split):\n"
        "    rows = [{'input_ids': [1, 2], 'labels': [1, 2]}]\n"
        "    return datasets.Dataset.from_list(rows).with_format('torch')\n"
    )
    assert opened(f"{path}:f", llama3, tmp_path)[0][1] == {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_dta.jsonl", "my_dta.jsonl: no such file. Did you mean {folder}/my_data.jsonl?"),
        ("nothing/my.jsonl", "nothing/my.jsonl: no such file."),
        ("my.txt", "my.txt: not a dataset.\nExpected demo, a file (.jsonl, .json, .csv, .parquet) or"),
        ("my_data.py", "my_data.py: which function of this file? Expected {folder}/my_data.py:function."),
        ("missing.py:f", "missing.py: no such file."),
        ("folder.csv", "folder.csv: is a folder; expected a file."),
    ],
)
def test_dataset_that_is_none_is_told(llama3: PreTrainedTokenizerFast, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "my_data.jsonl").write_text("{}")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError) as caught:
        opened(str(tmp_path / name), llama3, tmp_path)
    assert text.format(folder=tmp_path) in caught.value.messages[0]


def test_columns_are_looked_for_in_more_than_the_first_row(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"id": 1}\n{"instruction": "Hi", "output": "yes"}\n')
    source = open_source(str(path), "train", config=DataConfig(), tokenizer=llama3, cache=tmp_path)
    assert source.row_format("auto") == "alpaca"


def test_empty_file_is_told(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text("\n\n")
    source = open_source(str(path), "train", config=DataConfig(), tokenizer=llama3, cache=tmp_path)
    with pytest.raises(UserError, match="holds no rows"):
        source.row_format("auto")
