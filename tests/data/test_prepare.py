"""From --dataset to tokenized samples: what is kept, what is said, and when the cache is used."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from conftest import write_jsonl
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig
from llama_ft.data import DataRequest, TokenizedData, prepare
from llama_ft.errors import UserError


def pairs(count: int) -> list[dict[str, str]]:
    return [{"instruction": f"Hi {number}", "output": "yes"} for number in range(count)]


def prepared(
    dataset: Path | str,
    tokenizer: Any,
    cache: Path,
    *,
    context_length: int = 64,
    want: bool = True,
    verify_cache: bool = True,
    **settings: Any,
) -> TokenizedData:
    config = DataConfig(dataset=str(dataset), **settings)
    return prepare(
        config,
        tokenizer,
        DataRequest(context_length=context_length, want_validation=want),
        cache=cache,
        verify_cache=verify_cache,
    )


def cached(cache: Path) -> set[str]:
    return {path.name for path in (cache / "tokenized").iterdir()}


def test_samples_become_tokens_labels_counts_and_locations(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(3))
    data = prepared(path, llama3, tmp_path / "cache")
    assert len(data.train) == 3
    sample = data.train[1]
    assert set(sample) == {"input_ids", "labels", "target_tokens", "group", "source", "desirable"}
    assert sample["source"] == f"{path}:2"
    assert sample["target_tokens"] == 2 == sum(label != -100 for label in sample["labels"])
    assert data.train.features["input_ids"].feature.dtype == "int32"
    assert data.validation is None
    assert data.report.chat_sample == [
        {"role": "user", "content": "Hi 0"},
        {"role": "assistant", "content": "yes"},
    ]
    assert "no validation data: --validation FILE or --validation 0.05" in data.summary
    assert data.summary[0] == f"{path}: format alpaca, columns instruction, output"
    assert data.summary[2].split() == ["training", "3", "45", "6", "15", "0", "0"]


def test_no_token_of_a_prompt_is_counted_as_in_the_loss(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", [{"prompt": f"Hi {number}"} for number in range(3)])
    for _ in range(2):  # the second time from the cache
        data = prepared(path, llama3, tmp_path / "cache", dataset_format="prompts")
        assert data.summary[1].split() == "samples tokens longest truncated skipped".split()
        assert data.summary[2].split()[:2] == ["training", "3"]
        assert data.report.train.target_tokens == 0


def test_the_first_bad_samples_are_reported_together(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    bad = {"messages": [{"role": "user", "content": "Hi"}, {"role": "asistant", "content": "yes"}]}
    good = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    }
    path = write_jsonl(
        tmp_path / "my.jsonl", [good, bad, good, '{"messages": [', *[good, bad] * 300]
    )
    with pytest.raises(UserError) as caught:
        prepared(path, llama3, tmp_path / "cache")
    second, fourth, *_, last = caught.value.messages
    # of several chunks
    assert "302 bad samples:" in last and '301 x "messages[N].role" is "asistant"' in last
    assert second.startswith(f'{path}:2: "messages[1].role" is "asistant"; expected assistant')
    assert fourth.startswith(f"{path}:4: malformed JSON") and "--skip_bad_rows" in last
    assert cached(tmp_path / "cache") == set()
    with pytest.raises(UserError) as caught:
        prepared(write_jsonl(path, [good, bad]), llama3, tmp_path / "cache")
    [message] = caught.value.messages
    # its kind would repeat it
    assert message.count("asistant") == 1 and "\n  1 bad sample.\n" in message


def test_all_skipped_samples_can_be_found_also_with_a_cache_hit(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    empty = {"instruction": "Hi", "output": ""}
    lines = [*pairs(2), *[empty] * 6, '{"instruction": ', *pairs(1), {"instruction": "x" * 9000}]
    path = write_jsonl(tmp_path / "my.jsonl", lines)
    cache = tmp_path / "cache"
    for _ in range(2):
        data = prepared(path, llama3, cache, skip_bad_rows=True)
        assert data.bad_samples is not None
        found = [json.loads(line) for line in data.bad_samples.read_text().splitlines()]
        assert [each["sample"] for each in found] == [
            f"{path}:{line}" for line in (*range(3, 10), 11)
        ]
        assert all(set(each) == {"sample", "kind", "message"} for each in found)
        assert found[6]["message"].startswith("malformed JSON: ")
        assert max(len(each["message"]) for each in found) < 600
        printed = "\n".join(data.summary)
        assert "skipped 8 bad samples, listed in bad_samples.jsonl:" in printed
        assert f"(first: {path}:3)" in printed and f"(first: {path}:9)" in printed
        assert "  6 x " in printed
    assert len(cached(cache)) == 1
    assert prepared(write_jsonl(path, pairs(3)), llama3, cache).bad_samples is None


def test_list_of_skipped_samples_is_bounded(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lines = [*pairs(2), *[{"instruction": "Hi", "output": ""}] * 10_100]
    path = write_jsonl(tmp_path / "my.jsonl", lines)
    data = prepared(path, llama3, tmp_path / "cache", skip_bad_rows=True)
    assert data.bad_samples is not None
    assert len(data.bad_samples.read_text().splitlines()) == 10_000
    assert "10,100 x " in "\n".join(data.summary)


@pytest.mark.parametrize(
    ("dataset", "validation", "settings"),
    [
        ("a.jsonl", "a.jsonl", {}),
        ("a.jsonl", "copy.jsonl", {}),
        ("a.jsonl", "a.jsonl", {"max_samples": 2}),
        ("a.jsonl", "as_chats.jsonl", {}),
        ([{"path": "a.jsonl"}, {"path": "other.jsonl"}], "a.jsonl", {}),
        ("a.jsonl", "a.jsonl", {"streaming": True}),
    ],
)
def test_training_samples_as_validation_set_are_warned_of(
    llama3: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Any,
    validation: str,
    settings: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "copy.jsonl"):
        write_jsonl(Path(name), pairs(4))
    write_jsonl(Path("other.jsonl"), pairs(5))
    asked = [{"role": "user", "content": "Hi 0"}, {"role": "assistant", "content": "yes"}]
    chats = [[{**asked[0], "content": f"Hi {number}"}, asked[1]] for number in range(4)]
    write_jsonl(Path("as_chats.jsonl"), [{"messages": chat} for chat in chats])

    def warnings(validation: str | None) -> tuple[str, ...]:
        config = DataConfig(dataset=dataset, validation=validation, **settings)
        data = prepare(
            config, llama3, DataRequest(context_length=64, want_validation=True), cache=tmp_path
        )
        assert set(data.leaks) <= set(data.facts()["warnings"])
        return data.leaks

    (warning,) = warnings(validation)
    assert "the validation set has the training samples" in warning
    partly = warnings("other.jsonl" if dataset == "a.jsonl" else "as_chats.jsonl")
    if settings.get("streaming"):
        assert partly == ()
    else:
        count = settings.get("max_samples", 4)
        assert partly[0].startswith(f"{count} samples of the validation set are in the training")
        assert warnings("0.5") == warnings(None) == ()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"validation": "0.9999"},
            "my.jsonl: no sample is left for train: --validation 0.9999 put 3 samples into the other split, 0 are",
        ),
        ({"validation": "0.0001"}, "my.jsonl: no sample is left for validation"),
        (
            {"context_length": 8},
            "my.jsonl: no sample is left for train: 3 are longer than --context_length 8",
        ),
        (
            {"validation": "bad.jsonl", "skip_bad_rows": True},
            "bad.jsonl: no sample is left for validation: .* 3 are bad",
        ),
    ],
)
def test_a_split_without_samples_is_rejected(
    llama3: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("bad.jsonl"), [{"instruction": "Hi", "output": ""}] * 3)
    with pytest.raises(UserError, match=text):
        prepared(write_jsonl(Path("my.jsonl"), pairs(3)), llama3, tmp_path / "cache", **settings)


def test_the_validation_fraction_does_not_depend_on_the_order_of_samples(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    samples = pairs(200)
    forward = prepared(
        write_jsonl(tmp_path / "a.jsonl", samples), llama3, tmp_path / "cache", validation="0.2"
    )
    backward = prepared(
        write_jsonl(tmp_path / "b.jsonl", samples[::-1]),
        llama3,
        tmp_path / "cache",
        validation="0.2",
    )
    assert forward.validation is not None and backward.validation is not None
    assert 20 < len(forward.validation) < 60
    assert len(forward.train) + len(forward.validation) == 200
    assert sorted(forward.validation["input_ids"]) == sorted(backward.validation["input_ids"])
    unwanted = prepared(
        tmp_path / "a.jsonl", llama3, tmp_path / "cache", validation="0.2", want=False
    )
    assert unwanted.validation is None
    assert unwanted.train["source"][:] == forward.train["source"][:]
    assert not {str(sample) for sample in forward.train["input_ids"]} & {
        str(sample) for sample in forward.validation["input_ids"]
    }


def test_formats_and_the_columns_that_are_used_and_ignored_are_printed(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    samples = [{**sample, "system": "Be brief.", "id": 1} for sample in pairs(2)]
    first = write_jsonl(tmp_path / "a.jsonl", samples)
    second = write_jsonl(tmp_path / "b.jsonl", samples)
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}]}
    ]
    third = write_jsonl(tmp_path / "c.jsonl", [{**chat, "text": "Hi", "id": 1} for chat in chats])
    mix: Any = [{"path": str(first)}, {"path": str(third)}]
    config = DataConfig(dataset=mix, validation=str(second))
    data = prepare(
        config,
        llama3,
        DataRequest(context_length=64, want_validation=True),
        cache=tmp_path / "cache",
    )
    alpaca = "format alpaca, columns instruction, output, system; ignored: id"
    assert data.summary[:3] == [
        f"{first}: {alpaca}",
        f"{third}: format messages, columns messages; ignored: id, text",
        f"{second}: {alpaca}",
    ]
    assert data.validation is not None
    assert "Be brief." in llama3.decode(data.validation[0]["input_ids"])


def test_cache_is_used_until_something_changes(
    llama3: PreTrainedTokenizerFast, chatml: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(30))
    cache = tmp_path / "cache"
    prepared(path, llama3, cache)
    (first,) = cached(cache)
    written = (cache / "tokenized" / first / "train.arrow").stat().st_mtime_ns
    llama3("Hi", truncation=True, max_length=3)  # leaves its mark in the tokenizer's backend
    prepared(path, llama3, cache, tokenize_processes=3)
    assert cached(cache) == {first}
    assert (cache / "tokenized" / first / "train.arrow").stat().st_mtime_ns == written
    variants: list[dict[str, Any]] = [
        {"context_length": 32},
        {"skip_bad_rows": True},
        {"validation": "0.2"},
        {"tokenizer": chatml},
        {"truncation": "split"},
        {"labels": "completion"},
        {"dataset_format": "alpaca"},
    ]
    for number, variant in enumerate(variants, start=2):
        prepared(path, variant.pop("tokenizer", llama3), cache, **variant)
        assert len(cached(cache)) == number
    llama3.chat_template = llama3.chat_template.replace("| trim", "")
    prepared(path, llama3, cache)
    write_jsonl(path, pairs(31))
    assert len(prepared(path, llama3, cache).train) == 31
    assert len(cached(cache)) == len(variants) + 3


@pytest.mark.parametrize("name", ["train.arrow", "validation.arrow", "meta.json", "sizes.json"])
def test_bit_flips_in_the_cache_do_not_change_the_samples(
    llama3: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(40))
    cache = tmp_path / "cache"
    monkeypatch.setattr(logging.getLogger("llama_ft"), "propagate", True)  # to caplog

    def samples() -> list[Any]:
        data = prepared(path, llama3, cache, validation="0.2", tokenize_processes=1)
        assert data.validation is not None
        return [data.train.to_list(), data.validation.to_list(), data.report]

    right = samples()
    (key,) = cached(cache)
    folder = cache / "tokenized" / key
    for flip in range(4):
        content = bytearray((folder / name).read_bytes())
        content[(len(content) - 1) * flip // 3] ^= 1 << flip
        (folder / name).write_bytes(content)
        assert samples() == right
    printed = [
        record.getMessage() for record in caplog.records if "corrupted" in record.getMessage()
    ]
    # a flip in sizes.json may change nothing but a space
    assert 2 <= len(printed) <= 4 if name == "sizes.json" else len(printed) == 4
    assert all(line.startswith(f"{folder}: ") for line in printed)
    assert cached(cache) == {key}


def test_ids_outside_the_vocabulary_are_rejected_whether_cached_or_not(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The tokenizer may be larger: what counts is which ids the samples hold."""
    tokenized = [{"input_ids": ids, "labels": ids} for ids in ([5, 6], [7, 40, 9], [40, 1])]
    path = write_jsonl(tmp_path / "my.jsonl", tokenized)
    config = DataConfig(dataset=str(tmp_path / "my.jsonl"))
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"{path}: token 40 \(.*\) is outside the model's vocabulary of 40"
        ):
            prepare(
                config,
                llama3,
                DataRequest(context_length=64, want_validation=True, vocabulary_size=40),
                cache=tmp_path,
            )
        prepare(
            config,
            llama3,
            DataRequest(context_length=64, want_validation=True, vocabulary_size=41),
            cache=tmp_path,
        )


