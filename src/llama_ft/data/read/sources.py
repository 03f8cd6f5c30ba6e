"""Open the datasets that `--dataset` and `--validation` name, as sources of samples."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import fsspec
import huggingface_hub
import xxhash

from llama_ft import door
from llama_ft.config.data_names import (
    DATASETS_MARKER_FILES,
    data_files,
    data_suffix,
    globbed,
    has_splits,
    is_split_of,
    is_url,
    kind_of_data,
)
from llama_ft.config.home import expanded
from llama_ft.config.settings.settings import DataConfig, DatasetPart
from llama_ft.data.demo import build_demo
from llama_ft.data.read.files import (
    ROWS_AT_ONCE,
    Samples,
    columns_of_first,
    is_list_of_objects,
    numbered,
    samples_of_file,
    whole_object,
)
from llama_ft.data.read.formats import BadSample, Sample, SampleFormat, find_format
from llama_ft.data.read.media import undecoded
from llama_ft.errors import UserError, reason
from llama_ft.runtime.console import log
from llama_ft.user_function import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation"]
FILES_LOOKED_AT = 3  # of a directory, to find the columns
SAMPLES_LOOKED_AT = 100  # to find the columns: a sample of a .jsonl file may lack some of them
# `datasets` finds splits in the same way: by a word in the name of a file or directory, between
# marks or digits.
SPLIT_WORDS = {
    split: re.compile(rf"(^|[-._ /0-9])({words})([-._ /0-9]|$)")
    for split, words in {
        "validation": "validation|valid|val|dev|eval|evaluation",
        "test": "test|testing",
    }.items()
}
HASHED_WHOLE_BYTES = 2**31  # bytes; reading and hashing 2 GiB takes one second
# llama-recipes' datasets: the name on the Hub, the training split, and the validation split.
READY = {
    "samsum": ("knkarthick/samsum", "train", "validation"),
    "grammar": ("jhu-clsp/jfleg", "validation", "test"),  # the dataset has no split called train
    "alpaca": ("tatsu-lab/alpaca", "train", None),
}
# For datasets that are not in the alpaca format: the instruction, and the columns of input and
# output.
TASKS = {
    "samsum": ("Summarize this dialog.", "dialogue", "summary"),
    "grammar": ("Correct this to standard English.", "sentence", "corrections"),
}


@dataclass(frozen=True)
class Source:
    """Samples that can be read several times.

    Attributes:
        name: shown to users.
        identity: a text that changes whenever the samples may have changed.
        read: starts reading from the first sample.
        weight: how often each sample is used per epoch: with 2.3 twice, and three tenths of the
            samples a third time.
        datasets: those of a dataset mixture; empty for a single dataset.
        renamed: column in the data -> its name in the samples that are read.
    """

    name: str
    identity: str
    read: Callable[[], Samples]
    weight: float = 1.0
    datasets: tuple["Source", ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def first_samples(self) -> list[Sample]:
        """The valid samples among the first ones.

        Raises:
            UserError: none is valid, so the file probably has another format.
        """
        first = list(itertools.islice(self.read(), SAMPLES_LOOKED_AT))
        samples = [sample for _, sample in first if not isinstance(sample, BadSample)]
        if not samples:
            bad = [f"{place}: {sample}" for place, sample in first]
            raise UserError(*bad[:3] or [f"{self.name}: holds no samples."])
        return samples

    @property
    def columns(self) -> set[str]:
        """The columns of the first samples."""
        return {column for sample in self.first_samples for column in sample}

    def sample_format(self, format_name: str) -> SampleFormat:
        """Return the format of the samples: `format_name`, or for auto the one that fits the columns
        (`find_format`)."""
        try:
            return find_format(self.name, self.columns, format_name)
        except UserError as error:
            [first, *others] = self.first_samples
            lists = [column for column, value in first.items() if is_list_of_objects(value)]
            if others or not lists or format_name != "auto":
                raise
            raise UserError(
                f"{self.name}: is one object, and its samples are in the list {lists[0]}; expected the list alone.\n"
                f"jq '.{lists[0]}' {self.name} > samples.json writes it."
            ) from error

    def formatted_samples(
        self, format_name: str
    ) -> Iterator[tuple[str, Sample | BadSample, SampleFormat]]:
        """Yield (place, sample, format). Samples are repeated by their weight, and datasets of a
        mixture alternate."""
        datasets = self.datasets or (self,)
        reading = [dataset._weighted(dataset.sample_format(format_name)) for dataset in datasets]
        # the first sample of each dataset, then the second of each; those that have ended add nothing
        for of_each_dataset in itertools.zip_longest(*reading, fillvalue=()):
            yield from itertools.chain.from_iterable(of_each_dataset)

    def _weighted(
        self, sample_format: SampleFormat
    ) -> Iterator[list[tuple[str, Sample | BadSample, SampleFormat]]]:
        """Yield each sample as often as its weight says, perhaps never, as one list."""
        whole = int(self.weight)
        fraction = self.weight - whole
        for place, sample in self.read():
            if isinstance(sample, BadSample):
                times = 1  # a bad sample is always reported
            elif fraction:
                times = whole + (_random_share(sample) < fraction)
            else:
                times = whole
            yield [(place, sample, sample_format)] * times


def _random_share(sample: Sample) -> float:
    """Return a random number from 0 to 1 that depends on the sample's content only.

    Validation samples are chosen by another hash. With the same hash, a weight of 0.05 would choose
    exactly them.
    """
    content = json.dumps(sample, sort_keys=True, ensure_ascii=False, default=str)
    # surrogatepass: JSON allows half a surrogate pair, which UTF-8 cannot encode
    return xxhash.xxh3_64_intdigest(content.encode("utf-8", "surrogatepass"), seed=1) / 2**64


def open_source(
    dataset: str | list[DatasetPart],
    split: Split,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    cache: Path,
) -> Source:
    """Open what `dataset` names.

    Args:
        dataset: the name of one dataset, or of a split of config.dataset, or the datasets of a mixture
            (`path`, and perhaps `weight` and `split`).
        split: the purpose, which selects a split of the data; it is also passed to a user's
            function.
        config: passed to a user's function. Its dataset_split is the training split.
        tokenizer: passed to a user's function.
        cache: the directory in which the demo is built.

    Raises:
        UserError: the dataset does not exist or cannot be read.
    """

    def opened(name: str, split_name: str | None) -> Source:
        """Open one dataset. `split_name` is its split; None selects the one that fits validation
        best."""
        kind = kind_of_data(name)
        if kind == "demo":
            demo = build_demo(cache)
            file = demo.train_file if split == "train" else demo.validation_file
            return _files_source(name, [str(file)])
        if kind == "function":
            return _dataset_source(name, call_user_function(name, config, tokenizer, split))
        if kind == "extension":
            source: Source = door.open_dataset(expanded(name), name, config, tokenizer)
            return source
        if kind == "ready":
            return _ready_source(name.removesuffix("_dataset"), split, split_name)
        try:
            return _split_source(name, split_name, config.streaming)
        except UserError:
            raise
        except Exception as error:  # of the disk, pyarrow or a network library
            raise UserError(f"{name}: cannot be read: {reason(error)}.") from error

    default = config.dataset_split if split == "train" else None
    if isinstance(dataset, str):
        if split == "validation" and is_split_of(dataset, config.dataset):
            return opened(str(config.dataset), dataset)
        return opened(dataset, default)
    sources = []
    for entry in dataset:
        source = opened(entry["path"], entry.get("split") or default)
        sources.append(dataclasses.replace(source, weight=entry.get("weight", 1.0)))
    return Source(
        name=" + ".join(source.name for source in sources),
        identity=" ".join(f"{source.identity} x {source.weight}" for source in sources),
        read=lambda: itertools.chain.from_iterable(source.read() for source in sources),
        datasets=tuple(sources),
    )


def brings_validation(dataset: str | list[DatasetPart], streaming: bool = False) -> bool:
    """Return whether a dataset has its own validation split. Mixtures have none, and streaming
    never downloads one."""
    if not isinstance(dataset, str) or not has_splits(dataset):
        return isinstance(dataset, str) and kind_of_data(dataset) in ("demo", "function")
    if kind_of_data(dataset) == "ready":
        return READY[dataset.removesuffix("_dataset")][2] is not None
    return "validation" in splits_of(dataset, streaming)


def _alpaca_samples(
    samples: Iterator[tuple[str, Any]], instruction: str, given: str, output: str
) -> Samples:
    """Yield samples in the alpaca format. A sample with several outputs becomes one sample per
    output."""
    for place, sample in samples:
        if isinstance(sample, BadSample):
            yield place, sample
            continue
        task = {"instruction": instruction, "input": sample[given]}
        outputs = sample[output]
        if isinstance(outputs, list):
            outputs = [text for text in outputs if text.strip()]
        else:
            outputs = [outputs]
        for text in outputs:
            yield place, {**task, "output": text}


def _ready_source(name: str, split: Split, split_name: str | None) -> Source:
    """Open one of READY."""
    hub_name, train, validation = READY[name]
    if split_name in (None, "train"):
        split_name = train if split == "train" else validation
    raw = _split_source(hub_name, split_name)
    task = TASKS.get(name)
    if task is None:
        return raw
    return dataclasses.replace(raw, read=lambda: _alpaca_samples(raw.read(), *task))


def _split_source(name: str, split_name: str | None, streaming: bool = False) -> Source:
    """Open a dataset that may have splits: from the Hub, files, or a directory."""
    splits = splits_of(name, streaming)
    is_hub = kind_of_data(name) == "hub"
    split = split_name or _split_for_validation(splits)
    # `datasets` slices Hub datasets itself
    split, rows = (split, slice(None)) if is_hub else _sliced(split)
    if split == "train" and set(splits) == {""}:
        split = ""
    # a Hub split may be a slice such as train[:5%]
    if split not in splits and not (is_hub and split_name):
        way_out = ""
        if "[" in split and not is_hub:
            way_out = " A slice of files counts samples: train[10:100]."
        names = ", ".join(filter(None, splits)) or "none"
        raise UserError(f"{name}: has no split {split}. It has {names}.{way_out}")
    title = f"{name} {split}".strip()
    # also downloads the validation samples: one split alone cannot be downloaded
    if is_hub and streaming:
        streamed = load_from_hub(name, split, streaming=True)
        revision = huggingface_hub.dataset_info(name.partition(":")[0]).sha
        schema = streamed.features.arrow_schema if streamed.features else None
        return Source(title, f"{title} {revision}", lambda: numbered(title, streamed, schema))
    samples = splits[split] if split in splits else load_from_hub(name, split)
    if isinstance(samples, list):
        source = _files_source(title, samples)
    else:
        source = _dataset_source(title, samples)
    if rows == slice(None):
        return source
    return dataclasses.replace(
        source,
        identity=f"{source.identity} {rows}",
        read=lambda: itertools.islice(source.read(), rows.start, rows.stop),
    )


def _split_for_validation(splits: dict[str, Any]) -> str:
    """Return the split that fits validation best: validation, else test, else the only one."""
    for name in ("validation", "test"):
        if name in splits:
            return name
    if len(splits) == 1:
        [only] = splits
        return only
    return "validation"


def _sliced(split: str) -> tuple[str, slice]:
    """Return `train[10:100]` as the split's name and a slice of its samples, counted from 0;
    `train` as all samples."""
    match = re.fullmatch(r"(\w+)\[(\d*):(\d*)\]", split)
    if match is None:
        return split, slice(None)
    name, first, end = match.groups()
    start = int(first) if first else None
    stop = int(end) if end else None
    return name, slice(start, stop)


def splits_of(name: str, streaming: bool = False) -> dict[str, Any]:
    """Return split -> its files or Dataset. For data without splits, the key is ""."""
    kind = kind_of_data(name)
    path = expanded(name)
    if kind == "hub":
        return dict(load_from_hub(name, None, streaming))
    if kind == "folder" and any((path / sign).is_file() for sign in DATASETS_MARKER_FILES):
        saved = datasets.load_from_disk(str(path))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"": saved}
    is_pattern = "*" in name or "[" in name
    if kind == "file" or (kind == "url" and data_suffix(name) and not is_pattern):
        return {"": [os.path.expanduser(name)]}
    if kind == "glob":
        return {"": globbed(name)}
    if kind == "folder":
        files = [str(file) for file in data_files(path)]
    else:  # a URL that is a pattern or a directory
        system, remote = fsspec.core.url_to_fs(name)
        paths = system.find(remote) if name.endswith("/") else system.glob(remote)
        remote_files = [file for file in sorted(paths) if data_suffix(file)]
        # fsspec returns paths without the protocol, such as s3://
        files = [str(system.unstrip_protocol(file)) for file in remote_files]
    if kind == "folder" or name.endswith("/"):
        files = list(_without_metadata(name, tuple(files)))
    splits: dict[str, list[str]] = {}
    for file in files:
        inside = file.removeprefix(str(path)) if kind == "folder" else Path(file).name
        splits.setdefault(_split_in_name(inside.lower()), []).append(file)
    return {"": splits["train"]} if set(splits) == {"train"} else splits


@functools.cache  # also so that the message comes once
def _without_metadata(folder: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of a directory that hold samples. Cloned datasets have others, such as
    dataset_infos.json: one object with other columns than the samples of the other files."""
    objects = {}
    for file in files:
        if data_suffix(file) == ".json" and (value := whole_object(file)) is not None:
            objects[file] = value
    others = [file for file in files if file not in objects]
    if not objects or not others:
        return files
    columns = columns_of_first(others[:FILES_LOOKED_AT])
    left_out = [file for file, value in objects.items() if not columns & set(value)]
    if columns and left_out:
        names = ", ".join(file.rpartition("/")[2] for file in left_out)
        log.warning(f"{folder}: {names} left out: no column of the other files is there")
        return tuple(file for file in files if file not in left_out)
    return files


