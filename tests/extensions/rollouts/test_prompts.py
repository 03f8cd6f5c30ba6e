"""Prompts of datasets."""

from pathlib import Path
from typing import Any

import pytest
from conftest import write_jsonl
from transformers import AutoTokenizer

from llama_ft.config import DataConfig
from llama_ft.errors import UserError
from llama_ft.extensions.rollouts.prompts import DatasetPrompts, PromptTokens, read_dataset

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
USER = {"role": "user", "content": "How many?"}
RESPONSE = {"role": "assistant", "content": "Three."}


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> PromptTokens:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return PromptTokens(tokenizer, "chat", 301, 256)


def read(folder: Path, tokens: PromptTokens, rows: list[Any], **settings: Any) -> DatasetPrompts:
    file = write_jsonl(folder / "rows.jsonl", rows)
    return read_dataset(DataConfig(dataset=str(file), **settings), tokens)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"messages": [USER, RESPONSE]},
        {"conversations": [{"from": "human", "value": "How many?"}]},
        {"prompt": [USER]},
        {"prompt": "How many?", "target": 3},
        {"prompt": "How many?", "completion": "Three."},
        {"instruction": "How many?", "output": "Three."},
        {"question": "How many?", "answer": "Three."},
        {"prompt": [USER], "chosen": [RESPONSE], "rejected": [{**RESPONSE, "content": "Two."}]},
    ],
)
def test_all_forms_of_a_prompt_have_the_same_tokens(
    tmp_path: Path, tokens: PromptTokens, row: dict[str, Any]
) -> None:
    [prompt] = read(tmp_path, tokens, [row]).prompts
    text = "<s>user: How many?<s>assistant: "
    assert prompt.token_ids == tokens.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt.text == "user: How many?assistant:"
    assert prompt.sample == row  # with the columns of the data
    assert "Three" not in prompt.text
    content = prompt.content
    asked = content if isinstance(content, str) else content[-1]["content"]
    assert asked == "How many?"


def test_a_model_that_was_trained_on_texts_gets_the_text(
    tmp_path: Path, tokens: PromptTokens
) -> None:
    [prompt] = read(tmp_path, tokens._replace(form="text"), [{"prompt": "How many?"}]).prompts
    ids = tokens.tokenizer("How many?", add_special_tokens=False)["input_ids"]
    assert prompt.token_ids == ids
    without = AutoTokenizer.from_pretrained(tokens.tokenizer.name_or_path)
    [prompt] = read(tmp_path, tokens._replace(tokenizer=without), [{"prompt": "How many?"}]).prompts
    assert prompt.token_ids == ids


def test_bad_samples_are_named_or_skipped(tmp_path: Path, tokens: PromptTokens) -> None:
    long = {"prompt": "How many? " * 200}
    picture = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}
    system = {"messages": [{"role": "system", "content": "Be brief."}]}
    half = {"prompt": "How \ud800 many?"}
    rows = [{"prompt": "How many?"}, long, {"other": 1}, picture, {"prompt": "Why?"}]
    rows += [{"prompt": " "}, system, half]
    with pytest.raises(UserError) as error:
        read(tmp_path, tokens, rows)
    text = str(error.value)
    assert "rows.jsonl:2: the prompt has " in text
    assert 'rows.jsonl:3: expected a column "prompt"' in text
    assert "rows.jsonl:4: it has media; rollouts are of text only." in text
    assert 'rows.jsonl:6: "prompt" is empty; expected a text or a list of messages.' in text
    assert 'rows.jsonl:7: "messages" ends with a system message; expected one of the user.' in text
    assert "rows.jsonl:8: \\ud800 is half of a character" in text
    assert "--dataset: 6 bad samples. --skip_bad_rows skips such samples." in text
    with pytest.raises(UserError, match="half of a character"):
        read(tmp_path, tokens._replace(form="text"), [half])
    prompts = read(tmp_path, tokens, rows, skip_bad_rows=True).prompts
    assert [prompt.index for prompt in prompts] == [0, 4]
    with pytest.raises(UserError, match="holds no prompts"):
        read(tmp_path, tokens, rows[1:4], skip_bad_rows=True)


def test_the_checksum_is_that_of_the_samples(tmp_path: Path, tokens: PromptTokens) -> None:
    rows = [{"prompt": "How many?", "target": 3}, {"prompt": "Why?", "target": 4}]
    first = read(tmp_path, tokens, rows).sha256
    assert read(tmp_path, tokens, rows).sha256 == first
    assert read(tmp_path, tokens, [rows[0], {**rows[1], "target": 5}]).sha256 != first
    assert read(tmp_path, tokens, rows, max_samples=1).sha256 != first