def repeated(tokens: list[list[int]]) -> int:
    """Samples that are equal to an earlier one."""
    return len(tokens) - len({tuple(ids) for ids in tokens})


def test_exact_duplicates_are_counted_and_left_out(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    samples: list[Any] = pairs(300)
    samples += [{"instruction": "Hi 7", "output": "yes", "id": 99}]  # another column, same tokens
    samples += [{"instruction": "Hi 7", "output": "no"}, *pairs(4)]
    path = write_jsonl(tmp_path / "my.jsonl", samples)
    settings: Any = {"skip_bad_rows": True, "want": False}
    data = prepared(path, llama3, tmp_path / "cache", **settings)
    assert repeated(list(data.train["input_ids"])) == 5 == data.report.train.duplicates
    assert len(data.train) == 306
    line = "training: 5 exact duplicates of earlier samples (--deduplicate leaves them out)"
    assert line in data.summary
    fewer = prepared(path, llama3, tmp_path / "cache", deduplicate=True, **settings)
    assert "training: 5 exact duplicates of earlier samples left out" in fewer.summary
    kept = list(data.train["source"])
    gone = [f"{path}:{line}" for line in (301, 303, 304, 305, 306)]
    assert list(fewer.train["source"]) == [place for place in kept if place not in gone]
    assert fewer.report.train.samples == 301
    assert fewer.fingerprints() != data.fingerprints()


def test_copies_by_a_weight_are_not_duplicates(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", pairs(3))
    second = write_jsonl(tmp_path / "b.jsonl", pairs(5))
    mixture: Any = [{"path": str(first), "weight": 2}, {"path": str(second)}]

    def tokenized(**settings: Any) -> TokenizedData:
        request = DataRequest(context_length=64, want_validation=False)
        config = DataConfig(dataset=mixture, **settings)
        return prepare(config, llama3, request, cache=tmp_path / "cache")

    assert tokenized().report.train.duplicates == 3
    places = list(tokenized(deduplicate=True).train["source"])
    twice = [place for place in places if place.startswith(str(first))]
    assert len(twice) == 6 and len(set(twice)) == 3
    assert [place for place in places if place not in twice] == [f"{second}:4", f"{second}:5"]


def test_overlap_of_training_and_validation_is_a_warning(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    train = write_jsonl(tmp_path / "my.jsonl", pairs(40))
    others = [{"instruction": f"Hi {n}", "output": "no"} for n in range(5)]
    messages = [{"role": "user", "content": "Hi 3"}, {"role": "assistant", "content": "yes"}]
    held_out = write_jsonl(tmp_path / "held.jsonl", [*others, *pairs(2), *pairs(1)])
    data = prepared(train, llama3, tmp_path / "cache", validation=str(held_out))
    [warning] = data.leaks
    assert warning.startswith("2 samples of the validation set are in the training data, too")
    assert data.report.validation is not None and data.report.validation.duplicates == 1
    assert data.facts()["warnings"] == [warning]
    other_format = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}])
    data = prepared(train, llama3, tmp_path / "cache", validation=str(other_format))
    assert data.leaks[0].startswith("1 sample of the validation set is in")
    clean = write_jsonl(tmp_path / "clean.jsonl", others)
    assert not prepared(train, llama3, tmp_path / "cache", validation=str(clean)).leaks
    assert not prepared(train, llama3, tmp_path / "cache", validation="0.3").leaks


