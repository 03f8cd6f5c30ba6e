"""What --dataset may name."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
from transformers import PreTrainedTokenizerFast

from llama_ft.config.settings.settings import DataConfig, DatasetPart
from llama_ft.data import open_source
from llama_ft.data.read.formats import BadSample
from llama_ft.data.read.sources import Source, brings_validation
from llama_ft.errors import UserError
from llama_ft.runtime import Stopped
from llama_ft.runtime.ends.exit import Stop

Opener = Callable[..., Source]


@pytest.fixture
def source_of(llama3: PreTrainedTokenizerFast, tmp_path: Path) -> Opener:
    def open_it(dataset: Any, split: str = "train", **settings: Any) -> Source:
        config = DataConfig(**{"dataset": dataset, **settings})
        return open_source(dataset, split, config=config, tokenizer=llama3, cache=tmp_path)  # type: ignore[arg-type]

    return open_it


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1\nraise RuntimeError('no luck')\n", ":2: f: RuntimeError: no luck"),
        ("def f(*_):\n    exit(0)\n", ":2: f: SystemExit: 0"),
        ("def f(*_):\n    return []\n", ":f returned a list; expected a datasets.Dataset"),
        ("x = 1\n", ": f: LookupError: no such function"),
        ("def f(*_):\n    raise GeneratorExit\n", ":2: f: GeneratorExit: "),
        ("class X(BaseException):\n    pass\nraise X('no')\n", ":3: f: X: no"),
        (
            "class X(Exception):\n    def __str__(self):\n        raise ValueError\n"
            "def f(*_):\n    raise X\n",
            ":5: f: X: (its message raises ValueError)",
        ),
    ],
)
def test_errors_of_dataset_functions_are_reported(
    source_of: Opener, tmp_path: Path, code: str, text: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(UserError) as caught:
        source_of(f"{path}:f")
    assert caught.value.messages[0].startswith(f"{path}{text}")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stopped])
def test_a_signal_that_arrives_in_a_dataset_function_stops_the_run(
    source_of: Opener, tmp_path: Path, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import builtins\ndef f(*_):\n    raise builtins.signal\n")
    signal = Stopped(Stop(143, "SIGTERM")) if kind is Stopped else KeyboardInterrupt()
    monkeypatch.setattr("builtins.signal", signal, raising=False)
    with pytest.raises(kind):
        source_of(f"{path}:f")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_data.jsonl", "no_data.jsonl: cannot be read: no such file."),
        ("my_data.jsonl", "my_data.jsonl: holds no samples."),
        ("bad.jsonl", "bad.jsonl:1: malformed JSON"),
    ],
)
def test_a_dataset_that_does_not_exist_is_reported(
    source_of: Opener, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "my_data.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text("a\n")
    with pytest.raises(UserError, match=text):
        source_of(str(tmp_path / name)).sample_format("auto")


# What is read from where: every file has samples that name it.


def write(path: Path, *texts: str, column: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return str(path)


def texts(source: Source) -> list[str]:
    return [sample["text"] for _, sample in source.read() if not isinstance(sample, BadSample)]


def test_a_directory_stands_for_all_its_data_files_in_order_of_their_names(
    source_of: Opener, tmp_path: Path
) -> None:
    write(tmp_path / "data/b.jsonl", "b")
    write(tmp_path / "data/a/z.jsonl", "a/z")
    (tmp_path / "data/c.csv").write_text("text\nc\n")
    (tmp_path / "data/LICENSE").write_text("no data")
    write(tmp_path / "data/.cache/x.jsonl", "hidden")
    source = source_of(str(tmp_path / "data"))
    assert texts(source) == ["a/z", "b", "c"]
    assert [place for place, _ in source.read()][2] == f"{tmp_path}/data/c.csv row 1"
    assert not brings_validation(str(tmp_path / "data"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
def test_files_of_a_cloned_dataset_that_hold_no_samples_are_left_out(
    source_of: Opener, tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    file = folder / f"data/train-00000-of-00001.{suffix}"
    file.parent.mkdir()
    if suffix == "parquet":
        rows.to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text("no data")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"features": {"text": {}}}}))
    (folder / "metadata.json").write_text(json.dumps({"license": "mit", "n": [1]}, indent=2))
    (folder / "labels.json").write_text('["a", "b"]')
    write(folder / "one.jsonl", "c")
    (folder / "two.json").write_text('{"text": "d"}')  # a single sample
    with caplog.at_level("WARNING"):
        assert texts(source_of(str(folder))) == ["a", "b", "c", "d"]
    assert caplog.text.count("left out") == 1
    assert "dataset_infos.json, labels.json, metadata.json left out" in caplog.text
    alone = tmp_path / "alone"
    write(alone / "metadata.json", "a")
    assert texts(source_of(str(alone))) == ["a"]


def test_one_object_with_a_list_of_samples_has_a_way_out(source_of: Opener, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"version": 1, "data": [{"text": "a"}]}))
    with pytest.raises(UserError) as caught:
        source_of(str(path)).sample_format("auto")
    assert "its samples are in the list data" in str(caught.value)
    assert f"jq '.data' {path} > samples.json" in str(caught.value)


def test_urls_may_name_a_file_a_pattern_or_a_directory(source_of: Opener, tmp_path: Path) -> None:
    base = f"memory://{tmp_path.name}"
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        with fsspec.open(f"{base}/{name}", "w") as file:
            file.write(json.dumps({"text": name}))
    assert texts(source_of(f"{base}/b.jsonl")) == ["b.jsonl"]
    assert (
        texts(source_of(f"{base}/*.jsonl"))
        == texts(source_of(f"{base}/"))
        == ["a.jsonl", "b.jsonl"]
    )
    assert texts(source_of(f"file://{write(tmp_path / 'c.jsonl', 'c')}")) == ["c"]
    assert (
        texts(source_of(f"{tmp_path}/*.jsonl"))
        == texts(source_of(f"{tmp_path}/[a-c].jsonl"))
        == ["c"]
    )
    with pytest.raises(UserError, match="nothing/: has no split train. It has none."):
        source_of(f"{base}/nothing/")
    with pytest.raises(UserError, match="gs://bucket/my.jsonl: cannot be read: .*gcsfs"):
        source_of("gs://bucket/my.jsonl")


def test_files_named_by_split_are_splits(source_of: Opener, tmp_path: Path) -> None:
    for name in (
        "train-0.jsonl",
        "train-1.jsonl",
        "my.valid.jsonl",
        "test/rows.jsonl",
        "contest.jsonl",
    ):
        write(tmp_path / "data" / name, name)
    folder = str(tmp_path / "data")
    assert texts(source_of(folder)) == ["contest.jsonl", "train-0.jsonl", "train-1.jsonl"]
    assert brings_validation(folder)
    assert texts(source_of(folder, "validation")) == ["my.valid.jsonl"]
    assert texts(source_of(folder, dataset_split="test")) == ["test/rows.jsonl"]
    config = DataConfig(dataset=folder, validation="test")
    named = open_source("test", "validation", config=config, tokenizer=None, cache=tmp_path)  # type: ignore[arg-type]
    assert (
        texts(named) == texts(source_of([{"path": folder, "split": "test"}])) == ["test/rows.jsonl"]
    )
    with pytest.raises(UserError, match="data: has no split dev. It has train, validation, test."):
        source_of(folder, dataset_split="dev")
    with pytest.raises(
        UserError,
        match=r"no split train\[:10%\].* A slice of files counts samples: train\[10:100\].",
    ):
        source_of(folder, dataset_split="train[:10%]")


def test_directories_saved_by_datasets_are_read(source_of: Opener, tmp_path: Path) -> None:
    train = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "validation": train.select([1])}).save_to_disk(
        tmp_path / "two"
    )
    assert (
        texts(source_of(str(tmp_path / "one")))
        == texts(source_of(str(tmp_path / "two")))
        == ["a", "b"]
    )
    assert not brings_validation(str(tmp_path / "one"))
    assert brings_validation(str(tmp_path / "two"))
    assert texts(source_of(str(tmp_path / "two"), "validation")) == ["b"]
    with pytest.raises(UserError, match="one: has no split test. It has none."):
        source_of(str(tmp_path / "one"), dataset_split="test")


def test_the_identity_of_a_source_changes_with_its_contents(
    source_of: Opener, tmp_path: Path
) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    write(tmp_path / "data/a.jsonl", "a")
    url = f"memory://{tmp_path.name}-identity/a.jsonl"

    def put(text: str) -> None:
        with fsspec.open(url, "w") as file:
            file.write(json.dumps({"text": text}))

    put("a")
    names: list[Any] = [
        str(tmp_path / "saved"),
        str(tmp_path / "data"),
        url,
        [{"path": str(tmp_path / "data")}],
    ]
    before = [source_of(name).identity for name in names]
    assert [source_of(name).identity for name in names] == before
    write(tmp_path / "data/a.jsonl", "b")
    shutil.rmtree(tmp_path / "saved")
    datasets.Dataset.from_list([{"text": "A"}]).save_to_disk(tmp_path / "saved")
    put("bb")
    assert all(source_of(name).identity != old for name, old in zip(names, before, strict=True))
    weighted = [source_of([{"path": names[1], "weight": weight}]).identity for weight in (1, 2)]
    assert weighted[0] != weighted[1]
    for name, text in (("one", "x"), ("same", "x"), ("other", "y")):
        write(tmp_path / f"{name}.jsonl", text)
    one, same, other = (
        source_of(str(tmp_path / f"{name}.jsonl")).identity for name in ("one", "same", "other")
    )
    assert one == same != other


# Mixes


def taken(source: Source, wanted: str = "auto") -> Counter[str]:
    return Counter(
        str(sample["text"])
        for _, sample, *_ in source.formatted_samples(wanted)
        if not isinstance(sample, BadSample)
    )


@pytest.mark.parametrize("weight", [0.3, 1, 2, 2.5])
def test_the_weight_is_how_often_each_sample_is_used(
    source_of: Opener, tmp_path: Path, weight: float
) -> None:
    samples = [f"row {number}" for number in range(4000)]
    path = write(tmp_path / "a.jsonl", *samples)
    counts = taken(source_of([{"path": path, "weight": weight}]))
    assert set(counts.values()) <= {int(weight), int(weight) + 1} - {0}
    assert weight >= 1 <= len(counts) == 4000 or len(counts) < 4000
    assert counts.total() == pytest.approx(4000 * weight, rel=0.05)
    assert weight % 1 or counts.total() == 4000 * weight
    write(tmp_path / "a.jsonl", *reversed(samples))  # the same samples in another order
    assert taken(source_of([{"path": path, "weight": weight}])) == counts


def test_a_mixture_alternates_between_its_parts_each_in_its_own_format(
    source_of: Opener, tmp_path: Path
) -> None:
    plain = write(tmp_path / "plain.jsonl", "a", "b", "c", "d")
    alpaca = tmp_path / "alpaca.csv"
    alpaca.write_text("instruction,output\nHi,yes\nHo,no\n")
    parts: list[DatasetPart] = [{"path": plain}, {"path": str(alpaca), "weight": 2}]
    source = source_of(parts)
    assert source.name == f"{plain} + {alpaca}"
    first, second = (
        [(f"{plain}:{n}", "text"), *[(f"{alpaca} row {n}", "alpaca")] * 2] for n in (1, 2)
    )
    taken_rows = [
        (place, sample_format) for place, _, sample_format in source.formatted_samples("auto")
    ]
    assert taken_rows == [*first, *second, (f"{plain}:3", "text"), (f"{plain}:4", "text")]
    with pytest.raises(UserError, match="alpaca.csv: its columns are .* --dataset_format is text"):
        list(source.formatted_samples("text"))


# The hub: `datasets` and its own cache, as an earlier download has left it.


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Puts splits into the cache of datasets under a hub name, and lets nothing be asked of the
    hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def put(hub_name: str, **splits: list[dict]) -> str:
        owner, name = hub_name.split("/")
        for split, samples in splits.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{split}.jsonl").write_text(
                "".join(json.dumps(sample) + "\n" for sample in samples)
            )
        datasets.load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        (tmp_path / "cache" / name).rename(tmp_path / "cache" / f"{owner}___{name}")
        return hub_name

    return put


def test_hub_dataset_is_read_from_the_cache_split_by_split(
    source_of: Opener, downloaded: Callable[..., str]
) -> None:
    samples = [{"text": str(number)} for number in range(20)]
    name = downloaded("org/first", train=samples, validation=samples[:2], test=samples[:1])
    assert texts(source_of(name)) == [sample["text"] for sample in samples]
    assert texts(source_of(name, dataset_split="train[:10%]")) == ["0", "1"]
    assert texts(source_of(f"{name}:default", dataset_split="test")) == ["0"]
    assert texts(source_of(name, "validation")) == ["0", "1"]
    assert brings_validation(name)
    assert list(source_of(name).read())[1] == ("org/first train row 2", {"text": "1"})
    assert source_of(name).identity != source_of(name, dataset_split="train[:10%]").identity
    with pytest.raises(UserError, match=r'org/first: .* Unknown split "dev". Should be one of'):
        source_of(name, dataset_split="dev")


def test_datasets_of_llama_recipes_become_alpaca_samples(
    source_of: Opener, downloaded: Callable[..., str]
) -> None:
    talk = {"id": "1", "dialogue": "A: Hi\nB: Ho", "summary": "They meet."}
    downloaded(
        "knkarthick/samsum",
        train=[talk],
        validation=[{**talk, "id": "2", "summary": "Met."}],
        test=[talk],
    )
    task = {"instruction": "Summarize this dialog.", "input": "A: Hi\nB: Ho"}
    assert [sample for _, sample in source_of("samsum_dataset").read()] == [
        {**task, "output": "They meet."}
    ]
    assert source_of("samsum").sample_format("auto") == "alpaca"
    assert brings_validation("samsum")
    assert [sample["output"] for _, sample in source_of("samsum", "validation").read()] == ["Met."]  # type: ignore[index]

    jfleg = [{"sentence": "He go .", "corrections": ["He goes .", " ", "He went ."]}]
    downloaded(
        "jhu-clsp/jfleg", validation=jfleg, test=[{**jfleg[0], "corrections": ["He has gone ."]}]
    )
    grammar = list(source_of("grammar").read())
    assert [sample["output"] for _, sample in grammar] == ["He goes .", "He went ."]  # type: ignore[index]
    assert grammar[0][1]["input"] == "He go ."  # type: ignore[index]
    assert [sample["output"] for _, sample in source_of("grammar", "validation").read()] == [
        "He has gone ."
    ]  # type: ignore

    downloaded(
        "tatsu-lab/alpaca",
        train=[{"instruction": "Hi", "input": "", "output": "Ho", "text": "### ..."}],
    )
    assert source_of("alpaca").sample_format("auto") == "alpaca"
    assert not brings_validation("alpaca")
