"""Values that other programs write into samples: NaN, numbers, booleans, nulls, masks, unused keys."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from conftest import write_jsonl
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, TokenizedData, prepare
from llama_ft.data.read.formats import BadSample
from llama_ft.data.tokenize.encoder import Encoder, two_examples, unpaired_examples
from llama_ft.errors import UserError

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.get('reasoning_content', '') + m.content }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.fixture
def tokenizer(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> PreTrainedTokenizerFast:
    return make_tokenizer(["<|im_start|>", "<|im_end|>"], TEMPLATE, eos_token="<|im_end|>")


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., TokenizedData]:
    def prepare_data(dataset: Path, **settings: Any) -> TokenizedData:
        request = DataRequest(context_length=512, want_validation=False)
        config = DataConfig(dataset=str(dataset), **settings)
        return prepare(config, tokenizer, request, cache=tmp_path / "cache")

    return prepare_data


def learned(data: TokenizedData, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    assert data.train is not None
    return [
        tokenizer.decode([label for label in labels if label >= 0])
        for labels in data.train["labels"]
    ]


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ANSWER, **changes}]}


def called(**arguments: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


NAN = math.nan
# format, sample, and the place of its number that is not finite
NOT_FINITE: list[tuple[str, dict[str, Any], str]] = [
    *[("alpaca", {"instruction": "Hi", "output": number}, "output") for number in (NAN, -math.inf)],
    ("alpaca", {"instruction": NAN, "output": "yes"}, "instruction"),
    ("alpaca", {"instruction": "Hi", "input": NAN, "output": "yes"}, "input"),
    ("alpaca", {"instruction": "Hi", "output": "yes", "history": [["a", NAN]]}, "history[0][1]"),
    ("alpaca", {"instruction": "Hi", "output": "yes", "system": NAN}, "system"),
    ("alpaca", {"instruction": "Hi", "output": "yes", "tools": [{"a": NAN}]}, "tools[0].a"),
    ("messages", chat(content=NAN), "messages[1].content"),
    ("messages", chat(weight=NAN), "messages[1].weight"),
    ("messages", chat(reasoning_content=NAN), "messages[1].reasoning_content"),
    ("messages", chat(my_variable={"a": [1, math.inf]}), "messages[1].my_variable.a[1]"),
    (
        "messages",
        chat(tool_calls=called(city="Lima", days=[{"n": NAN}])),
        "messages[1].tool_calls[0].function.arguments.days[0].n",
    ),
    (
        "messages",
        chat(tool_calls=[{"function": {"name": "f", "arguments": '{"n": 1e999}'}}]),
        "messages[1].tool_calls[0].function.arguments.n",
    ),
    ("messages", {**chat(), "tools": '[{"minimum": -Infinity}]'}, "tools[0].minimum"),
    ("messages", {"messages": json.dumps([USER, {**ANSWER, "a": NAN}])}, "messages[1].a"),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": NAN}]},
        "conversations[1].value",
    ),
    ("prompt_completion", {"prompt": "Hi", "completion": NAN}, "completion"),
    ("prompt_completion", {"prompt": NAN, "completion": "yes"}, "prompt"),
    ("preference", {"prompt": "Hi", "chosen": NAN, "rejected": NAN}, "chosen"),
    ("preference", {"prompt": "Hi", "chosen": "a", "rejected": math.inf}, "rejected"),
    (
        "preference",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": NAN}]},
        "rejected[0].content",
    ),
    ("unpaired_preference", {"prompt": "Hi", "completion": NAN, "label": True}, "completion"),
    ("unpaired_preference", {"prompt": "Hi", "completion": "yes", "label": NAN}, "label"),
    ("text", {"text": NAN}, "text"),
    ("tokenized", {"input_ids": [1, NAN]}, "input_ids"),
    ("tokenized", {"input_ids": [1, 2], "labels": [1.0, 2.0]}, "labels"),
]


@pytest.mark.parametrize(("sample_format", "sample", "place"), NOT_FINITE)
def test_numbers_that_are_not_finite_are_bad_in_every_format_and_depth(
    tokenizer: PreTrainedTokenizerFast, sample_format: str, sample: dict[str, Any], place: str
) -> None:
    encoder = Encoder(tokenizer, 512)
    examples_of = {"preference": two_examples, "unpaired_preference": unpaired_examples}
    with pytest.raises(BadSample) as caught:
        if sample_format in examples_of:
            examples_of[sample_format](sample, sample_format, encoder)
        else:
            encoder.encode(sample, sample_format)
    assert str(caught.value).startswith(f'"{place}" is ')


def as_function(path: Path, frame: pandas.DataFrame) -> str:
    frame.to_pickle(path / "frame.pkl")
    path = path / "mine.py"
    path.write_text(
        "import datasets, pandas\ndef rows(*_):\n"
        f"    return datasets.Dataset.from_pandas(pandas.read_pickle({str(path.parent / 'frame.pkl')!r}))\n"
    )
    return f"{path}:rows"


def as_saved(path: Path, frame: pandas.DataFrame) -> str:
    datasets.Dataset.from_pandas(frame).save_to_disk(path / "saved")
    return str(path / "saved")


def as_file(name: str, write: Callable[[pandas.DataFrame, Path], Any]) -> Callable[..., str]:
    def written(path: Path, frame: pandas.DataFrame) -> str:
        write(frame, path / name)
        return str(path / name)

    return written


SOURCES: dict[str, Callable[[Path, pandas.DataFrame], str]] = {
    "records": as_file("a.jsonl", lambda frame, path: write_jsonl(path, frame.to_dict("records"))),
    "array": as_file("a.json", lambda f, path: path.write_text(json.dumps(f.to_dict("records")))),
    "to_json": as_file("a.jsonl.gz", lambda f, path: f.to_json(path, orient="records", lines=True)),
    "csv": as_file("a.csv", lambda frame, path: frame.to_csv(path, index=False)),
    "csv with nan": as_file("a.csv", lambda f, path: f.to_csv(path, index=False, na_rep="nan")),
    "parquet": as_file(
        "a.parquet",
        lambda frame, path: pyarrow.parquet.write_table(
            pyarrow.table(frame.to_dict("list")),  # keeps NaN
            path,
        ),
    ),
    "to_parquet": as_file("a.parquet", lambda frame, path: frame.to_parquet(path)),
    "saved": as_saved,
    "function": as_function,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_answer_of_pandas_is_never_learned_as_a_word(
    prepared: Callable[..., TokenizedData],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    source: str,
) -> None:
    frame = pandas.DataFrame({"instruction": ["Hi", "no", "Answer"], "output": [1, None, 0]})
    name = SOURCES[source](tmp_path, frame)
    data = prepared(Path(name), skip_bad_rows=True, labels="assistant")
    answers = [answer.removesuffix("<|im_end|>") for answer in learned(data, tokenizer)]
    warnings = "\n".join(data.warnings)
    if source == "csv with nan":  # it may be meant
        assert answers == ["1.0", "nan", "0.0"]
        assert '1 sample: "output" is the text nan, as which pandas' in warnings
        assert f"(first: {name} row 2)" in warnings
        return
    assert answers == ["1.0", "0.0"]
    assert data.report.bad_samples == 1
    [(kind, (_, first))] = data.report.bad_kinds.items()
    assert kind.startswith('"output" is ') and first.endswith(("row 2", ":2"))
    if source != "csv":  # text there
        assert warnings.startswith(
            '2 samples: "output" is a whole number with .0, which is trained on'
        )
        assert warnings.endswith(("row 1).", ":1)."))


def test_classes_are_read_as_text_and_booleans_as_json_has_them(
    prepared: Callable[..., TokenizedData], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    answers = [0, 7, True, False, 0.5, "true", "nano"]
    rows = [{"instruction": "Hi", "output": answer} for answer in answers]
    expected = ["0", "7", "true", "false", "0.5", "true", "nano"]
    data = prepared(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [text.removesuffix("<|im_end|>") for text in learned(data, tokenizer)] == expected
    assert data.warnings == ()


def test_null_and_missing_are_told_apart_and_columns_have_the_names_of_the_data(
    prepared: Callable[..., TokenizedData], tmp_path: Path
) -> None:
    rows = [
        {"frage": "Hi", "antwort": "yes"},
        {"frage": "Hi", "antwort": None},
        {"frage": "Hi"},
        {"frage": ["Hi"], "antwort": "yes"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as caught:
        prepared(path, columns=["instruction=frage", "output=antwort"])
    null, missing, no_text = caught.value.messages
    assert null.startswith(f'{path}:2: "antwort" is null; expected text.')
    assert missing.startswith(f'{path}:3: "antwort" is missing; expected text.')
    assert no_text.startswith(f'{path}:4: "frage" is ["Hi"]; expected text.')
    chats = [chat(), {"messages": None}, chat(content=None), {"messages": [USER, {"role": "x"}]}]
    path = write_jsonl(path, [{"dialog": row["messages"]} for row in chats])
    with pytest.raises(UserError) as caught:
        prepared(path, columns=["messages=dialog"])
    first, second, third = caught.value.messages
    assert first.startswith(f'{path}:2: "dialog" is null')
    assert second.startswith(f'{path}:3: "dialog[1].content" is null')
    assert third.startswith(f'{path}:4: "dialog[1].role" is "x"')


def test_missing_values_as_text_and_floats_of_pairs_are_warned_of(
    prepared: Callable[..., TokenizedData], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(), chat(content="NaN")])
    [warning] = prepared(path).warnings
    assert warning.startswith("1 sample: an assistant message is the text NaN, as which pandas")
    path = write_jsonl(tmp_path / "b.jsonl", [{"text": "nan"}, {"text": "nan is a bread"}])
    [warning] = prepared(path).warnings
    assert warning.startswith('1 sample: "text" is the text nan') and f"{path}:1" in warning
    path = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "Hi", "chosen": 1.0, "rejected": "no"}])
    [warning] = prepared(path, dataset_format="unpaired_preference").warnings
    assert warning.startswith('1 sample: "completion" is a whole number with .0')


IN_LOSS = [("weight", 1), ("train", True), ("loss", 1), ("loss_mask", 1.0), ("masked", False)]
NOT_IN_LOSS = [
    ("weight", 0),
    ("train", False),
    ("training", False),
    ("trainable", 0),
    ("loss", False),
    ("loss_mask", 0),
    ("masked", True),
    ("masked", 1),
]


@pytest.mark.parametrize(
    ("key", "value", "is_learned"),
    [*[(*pair, True) for pair in IN_LOSS], *[(*pair, False) for pair in NOT_IN_LOSS]],
)
@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
def test_masks_of_other_trainers_take_single_answers_out_of_the_loss(
    tokenizer: PreTrainedTokenizerFast, column: str, key: str, value: object, is_learned: bool
) -> None:
    names = ("from", "value") if column == "conversations" else ("role", "content")
    texts = [("user", "Hi"), ("assistant", "no"), ("user", "Hi"), ("assistant", "yes")]
    turns: list[dict[str, Any]] = [dict(zip(names, text, strict=True)) for text in texts]
    turns[1][key] = value
    sample: dict[str, Any] = {column: turns}
    if column == "prompt":
        sample = {"prompt": turns[:1], "completion": turns[1:]}
    sample_format = {"conversations": "sharegpt", "prompt": "prompt_completion"}.get(column, column)
    labels = Encoder(tokenizer, 512).tokenize(sample, sample_format)[1]
    found = tokenizer.decode([label for label in labels if label >= 0])
    assert found == ("no<|im_end|>" if is_learned else "") + "yes<|im_end|>"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"train": "false"}, '"messages[1].train" is "false"; expected 0 or false, 1 or true'),
        ({"masked": 2}, '"messages[1].masked" is 2; expected 0'),
        ({"loss": 0.5}, '"messages[1].loss" is 0.5; expected 0'),
        ({"loss_mask": [0, 1]}, '"messages[1].loss_mask" is [0, 1]; expected 0'),
        (
            {"train": True, "weight": 0},
            '"messages[1]" has "weight": 0 and "train": true, which contradict each other',
        ),
        ({"train": True, "masked": True}, '"messages[1]" has "train": true and "masked": true'),
        ({"reasoning_content": True}, '"messages[1].reasoning_content" is true; expected text'),
        ({"thinking": {"text": "x"}}, '"messages[1].thinking" is {"text": "x"}; expected text'),
        ({"reasoning": ["x"]}, '"messages[1].reasoning[0]" is "x"; expected text'),
    ],
)
def test_masks_that_contradict_each_other_or_are_no_masks_are_bad(
    tokenizer: PreTrainedTokenizerFast, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadSample) as caught:
        Encoder(tokenizer, 512).tokenize(chat(**keys), "messages")
    assert str(caught.value).startswith(text)


def test_parts_of_reasoning_content_are_learned_as_their_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    as_text, as_parts = (
        Encoder(tokenizer, 512).tokenize(chat(reasoning_content=reasoning), "messages")
        for reasoning in (
            "Hi no",
            [{"type": "text", "text": "Hi"}, {"type": "text", "text": " no"}],
        )
    )
    assert as_parts == as_text


def test_repaired_chats_keep_masked_answers_apart(
    prepared: Callable[..., TokenizedData], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    masked = {**ANSWER, "content": "no", "train": False}
    same = [USER, masked, masked, USER, ANSWER, {**ANSWER, "train": True}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": same}])
    assert learned(prepared(path, repair_chats=True), tokenizer) == ["yes\n\nyes<|im_end|>"]
    write_jsonl(path, [{"messages": [USER, masked, ANSWER]}])
    with pytest.raises(UserError, match="expected user or tool here"):
        prepared(path, repair_chats=True)


def test_keys_that_the_template_does_not_use_are_named_once(
    prepared: Callable[..., TokenizedData], tmp_path: Path
) -> None:
    rows = [
        chat(),
        chat(score=3, reasoning_content="x", name=None),
        {"messages": [{**USER, "id": 1, "train": True}, {**ANSWER, "score": 1, "train": True}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # also from the cache
        unused, of_user = sorted(prepared(path).warnings, reverse=True)
        assert unused == (
            '2 samples: the key "score" of assistant messages is ignored: the chat template does not use '
            f"it (first: {path}:2)."
        )
        assert of_user.startswith('1 sample: "train" is true in a message of role user. Only')


def test_nulls_that_datasets_writes_into_tool_calls_are_a_warning_with_a_way_out(
    prepared: Callable[..., TokenizedData], tmp_path: Path
) -> None:
    def tool(**properties: Any) -> list[Any]:
        parameters = {"type": "object", "properties": properties}
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    number = {"type": "number"}
    rows = [
        {**chat(tool_calls=called(city="Lima")), "tools": tool(city={"type": "string"})},
        {**chat(tool_calls=called(a=1, b=2)), "tools": tool(a=number, b=number)},
    ]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_json(tmp_path / "padded.jsonl")
    padded = prepared(tmp_path / "padded.jsonl").warnings
    for warning, what in zip(
        sorted(padded, reverse=True), ["the column tools", "the arguments of a tool"], strict=True
    ):
        assert (
            warning.startswith(f"2 samples: {what}") and "Write the samples as Parquet" in warning
        )
        assert f"(first: {tmp_path}/padded.jsonl:1)" in warning
    features = {"messages": datasets.List(datasets.Json()), "tools": datasets.List(datasets.Json())}
    typed = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    dataset.to_parquet(tmp_path / "a.parquet")
    typed.to_parquet(tmp_path / "b.parquet")
    typed.to_json(tmp_path / "c.jsonl")
    write_jsonl(tmp_path / "d.jsonl", rows)
    fingerprints = set()
    for name in ("a.parquet", "b.parquet", "c.jsonl", "d.jsonl"):
        data = prepared(tmp_path / name)
        assert data.warnings == (), name
        fingerprints.add(data.report.train.fingerprint)
    assert len(fingerprints) == 1
