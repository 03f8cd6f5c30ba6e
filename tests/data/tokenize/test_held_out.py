"""The samples that a fraction keeps out of training, and the file with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from conftest import write_jsonl
from image_models import save_image_model, write_image
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import (
    DataRequest,
    MediaModel,
    TokenizedData,
    prepare,
    two_examples,
    unpaired_examples,
)
from llama_ft.errors import UserError

TEMPLATE = "template.jinja"  # one that writes tools
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
COUNT = 60  # different texts
ALPACA = [{"instruction": f"Error {n}?", "output": f"Update {n}."} for n in range(COUNT)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Error {n}?"},
            {"role": "assistant", "content": f"Update {n}."},
        ]
    }
    for n in range(COUNT)
]
PAIRS = [
    {"prompt": f"Error {n}?", "chosen": f"Update {n}.", "rejected": "No."} for n in range(COUNT)
]


def tokenized(
    dataset: Any, tokenizer: Any, cache: Path, examples: Any = None, **settings: Any
) -> TokenizedData:
    request = DataRequest(context_length=128, want_validation=True)
    if examples is not None:
        request = DataRequest(context_length=128, want_validation=True, examples=examples)
    named = str(dataset) if isinstance(dataset, Path) else dataset
    return prepare(DataConfig(dataset=named, **settings), tokenizer, request, cache)


def with_ids_in_messages(sample: dict[str, Any], copy: int) -> dict[str, Any]:
    first, second = sample["messages"]
    return {"messages": [{**first, "id": copy}, {**second, "time": copy}]}


def as_sharegpt(sample: dict[str, Any], copy: int) -> dict[str, Any]:
    first, second = sample["messages"]
    system = {} if copy else {"system": ""}
    return {
        **system,
        "id": copy,
        "conversations": [
            {"from": "human", "value": first["content"]},
            {"from": "gpt", "value": second["content"]},
        ],
    }


SAME: dict[str, tuple[Callable[[int, int], dict[str, Any]], dict[str, Any]]] = {
    "alpaca": (lambda n, copy: {**ALPACA[n], "id": copy}, {}),
    "renamed": (
        lambda n, copy: {"frage": f"Error {n}?", "antwort": f"Update {n}.", "nummer": copy},
        {"columns": ["instruction=frage", "output=antwort"]},
    ),
    "messages": (lambda n, copy: with_ids_in_messages(CHATS[n], copy), {}),
    "sharegpt": (lambda n, copy: as_sharegpt(CHATS[n], copy), {}),
    "texts": (lambda n, copy: {"text": f"Error {n}", "meta": {"id": copy}}, {}),
    "tokenized": (lambda n, copy: {"input_ids": [5, 6, n + 1], "id": copy}, {}),
    "pairs": (
        lambda n, copy: {**PAIRS[n], "score": copy},
        {"dataset_format": "preference", "examples": two_examples},
    ),
    "kto": (
        lambda n, copy: {**PAIRS[n], "score": copy},
        {"dataset_format": "unpaired_preference", "examples": unpaired_examples},
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_equal_samples_are_on_one_side_whatever_else_their_rows_have(
    kind: str, llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make, settings = SAME[kind]
    rows = [make(number, copy) for copy in range(3) for number in range(COUNT)]
    path = write_jsonl(tmp_path / "my.jsonl", rows)
    data = tokenized(path, llama3, tmp_path / "cache", validation="0.3", **settings)
    assert data.validation is not None and data.train is not None
    sides = [
        {tuple(ids) for ids in numpy_lists(split["input_ids"])}
        for split in (data.train, data.validation)
    ]
    assert all(sides) and data.report.validation is not None
    if kind != "kto":  # of KTO the second example has another completion
        assert not sides[0] & sides[1]
    assert data.leaks == ()
    assert data.report.validation.duplicates >= 2


def numpy_lists(column: Any) -> list[list[int]]:
    return [numpy.asarray(ids).tolist() for ids in column]


def test_the_split_does_not_depend_on_format_or_tokenizer(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", ALPACA)
    second = write_jsonl(tmp_path / "b.jsonl", CHATS)
    numbers = []
    for path in (first, second):
        data = tokenized(path, llama3, tmp_path / "cache", validation="0.3")
        assert data.validation is not None
        numbers.append([place.rpartition(":")[2] for place in data.validation["source"]])
    assert numbers[0] == numbers[1]


OUTPUTS: dict[str, tuple[list[list[dict[str, Any]]], dict[str, Any]]] = {
    "columns": (
        [[{"id": n, "frage": f"Error {n}?", "antwort": f"Update {n}."} for n in range(COUNT)]],
        {"columns": ["instruction=frage", "output=antwort"]},
    ),
    "an optional column that few have": (
        [
            [
                {"frage": f"Error {n}?", "output": f"Update {n}.", **({} if n else {"k": "c"})}
                for n in range(COUNT)
            ]
        ],
        {"columns": ["instruction=frage", "input=k"]},
    ),
    "guessed columns": ([[{"question": f"{n}?", "answer": f"{n}"} for n in range(COUNT)]], {}),
    "tools": (
        [
            [
                {**chat, "tools": json.dumps([{"type": "function", "function": {"name": "f"}}])}
                for chat in CHATS
            ]
        ],
        {"chat_template": TEMPLATE},
    ),
    "repaired": (
        [[{"chat": [{"role": "assistant", "content": "Hi"}, *one["messages"]]} for one in CHATS]],
        {"columns": ["messages=chat"], "repair_chats": True},
    ),
    "kto": (
        [[{"p": one["prompt"], "gut": one["chosen"], "schlecht": "No."} for one in PAIRS]],
        {
            "columns": ["prompt=p", "chosen=gut", "rejected=schlecht"],
            "dataset_format": "unpaired_preference",
            "examples": unpaired_examples,
        },
    ),
    "pairs": ([PAIRS], {"dataset_format": "preference", "examples": two_examples}),
    "a mixture of one format": ([ALPACA[:30], [{**one, "text": ""} for one in ALPACA[30:]]], {}),
    "a mixture of guessed columns": (
        [ALPACA[:30], [{"question": f"{n}?", "answer": f"{n}"} for n in range(30)]],
        {},
    ),
    "a mixture of formats": ([ALPACA[:30], CHATS[30:]], {}),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_same_settings_read_the_validation_file(
    kind: str, llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    parts, settings = OUTPUTS[kind]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(parts)]
    dataset: Any = str(files[0])
    if len(files) > 1:
        dataset = [{"path": str(file)} for file in files]
    output = tmp_path / "held.jsonl"
    cache = tmp_path / "cache"
    if "chat_template" in settings:
        (tmp_path / TEMPLATE).write_text(WITH_TOOLS)
        settings = {**settings, "chat_template": str(tmp_path / TEMPLATE)}
    written = {"validation": "0.3", "validation_output": str(output)}
    data = tokenized(dataset, llama3, cache, **settings, **written)
    again = tokenized(dataset, llama3, cache, **settings, validation=str(output))
    assert data.validation is not None and again.validation is not None
    assert len(data.validation) > 5
    if kind == "kto":  # the other completions of the estimate of KL come from other chunks
        assert len(again.validation) == len(data.validation)
        assert (
            numpy_lists(again.validation["input_ids"])[::2]
            == numpy_lists(data.validation["input_ids"])[::2]
        )
        return
    assert again.fingerprints()["validation"] == data.fingerprints()["validation"]


@pytest.mark.parametrize("other", [CHATS[0], {"prompt": "Error", "completion": " 1"}])
def test_a_mixture_with_texts_does_not_fit_into_one_file(
    llama3: PreTrainedTokenizerFast, tmp_path: Path, other: dict[str, Any]
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [other])
    second = write_jsonl(tmp_path / "b.jsonl", [{"text": f"Text {n}"} for n in range(COUNT)])
    mixture = [{"path": str(first)}, {"path": str(second)}]
    output = tmp_path / "held.jsonl"
    with pytest.raises(UserError, match="format text mixed with those of another format, which"):
        tokenized(
            mixture,
            llama3,
            tmp_path / "cache",
            validation="0.3",
            validation_output=str(output),
        )
    assert not output.exists()


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "model", "Qwen2.5-VL")


def with_images(model: Path, dataset: Path, cache: Path, **settings: Any) -> TokenizedData:
    tokenizer = AutoTokenizer.from_pretrained(model)
    model_config = AutoConfig.from_pretrained(model)
    request = DataRequest(
        context_length=256,
        want_validation=True,
        media_model=MediaModel(model, model_config, tokenizer, False),
    )
    return prepare(DataConfig(dataset=str(dataset), **settings), tokenizer, request, cache)


def test_samples_with_images_are_split_by_text_and_image_and_written_with_paths(
    image_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in range(8):
        write_image(folder / f"{name}.png", 30, 30, name % 4)  # every image twice
    rows = [
        {
            "id": number,
            "image": f"{number % 8}.png",
            "messages": [
                {"role": "user", "content": f"<image>What is it, {number % 20 // 4}?"},
                {"role": "assistant", "content": "Noise."},
            ],
        }
        for number in range(40)
    ]
    path = write_jsonl(folder / "my.jsonl", rows)
    output = tmp_path / "elsewhere" / "held.jsonl"
    cache = tmp_path / "cache"
    settings: Any = {"validation": "0.4", "validation_output": str(output)}
    data = with_images(image_model, path, cache, **settings)
    assert data.leaks == () and data.validation is not None and len(data.validation) > 3
    again = with_images(image_model, path, cache, validation=str(output))
    assert again.fingerprints()["validation"] == data.fingerprints()["validation"]
    # images whose bytes are in the data
    inside = [{**row, "image": {"bytes": (folder / row["image"]).read_bytes()}} for row in rows]
    parquet = tmp_path / "my.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(inside), parquet)
    settings["validation_output"] = str(tmp_path / "bytes.jsonl")
    of_bytes = with_images(image_model, parquet, cache, **settings)
    assert of_bytes.fingerprints()["validation"] == data.fingerprints()["validation"]
    again = with_images(image_model, path, cache, validation=str(tmp_path / "bytes.jsonl"))
    assert again.fingerprints()["validation"] == data.fingerprints()["validation"]


@pytest.mark.parametrize("training", ["text", "images"])
def test_named_validation_sets_with_and_without_images_have_the_same_columns(
    training: str, image_model: Path, tmp_path: Path
) -> None:
    write_image(tmp_path / "0.png", 30, 30, 0)
    write_jsonl(tmp_path / "text.jsonl", CHATS[:3])
    image = {"type": "image", "image": "0.png"}
    question = {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}
    chat = {"messages": [question, {"role": "assistant", "content": "Noise."}]}
    write_jsonl(tmp_path / "images.jsonl", [chat])
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in ("text", "images")}
    data = with_images(image_model, tmp_path / f"{training}.jsonl", tmp_path, validation=sets)
    assert data.media is not None and data.train is not None
    tables = [data.train, *data.validations.values()]
    assert all({"text", "media"} <= set(table.column_names) for table in tables)
    single = with_images(image_model, tmp_path / "text.jsonl", tmp_path, validation=sets["images"])
    assert single.validation is not None
    assert single.validation["input_ids"] == data.validations["images"]["input_ids"]


def test_a_named_validation_set_of_kto_may_have_one_label(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}?", "completion": "A", "label": n % 2 == 0} for n in range(8)]
    both = write_jsonl(tmp_path / "both.jsonl", rows)
    one = write_jsonl(tmp_path / "one.jsonl", rows[::2])
    settings: Any = {"dataset_format": "unpaired_preference", "examples": unpaired_examples}
    sets = {"a": str(both), "b": str(one)}
    data = tokenized(both, llama3, tmp_path / "cache", validation=sets, **settings)
    assert len(data.validations["b"]) == 2 * 4
    # The set is tokenized already, and still no training set.
    with pytest.raises(UserError, match="all 4 completions have the label True"):
        tokenized(one, llama3, tmp_path / "cache", **settings)