def _split_in_name(name: str) -> str:
    """Return the split that a file's path names, train if none."""
    for split, words in SPLIT_WORDS.items():
        if words.search(name):
            return split
    return "train"


@functools.cache
def load_from_hub(name: str, split: str | None, streaming: bool = False) -> Any:
    """Load a dataset with `datasets`, which uses its cache if the Hub cannot be reached.

    Args:
        name: org/name, or org/name:configuration.
        split: in the syntax of `datasets` (`train`, `train[:5%]`); None for a dict of all splits.
        streaming: download samples while they are read.

    Raises:
        UserError: the dataset or split does not exist, access is denied, or the Hub cannot be
            reached.
    """
    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, split=split, streaming=streaming)
    # datasets, huggingface_hub, httpx or pyarrow: all about this one dataset
    except Exception as error:
        cause: BaseException = error
        # its own text is only "An error occurred while generating the dataset"
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error
        raise UserError(
            f"{name}: not on this machine, and `datasets` cannot load it: {reason(cause)}"
        ) from error


def _files_source(name: str, files: Sequence[str]) -> Source:
    """Open data files. Their identity is a hash of their contents, independent of the directory.

    Above HASHED_WHOLE_BYTES bytes the identity is size and time instead, since every rank computes it. For
    remote files it is what the server reports: name, size, time, checksum.
    """
    identity = xxhash.xxh3_128()
    for file in files:
        if is_url(file):
            system, path = fsspec.core.url_to_fs(file)
            # sorted, because the order may differ between ranks
            about_remote = sorted(system.info(path).items(), key=str)
            identity.update(str(about_remote).encode())
            continue
        with open(file, "rb") as opened:
            about = os.fstat(opened.fileno())
            if about.st_size > HASHED_WHOLE_BYTES:
                content = str(about.st_mtime_ns)
            else:
                content = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
        identity.update(f"{about.st_size} {content}\n".encode())
    shown = files[0] if len(files) == 1 else name
    return Source(
        shown,
        identity.hexdigest(),
        lambda: itertools.chain.from_iterable(map(samples_of_file, files)),
    )


