"""Open the datasets that `--dataset` and `--validation` name, as sources of samples."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import fsspec
import huggingface_hub
import xxhash

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
from llama_ft.config.settings import DataConfig, DatasetPart
from llama_ft.data.demo import build_demo
from llama_ft.data.files import ROWS_AT_ONCE, Samples, numbered, samples_of_file
from llama_ft.data.formats import BadSample, Sample, SampleFormat, find_format
from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation"]
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
        parts: the parts of a dataset mixture; empty for a single dataset.
        renamed: column in the data -> its name in the samples that are read.
    """

    name: str
    identity: str
    read: Callable[[], Samples]
    weight: float = 1.0
    parts: tuple["Source", ...] = ()
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

    def sample_format(self, wanted: str) -> SampleFormat:
        """Return the format of the samples: `wanted`, or for auto the one that fits the columns
        (`find_format`)."""
        return find_format(self.name, self.columns, wanted)

    def formatted_samples(
        self, wanted: str
    ) -> Iterator[tuple[str, Sample | BadSample, SampleFormat]]:
        """Yield (place, sample, format). Samples are repeated by their weight, and parts of a
        mixture alternate."""
        reading = [part._weighted(part.sample_format(wanted)) for part in self.parts or (self,)]
        for together in itertools.zip_longest(*reading, fillvalue=()):
            yield from itertools.chain.from_iterable(together)

    def _weighted(
        self, sample_format: SampleFormat
    ) -> Iterator[list[tuple[str, Sample | BadSample, SampleFormat]]]:
        for place, sample in self.read():
            times = 1 if isinstance(sample, BadSample) else int(self.weight)
            if self.weight % 1 and not isinstance(sample, BadSample):
                # Validation samples are chosen by another hash. With the same hash, a weight of
                # 0.05 would choose exactly them.
                content = json.dumps(sample, sort_keys=True, ensure_ascii=False, default=str)
                share = (
                    xxhash.xxh3_64_intdigest(content.encode("utf-8", "surrogatepass"), seed=1)
                    / 2**64
                )
                times += share < self.weight - int(self.weight)
            yield [(place, sample, sample_format)] * times


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
        dataset: the name of one dataset, or of a split of config.dataset, or the parts of a mixture
            (`path`, and perhaps `weight` and `split`).
        split: the purpose, which selects a split of the data; it is also passed to a user's
            function.
        config: passed to a user's function. Its dataset_split is the training split.
        tokenizer: passed to a user's function.
        cache: the directory in which the demo is built.

    Raises:
        UserError: the dataset does not exist or cannot be read.
    """

    def opened(name: str, wanted: str | None) -> Source:
        """Open one dataset. `wanted` is its split; None selects the one that fits validation
        best."""
        kind = kind_of_data(name)
        if kind == "demo":
            demo = build_demo(cache)
            return _files_source(
                name, [str(demo.train_file if split == "train" else demo.validation_file)]
            )
        if kind == "function":
            return _dataset_source(name, call_user_function(name, config, tokenizer, split))
        if kind == "ready":
            own = name.removesuffix("_dataset")
            hub_name, train, validation = READY[own]
            own_split = train if split == "train" else validation
            raw = _split_source(hub_name, own_split if wanted in (None, "train") else wanted)
            read = (lambda: _alpaca_samples(raw.read(), *TASKS[own])) if own in TASKS else raw.read
            return dataclasses.replace(raw, read=read)
        try:
            return _split_source(name, wanted, config.streaming)
        except UserError:
            raise
        except Exception as error:  # of the disk, pyarrow or a network library
            raise UserError(f"{name}: cannot be read: {reason(error)}.") from error

    default = config.dataset_split if split == "train" else None
    if isinstance(dataset, str):
        is_split = split == "validation" and is_split_of(dataset, config.dataset)
        return opened(str(config.dataset), dataset) if is_split else opened(dataset, default)
    parts = tuple(
        dataclasses.replace(
            opened(part["path"], part.get("split") or default), weight=part.get("weight", 1.0)
        )
        for part in dataset
    )
    identity = " ".join(f"{part.identity} x {part.weight}" for part in parts)
    name = " + ".join(part.name for part in parts)
    return Source(
        name,
        identity,
        lambda: itertools.chain.from_iterable(part.read() for part in parts),
        parts=parts,
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
    samples: Iterator[tuple[str, Any]], instruction: str, given: str, wanted: str
) -> Samples:
    """Yield samples in the alpaca format. A sample with several outputs becomes one sample per
    output."""
    for place, sample in samples:
        task = {"instruction": instruction, "input": sample[given]}
        outputs = sample[wanted]
        outputs = (
            [outputs] if isinstance(outputs, str) else [text for text in outputs if text.strip()]
        )
        yield from ((place, {**task, "output": text}) for text in outputs)


def _split_source(name: str, wanted: str | None, streaming: bool = False) -> Source:
    """Open a dataset that may have splits: from the Hub, files, or a directory."""
    splits = splits_of(name, streaming)
    is_hub = kind_of_data(name) == "hub"
    held_out = [split for split in ("validation", "test") if split in splits]
    split = wanted or next(
        iter(held_out or splits if held_out or len(splits) == 1 else []), "validation"
    )
    # `datasets` slices Hub datasets itself
    split, part = (split, slice(None)) if is_hub else _sliced(split)
    if split == "train" and set(splits) == {""}:
        split = ""
    # a Hub split may be a slice such as train[:5%]
    if split not in splits and not (is_hub and wanted):
        way_out = (
            " A slice of files counts samples: train[10:100]."
            if "[" in split and not is_hub
            else ""
        )
        raise UserError(
            f"{name}: has no split {split}. It has {', '.join(filter(None, splits)) or 'none'}.{way_out}"
        )
    title = f"{name} {split}".strip()
    # also downloads the validation samples: one split alone cannot be downloaded
    if is_hub and streaming:
        streamed = load_from_hub(name, split, streaming=True)
        revision = huggingface_hub.dataset_info(name.partition(":")[0]).sha
        return Source(title, f"{title} {revision}", lambda: numbered(title, streamed))
    samples = splits[split] if split in splits else load_from_hub(name, split)
    source = (
        _files_source(title, samples)
        if isinstance(samples, list)
        else _dataset_source(title, samples)
    )
    if part == slice(None):
        return source
    identity = f"{source.identity} {part}"
    return dataclasses.replace(
        source,
        identity=identity,
        read=lambda: itertools.islice(source.read(), part.start, part.stop),
    )


def _sliced(split: str) -> tuple[str, slice]:
    """Return `train[10:100]` as the split's name and a slice of its samples, counted from 0;
    `train` as all samples."""
    match = re.fullmatch(r"(\w+)\[(\d*):(\d*)\]", split)
    if match is None:
        return split, slice(None)
    start, stop = (int(number) if number else None for number in match.groups()[1:])
    return match[1], slice(start, stop)


def splits_of(name: str, streaming: bool = False) -> dict[str, Any]:
    """Return split -> its files or Dataset. For data without splits, the key is ""."""
    kind = kind_of_data(name)
    path = Path(name).expanduser()
    if kind == "hub":
        return dict(load_from_hub(name, None, streaming))
    if kind == "folder" and any((path / sign).is_file() for sign in DATASETS_MARKER_FILES):
        saved = datasets.load_from_disk(str(path))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"": saved}
    if kind == "file" or (
        kind == "url" and data_suffix(name) and not any(mark in name for mark in "*[")
    ):
        return {"": [os.path.expanduser(name)]}
    if kind == "glob":
        return {"": globbed(name)}
    if kind == "folder":
        files = [str(file) for file in data_files(path)]
    else:  # a URL that is a pattern or a directory
        system, remote = fsspec.core.url_to_fs(name)
        found = system.find(remote) if name.endswith("/") else system.glob(remote)
        files = [str(system.unstrip_protocol(file)) for file in sorted(found) if data_suffix(file)]
    splits: dict[str, list[str]] = {}
    for file in files:
        inside = (file.removeprefix(str(path)) if kind == "folder" else Path(file).name).lower()
        named = (split for split, words in SPLIT_WORDS.items() if re.search(words, inside))
        splits.setdefault(next(named, "train"), []).append(file)
    return {"": splits["train"]} if set(splits) == {"train"} else splits


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
        cause = (
            error.__cause__
            if isinstance(error, datasets.exceptions.DatasetGenerationError)
            else None
        )
        raise UserError(
            f"{name}: not on this machine, and `datasets` cannot load it: {reason(cause or error)}"
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
            identity.update(str(sorted(system.info(path).items(), key=str)).encode())
            continue
        with open(file, "rb") as opened:
            about = os.fstat(opened.fileno())
            is_big = about.st_size > HASHED_WHOLE_BYTES
            content = (
                str(about.st_mtime_ns)
                if is_big
                else hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
            )
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

    def read() -> Samples:
        # a user's set_format("torch") would return tensors instead of lists
        batches = dataset.with_format(None).iter(batch_size=ROWS_AT_ONCE)
        samples = (
            dict(zip(batch, sample, strict=True))
            for batch in batches
            for sample in zip(*batch.values(), strict=True)
        )
        return numbered(name, samples)

    return Source(name, dataset._fingerprint, read)


def call_user_function(name: str, *arguments: Any) -> datasets.Dataset:
    """Import the file of `path/to/file.py:function`, call the function and return its
    datasets.Dataset.

    Raises:
        UserError: the function does not exist, raises an error, or returns something else.
    """
    file, _, function = name.rpartition(":")
    path = str(Path(file).expanduser())
    try:
        if (made := runpy.run_path(path)).get(function) is None:
            raise LookupError("no such function")
        samples = made[function](*arguments)
    except (Exception, SystemExit) as error:
        lines = [
            f":{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        raise UserError(
            f"{path}{''.join(lines[-1:])}: {function}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(samples, datasets.Dataset):
        raise UserError(
            f"{name} returned a {type(samples).__name__}; expected a datasets.Dataset, see Dataset.from_list."
        )
    return samples
