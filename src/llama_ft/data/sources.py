"""What `--dataset` and `--validation` may name, and the rows behind it."""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import fsspec
import xxhash

from llama_ft.config.data_names import (
    SAVED_BY_DATASETS,
    data_files,
    data_problem,
    data_suffix,
    globbed,
    has_splits,
    is_split_of,
    is_url,
    kind_of_data,
)
from llama_ft.config.settings import DataConfig, DatasetPart
from llama_ft.data.demo import build_demo
from llama_ft.data.files import ROWS_AT_ONCE, Rows, rows_of_file, without_nulls
from llama_ft.data.formats import BadRow, Row, RowFormat, find_format
from llama_ft.data.hub_datasets import READY, load_from_hub
from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation"]
PROBLEMS_SHOWN = 3
ROWS_LOOKED_AT = 100  # for the columns: rows of a .jsonl may lack one or another
# As `datasets` tells splits: a word in a file's or folder's name, between marks or digits.
SPLIT_WORDS = {
    split: re.compile(rf"(^|[-._ /0-9])({words})([-._ /0-9]|$)")
    for split, words in {"validation": "validation|valid|val|dev|eval|evaluation", "test": "test|testing"}.items()
}
READ_WHOLE = 2**31  # bytes; 2 GiB take a second to read


@dataclass(frozen=True)
class Source:
    """Rows that can be read, again and again.

    Attributes:
        name: what people call it.
        identity: changes whenever the rows may have changed.
        read: starts reading from the first row.
        weight: how often each row is taken; of 2.3, every row twice and three tenths of them a third time.
        parts: what it is mixed of; empty if it is no mixture.
    """

    name: str
    identity: str
    read: Callable[[], Rows]
    weight: float = 1.0
    parts: tuple["Source", ...] = ()

    def first_rows(self) -> list[Row]:
        """The good ones of the first rows."""
        first = list(itertools.islice(self.read(), ROWS_LOOKED_AT))
        if not first:
            raise UserError(f"{self.name}: holds no rows.")
        rows = [row for _, row in first if not isinstance(row, BadRow)]
        if not rows:  # most likely no file of this kind at all
            raise UserError(*[f"{place}: {row}" for place, row in first][:PROBLEMS_SHOWN])
        return rows

    def row_format(self, wanted: str) -> RowFormat:
        """Tell the format from the columns of the first rows, see `find_format` and `first_rows`."""
        return find_format(self.name, {column for row in self.first_rows() for column in row}, wanted)

    def formatted_rows(self, wanted: str) -> Iterator[tuple[str, Row | BadRow, RowFormat]]:
        """Yield (place, row, its format), each row as often as its weight says; parts of a mixture alternate."""
        reading = [part._weighted(part.row_format(wanted)) for part in self.parts or (self,)]
        while reading:
            for rows in reading.copy():
                if (taken := next(rows, None)) is None:
                    reading.remove(rows)
                else:
                    yield from taken

    def _weighted(self, row_format: RowFormat) -> Iterator[list[tuple[str, Row | BadRow, RowFormat]]]:
        for place, row in self.read():
            times = 1 if isinstance(row, BadRow) else int(self.weight)
            if self.weight % 1 and not isinstance(row, BadRow):
                # Another hash than the one that chooses validation rows: a weight of 0.05 would choose just those.
                content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
                share = xxhash.xxh3_64_intdigest(content.encode("utf-8", "surrogatepass"), seed=1) / 2**64
                times += share < self.weight - int(self.weight)
            yield [(place, row, row_format)] * times