def test_the_samples_of_a_fraction_are_written_and_are_the_same_as_a_validation_file(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    samples = [{"question": f"Hi {n}", "answer": "yes" * (1 + n % 3)} for n in range(60)]
    path = write_jsonl(tmp_path / "my.jsonl", samples)
    output = tmp_path / "new" / "held.jsonl"
    cache = tmp_path / "cache"
    settings: Any = {"validation": "0.3", "validation_output": str(output)}
    data = prepared(path, llama3, cache, **settings)
    assert data.validation is not None and 5 < len(data.validation) < 30
    assert f"{len(data.validation)} validation samples: {output}" in data.summary
    prepared(path, llama3, cache, **settings)  # the file may exist with the same samples
    again = prepared(path, llama3, cache, validation=str(output))
    assert again.fingerprints()["validation"] == data.fingerprints()["validation"]
    written = output.read_text()
    settings["validation"] = "0.2"
    with pytest.raises(UserError, match="exists with other samples"):
        prepared(path, llama3, cache, **settings)
    assert output.read_text() == written
    assert [file.name for file in output.parent.iterdir()] == ["held.jsonl"]


def test_duplicates_are_not_written_to_the_validation_file(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Also those with other ids. Each node writes its file."""
    samples = [{"question": f"Hi {n % 30}", "answer": "yes"} for n in range(60)]
    samples += [{"question": f"Hi {n}", "answer": "yes", "id": n} for n in range(30)]
    path = write_jsonl(tmp_path / "my.jsonl", samples)
    output = tmp_path / "held.jsonl"
    settings: Any = {"validation": "0.4", "deduplicate": True}
    cache = tmp_path / "cache"
    other = prepared(path, llama3, cache, **settings)
    prepared(path, llama3, cache, **settings, validation_output=str(output), verify_cache=False)
    assert not output.exists()
    data = prepared(path, llama3, cache, **settings, validation_output=str(output))
    assert other.validation is not None and data.validation is not None
    written = [json.loads(line)["question"] for line in output.read_text().splitlines()]
    assert 3 < len(written) == len(data.validation) == len({*written})
    again = prepared(path, llama3, cache, validation=str(output))
    assert again.fingerprints()["validation"] == other.fingerprints()["validation"]


def test_named_validation_sets_are_those_of_single_files(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    train = write_jsonl(tmp_path / "my.jsonl", pairs(40))
    first = write_jsonl(tmp_path / "a.jsonl", [*pairs(3), {"instruction": "Hi", "output": "no"}])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    second = write_jsonl(tmp_path / "b.jsonl", [{"messages": messages}] * 2)
    cache = tmp_path / "cache"
    sets = {"own": str(first), "chat": str(second)}
    data = prepared(train, llama3, cache, validation=sets)
    assert data.validation is None and list(data.validations) == ["own", "chat"]
    for name, file in sets.items():
        single = prepared(train, llama3, cache, validation=file).validation
        assert single is not None
        for column in ("input_ids", "labels"):
            assert list(data.validations[name][column]) == list(single[column])
    [warning] = data.leaks
    assert warning.startswith("3 samples of the validation set own are in the training data")
    assert "chat: 1 exact duplicate of earlier samples (--deduplicate leaves them out)" in (
        data.summary
    )
    assert data.fingerprints()["validation"].startswith("own ")
    assert not prepared(train, llama3, cache, validation=sets, want=False).validations


def test_an_evaluation_reports_its_validation_sets_only(
    llama3: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "my.jsonl", pairs(3))
    own = write_jsonl(tmp_path / "own.jsonl", pairs(1))
    request = DataRequest(context_length=64, want_validation=True, evaluates=True)
    for sets, name in ((str(own), "validation"), ({"own": str(own)}, "own")):
        config = DataConfig(dataset=str(path), validation=sets)
        summary = prepare(config, llama3, request, cache=tmp_path / "cache").summary
        first_words = [line.split()[0] for line in summary]
        assert name in first_words and "training" not in first_words
    alone = prepare(DataConfig(dataset=str(path)), llama3, request, cache=tmp_path / "cache")
    assert any(line.startswith("training ") for line in alone.summary)
