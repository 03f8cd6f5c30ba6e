"""Columns by other names, the first samples only, repaired chats, and files as spreadsheets write
them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from llama_ft.config import DataConfig
from llama_ft.data.read.formats import chat_messages
from llama_ft.data.read.reshape import repaired, reshaped
from llama_ft.data.read.sources import Source, open_source
from llama_ft.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Source]:
    """The samples of a file, by the settings."""

    def opened(name: str, content: str | bytes, **settings: Any) -> Source:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        config = DataConfig(dataset=str(file), **settings)
        none = PreTrainedTokenizerBase()
        source = open_source(str(file), "train", config=config, tokenizer=none, cache=tmp_path)
        return reshaped(source, config, config.max_samples)

    return opened


def samples(source: Source) -> list[Any]:
    return [sample for _, sample, _ in source.formatted_samples("auto")]


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("question,answer", []),
        ("Prompt;Response", []),
        ("Frage\tAntwort", ["question=Frage", "output=Antwort"]),
    ],
)
def test_columns_are_found_by_usual_names_or_by_the_setting(
    read: Callable[..., Source], header: str, columns: list[str]
) -> None:
    delimiter = next(mark for mark in ",;\t" if mark in header)
    source = read("a.csv", f"{header}\n{delimiter.join(['Why?', 'So.'])}\n", columns=columns)
    assert samples(source) == [{"instruction": "Why?", "output": "So."}]
    assert source.sample_format("auto") == "alpaca"


@pytest.mark.parametrize("columns", [["question=Nothing"], ["nothing=a"], ["question"]])
def test_missing_and_unknown_columns_are_rejected(
    read: Callable[..., Source], columns: list[str]
) -> None:
    with pytest.raises(UserError, match="--columns"):
        read("a.jsonl", '{"a": "Why?", "b": "So."}', columns=columns)


def test_the_first_samples_and_slices_of_local_files_can_be_selected(
    read: Callable[..., Source],
) -> None:
    lines = "\n".join(json.dumps({"text": str(number)}) for number in range(9))
    assert samples(read("a.jsonl", lines, max_samples=2)) == [{"text": "0"}, {"text": "1"}]
    assert samples(read("a.jsonl", lines, dataset_split="train[3:5]")) == [
        {"text": "3"},
        {"text": "4"},
    ]
    identities = {read("a.jsonl", lines, max_samples=number).identity for number in range(3)}
    assert len(identities) == 3  # the cache must tell them apart


def test_utf_16_is_read_and_other_encodings_are_rejected_with_a_way_out(
    read: Callable[..., Source],
) -> None:
    text = "instruction,output\nWarum?,Völlig klar\n"
    assert samples(read("a.csv", text.encode("utf-16")))[0]["output"] == "Völlig klar"
    with pytest.raises(UserError, match="iconv"):
        samples(read("b.csv", text.encode("cp1252")))


def test_chats_are_repaired_to_fit_the_format() -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    chat = [
        {"from": "gpt", "value": "Welcome"}, {"from": "human", "value": "Add"}, {"from": "human", "value": "one"}, call,
        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "Two"}, {"from": "human", "value": "Bye"},
    ]  # fmt: skip
    messages = chat_messages({"conversations": repaired(chat)}, "conversations")
    assert [said["role"] for said in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0]["content"] == "Add\n\none"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert repaired([USER, ANSWER]) == [USER, ANSWER] and repaired("text") == "text"