def open_source(
    dataset: str | list[DatasetPart],
    split: Split,
    *,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    cache: Path,
) -> Source:
    """Find what `dataset` names.

    Args:
        dataset: the name of one dataset or of a split of config.dataset, or the parts of a mixture (`path` and perhaps
            `weight` and `split`).
        split: what it is for: which part of the demo or of data with splits, and what a user's function is called with.
        config: handed to a user's function; its dataset_split is what is trained on.
        tokenizer: handed to a user's function.
        cache: where the demo is built.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """

    def opened(name: str, wanted: str | None) -> Source:
        """Open one dataset; `wanted` is the split, None for the one that fits validation best."""
        kind = kind_of_data(name)
        if kind == "demo":
            demo = build_demo(cache)
            return _files_source(name, [str(demo.train_file if split == "train" else demo.validation_file)])
        if problem := data_problem(name):
            raise UserError(f"{name}: {problem}")
        if kind == "function":
            rows = call_user_function(name, config, tokenizer, split)
            code = hashlib.sha256(Path(name.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()
            # _fingerprint is how datasets itself knows a table and all that was done to it
            return Source(name, f"{code} {rows._fingerprint}", lambda: _dataset_rows(name, rows))
        if kind == "ready":
            ready = READY[name.removesuffix("_dataset")]
            own = ready.train if split == "train" else ready.validation
            raw = _split_source(ready.hub_name, own if wanted in (None, "train") else wanted)
            read = lambda: ((place, row) for place, given in raw.read() for row in ready.rows(given))  # noqa: E731
            return dataclasses.replace(raw, read=read)
        return _split_source(name, wanted, config.streaming)

    default = config.dataset_split if split == "train" else None
    if isinstance(dataset, str):
        if split == "validation" and is_split_of(dataset, config.dataset):
            return opened(str(config.dataset), dataset)
        return opened(dataset, default)
    parts = tuple(
        dataclasses.replace(opened(part["path"], part.get("split") or default), weight=part.get("weight", 1.0))
        for part in dataset
    )
    identity = " ".join(f"{part.identity} x {part.weight}" for part in parts)
    name = " + ".join(part.name for part in parts)
    return Source(name, identity, lambda: itertools.chain.from_iterable(part.read() for part in parts), parts=parts)


def brings_validation(dataset: str | list[DatasetPart], streaming: bool = False) -> bool:
    """Tell whether a dataset has a validation split of its own. A mixture has none. To stream, none is downloaded."""
    if not isinstance(dataset, str) or not has_splits(dataset):
        return isinstance(dataset, str) and kind_of_data(dataset) in ("demo", "function")
    if kind_of_data(dataset) == "ready":
        return READY[dataset.removesuffix("_dataset")].validation is not None
    return "validation" in splits_of(dataset, streaming)


def _split_source(name: str, wanted: str | None, streaming: bool = False) -> Source:
    """A dataset that may have splits: of the Hub, files, or a folder."""
    splits, is_hub = splits_of(name, streaming), kind_of_data(name) == "hub"
    held_out = [split for split in ("validation", "test") if split in splits]
    split = wanted or next(iter(held_out or splits if held_out or len(splits) == 1 else []), "validation")
    if wanted == "train" and set(splits) == {""}:
        split = ""
    if split not in splits and not (is_hub and wanted):  # the Hub's may be train[:5%]
        raise UserError(f"{name}: has no split {split}. It has {', '.join(filter(None, splits)) or 'no splits'}.")
    title = f"{name} {split}".strip()
    if is_hub and streaming:  # the validation rows too: one split cannot be downloaded by itself
        import huggingface_hub

        streamed = load_from_hub(name, split, streaming=True)
        revision = huggingface_hub.dataset_info(name.partition(":")[0]).sha
        return Source(title, f"{title} {revision}", lambda: _numbered(title, streamed))
    rows = splits[split] if split in splits else load_from_hub(name, split)
    if isinstance(rows, list):
        return _files_source(title, rows)
    files = [file["filename"] for file in rows.cache_files]
    # in datasets' cache the folders say owner, name, configuration, version and a hash of the revision
    in_cache = ["/".join(Path(file).parts[-5:]) for file in files]
    identity = f"{in_cache} {split} {len(rows)}" if is_hub else identity_of(files)
    return Source(title, identity, lambda: _dataset_rows(title, rows))


def splits_of(name: str, streaming: bool = False) -> dict[str, Any]:
    """Split -> its files or Dataset; the split of data without splits is called ""."""
    kind, path = kind_of_data(name), Path(name).expanduser()
    if kind == "hub":
        return dict(load_from_hub(name, None, streaming))
    if kind == "folder" and any((path / sign).is_file() for sign in SAVED_BY_DATASETS):
        import datasets

        saved = datasets.load_from_disk(str(path))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"": saved}
    if kind in ("glob", "file"):
        return {"": globbed(name) if kind == "glob" else [str(path)]}
    if kind == "url" and data_suffix(name) and not any(mark in name for mark in "*["):
        return {"": [name]}
    splits: dict[str, list[str]] = {}
    for file in [str(file) for file in data_files(path)] if kind == "folder" else _remote_files(name):
        inside = (file.removeprefix(str(path)) if kind == "folder" else Path(file).name).lower()
        found = (split for split, words in SPLIT_WORDS.items() if re.search(words, inside))
        splits.setdefault(next(found, "train"), []).append(file)
    return {"": splits["train"]} if set(splits) == {"train"} else splits


def _remote_files(name: str) -> list[str]:
    """The files behind a URL that is a pattern or a folder."""
    try:
        system, path = fsspec.core.url_to_fs(name)
        found = system.find(path) if name.endswith("/") else system.glob(path)
    except Exception as error:  # of any network library, or that none is installed for this kind of URL
        raise UserError(f"{name}: cannot be read: {reason(error)}.") from error
    if files := [str(system.unstrip_protocol(file)) for file in sorted(found) if data_suffix(file)]:
        return files
    raise UserError(f"{name}: no data files there.")


def identity_of(files: Sequence[str]) -> str:
    """A hash of their contents, wherever they lie; beyond READ_WHOLE bytes of size and time, since each rank asks; of
    remote files of what their server says: name, size, time, checksum."""
    digest = xxhash.xxh3_128()
    for name in files:
        try:
            if is_url(name):
                system, path = fsspec.core.url_to_fs(name)
                digest.update(str(sorted(system.info(path).items(), key=str)).encode())
                continue
            with open(name, "rb") as file:
                about = os.fstat(file.fileno())
                is_big = about.st_size > READ_WHOLE
                content = str(about.st_mtime_ns) if is_big else hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
                digest.update(f"{about.st_size} {content}\n".encode())
        except Exception as error:  # of a disk or any network library
            raise UserError(f"{name}: cannot be read: {reason(error)}.") from error
    return digest.hexdigest()


def _files_source(name: str, files: list[str]) -> Source:
    shown = files[0] if len(files) == 1 else name
    return Source(shown, identity_of(files), lambda: itertools.chain.from_iterable(map(rows_of_file, files)))


def _dataset_rows(name: str, dataset: "Dataset") -> Rows:
    plain = dataset.with_format(None)  # a user's set_format("torch") would give tensors instead of lists
    batches = (zip(*columns.values(), strict=True) for columns in plain.iter(batch_size=ROWS_AT_ONCE))
    rows = (dict(zip(plain.column_names, values, strict=True)) for values in itertools.chain.from_iterable(batches))
    return _numbered(name, rows)


def _numbered(name: str, rows: Iterable[Row]) -> Rows:
    return ((f"{name} row {number}", without_nulls(row)) for number, row in enumerate(rows, start=1))


def call_user_function(name: str, *arguments: Any) -> "Dataset":
    """Import the file of `path/to/file.py:function`, call the function and return the datasets.Dataset it made.

    Raises:
        UserError: there is no such function, something was raised, or it returned something else.
    """
    import datasets

    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    # A name of its own, so that two files called dataset.py, or one called like a library, do not meet in sys.modules.
    module_name = f"llama_ft_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # pickle looks classes up there
    try:
        spec.loader.exec_module(module)
        rows = getattr(module, function)(*arguments)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = ":".join(map(str, [path, *lines[-1:]]))
        raise UserError(f"{place}: {function}: {type(error).__name__}: {error}") from error
    if not isinstance(rows, datasets.Dataset):
        made = "(datasets.Dataset.from_list(rows) makes one from a list of dicts)"
        raise UserError(f"{name} returned a {type(rows).__name__}; expected a datasets.Dataset.\n{made}")
    return rows