def _dataset_source(name: str, dataset: datasets.Dataset) -> Source:
    """Open a Dataset. Its identity is the fingerprint that `datasets` computes from the table and
    all its changes."""

    identity = dataset._fingerprint
    for column, feature in dataset.features.items():
        of_bytes = undecoded(feature)
        if of_bytes is not None:
            dataset = dataset.cast_column(column, of_bytes)
    schema = dataset.features.arrow_schema

    def read() -> Samples:
        # a user's set_format("torch") would return tensors instead of lists
        batches = dataset.with_format(None).iter(batch_size=ROWS_AT_ONCE)
        samples = itertools.chain.from_iterable(map(_samples_of_batch, batches))
        return numbered(name, samples, schema)

    return Source(name, identity, read)


def _samples_of_batch(batch: dict[str, list[Any]]) -> Iterator[Sample]:
    """Yield the samples of a batch, which is column -> its values."""
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def call_user_function(name: str, *arguments: Any) -> datasets.Dataset:
    """Import the file of `path/to/file.py:function`, call the function and return its
    datasets.Dataset.

    Raises:
        UserError: the function does not exist, raises an error, or returns something else.
    """
    samples = load_function(name)(*arguments)
    if not isinstance(samples, datasets.Dataset):
        raise UserError(
            f"{name} returned a {type(samples).__name__}; expected a datasets.Dataset, see Dataset.from_list."
        )
    return samples
