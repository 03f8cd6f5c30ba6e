"""What `--dataset` and `--validation` may name, and the rows behind it."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash

from llama_ft.config.data_names import data_complaint, has_splits, is_split_of, kind_of_data
from llama_ft.config.settings import DataConfig, DatasetPart
from llama_ft.data.demo import build_demo
from llama_ft.data.files import BATCH_BYTES, Rows, rows_of_file, without_nulls
from llama_ft.data.formats import BadRow, Row, RowFormat, find_format
from llama_ft.data.hub_datasets import READY, load_from_hub, revision_of, rows_over_the_network, stream_from_hub
from llama_ft.data.splits import best_for_validation, identity_of, splits_of
from llama_ft.data.user_function import call_user_function
from llama_ft.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation"]
PROBLEMS_SHOWN = 3
ROWS_LOOKED_AT = 100  # for the columns: rows of a .jsonl may lack one or another


@dataclass(frozen=True)
class Source:
    """Rows that can be read, again and again.

    Attributes:
        name: what people call it.
        identity: changes whenever the rows may have changed.
        read: starts reading from the first row.
        weight: how often each row is taken; of 2.3, every row twice and three tenths of them a third time.
        parts: what it is mixed of; empty if it is no mix.
    """

    name: str
    identity: str
    read: Callable[[], Rows]
    weight: float = 1.0
    parts: tuple["Source", ...] = ()

    def row_format(self, wanted: str, *, if_empty: str = "") -> RowFormat:
        """Tell the format of the rows from the columns of the first ones; of a mix, the first that is a chat's.

        Args:
            wanted: `auto`, or the format that they must have.
            if_empty: what to do about it when there are no rows, for the message.
        """
        if self.parts:
            formats = [part.row_format(wanted, if_empty=if_empty) for part in self.parts]
            return next((found for found in formats if found not in ("text", "tokenized")), formats[0])
        return find_format(self.name, self.columns(if_empty), wanted)

    def columns(self, if_empty: str = "") -> set[str]:
        """Those of the first rows; `if_empty` as of `row_format`."""
        first = list(itertools.islice(self.read(), ROWS_LOOKED_AT))
        if not first:
            raise UserError(f"{self.name}: holds no rows." + (f"\n{if_empty}" if if_empty else ""))
        columns = {column for _, row in first if not isinstance(row, BadRow) for column in row}
        problems = [f"{place}: {row}" for place, row in first if isinstance(row, BadRow)]
        if problems and not columns:  # not one usable row: most likely no file of this kind at all
            raise UserError(*problems[:PROBLEMS_SHOWN])
        return columns

    def formatted_rows(self, wanted: str, *, if_empty: str = "") -> Iterator[tuple[str, Row | BadRow, RowFormat, int]]:
        """Yield (place, row, its format, number of its part), each row as often as its weight says; parts take turns.

        Arguments as of `row_format`.
        """
        parts = self.parts or (self,)
        formats = [part.row_format(wanted, if_empty=if_empty) for part in parts]
        reading = [_weighted(part, formats[number], number) for number, part in enumerate(parts)]
        while reading:
            for rows in reading.copy():
                if (taken := next(rows, None)) is None:
                    reading.remove(rows)
                else:
                    yield from taken


def _weighted(
    source: Source, row_format: RowFormat, number: int
) -> Iterator[list[tuple[str, Row | BadRow, RowFormat, int]]]:
    """Yield every row as often as it is taken."""
    for place, row in source.read():
        times = 1 if isinstance(row, BadRow) or source.weight == 1 else times_taken(row, source.weight)
        yield [(place, row, row_format, number)] * times


def times_taken(row: Row, weight: float) -> int:
    """How often a row is taken: the whole part of weight, and once more if a hash of the row says so.

    The hash is another than the one that chooses validation rows, or a weight of 0.05 would choose just those.
    """
    whole = int(weight)
    content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    return whole + (xxhash.xxh3_64_intdigest(content, seed=1) / 2**64 < weight - whole)


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
        dataset: the name of one dataset or of a split of config.dataset, or the parts of a mix (`path` and perhaps
            `weight` and `split`).
        split: what it is for: which part of the demo or of data with splits, and what a user's function is called with.
        config: handed to a user's function; its dataset_split is what is trained on.
        tokenizer: handed to a user's function.
        cache: where the demo is built.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    open_named = functools.partial(_open_named, use=split, config=config, tokenizer=tokenizer, cache=cache)
    default = config.dataset_split if split == "train" else None
    if isinstance(dataset, str):
        if split == "validation" and is_split_of(dataset, config.dataset):
            return open_named(str(config.dataset), dataset)
        return open_named(dataset, default)
    parts = tuple(
        dataclasses.replace(open_named(part["path"], part.get("split") or default), weight=part.get("weight", 1.0))
        for part in dataset
    )
    identity = " ".join(f"{part.identity} x {part.weight}" for part in parts)
    name = " + ".join(part.name for part in parts)
    return Source(name, identity, lambda: itertools.chain.from_iterable(part.read() for part in parts), parts=parts)


def brings_validation(dataset: str | list[DatasetPart], streaming: bool = False) -> bool:
    """Tell whether a dataset has a validation split of its own. A mix has none. To stream, none is downloaded."""
    if not isinstance(dataset, str) or not has_splits(dataset):
        return isinstance(dataset, str) and kind_of_data(dataset) in ("demo", "function")
    if kind_of_data(dataset) == "ready":
        return READY[dataset.removesuffix("_dataset")].validation is not None
    is_streamed = streaming and kind_of_data(dataset) == "hub"
    return "validation" in (stream_from_hub(dataset, None) if is_streamed else splits_of(dataset))


def _open_named(
    name: str,
    wanted: str | None,
    *,
    use: Split,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    cache: Path,
) -> Source:
    """Open one dataset; `wanted` is the split, None for the one that fits validation best."""
    kind = kind_of_data(name)
    if kind == "demo":
        demo = build_demo(cache)
        return _files_source(name, [str(demo.train_file if use == "train" else demo.validation_file)])
    file, colon, function = name.rpartition(":")
    if kind == "function" and colon:
        rows = call_user_function(Path(file).expanduser(), function, config, tokenizer, use)
        code = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
        # _fingerprint is how datasets itself knows a table and all that was done to it
        return Source(name, f"{code} {rows._fingerprint}", lambda: _dataset_rows(name, rows))
    if complaint := data_complaint(name):
        raise UserError(f"{name}: {complaint}")
    if kind == "ready":
        ready = READY[name.removesuffix("_dataset")]
        default = ready.train if use == "train" else ready.validation
        raw = _hub_source(ready.hub_name, default if wanted in (None, "train") else wanted)
        return dataclasses.replace(
            raw, read=lambda: ((place, row) for place, given in raw.read() for row in ready.rows(given))
        )
    if kind == "hub" and config.streaming:  # the validation rows too: one split cannot be downloaded by itself
        split = wanted or best_for_validation(name, list(stream_from_hub(name, None)))
        title, streamed = f"{name} {split}", stream_from_hub(name, split)
        return Source(title, f"{title} {revision_of(name)}", lambda: rows_over_the_network(title, streamed))
    if kind == "hub":
        return _hub_source(name, wanted)
    return _split_source(name, wanted, use)


def _hub_source(name: str, wanted: str | None) -> Source:
    splits = splits_of(name)
    split = wanted or best_for_validation(name, list(splits))
    rows = splits[split] if split in splits else load_from_hub(name, split)
    # in datasets' cache the folders say owner, name, configuration, version and a hash of the revision
    files = ["/".join(Path(file["filename"]).parts[-5:]) for file in rows.cache_files]
    return Source(f"{name} {split}", f"{files} {split} {len(rows)}", lambda: _dataset_rows(f"{name} {split}", rows))


def _split_source(name: str, wanted: str | None, use: Split) -> Source:
    """A file, or a folder or several files that may be split by their names."""
    splits = splits_of(name)
    if set(splits) == {""}:
        if wanted not in (None, "train"):
            raise UserError(f"{name}: has no splits; {wanted} was asked for.")
        split = ""
    else:
        split = wanted or best_for_validation(name, list(splits))
    if split not in splits:
        raise UserError(f"{name}: has no split {split}. It has {', '.join(splits)}.")
    rows = splits[split]
    title = f"{name} {split}".strip()
    if isinstance(rows, list):
        return _files_source(title, rows)
    files = [file["filename"] for file in rows.cache_files]
    return Source(title, identity_of(files), lambda: _dataset_rows(title, rows))


def _files_source(name: str, files: list[str]) -> Source:
    shown = files[0] if len(files) == 1 else name
    return Source(
        shown, identity_of(files), lambda: itertools.chain.from_iterable(rows_of_file(file) for file in files)
    )


def _dataset_rows(name: str, dataset: "Dataset") -> Rows:
    plain = dataset.with_format(None)  # a user's set_format("torch") would give tensors instead of lists
    at_once = max(1, min(1000, BATCH_BYTES * len(plain) // (plain.data.nbytes + 1)))
    number = 0
    for columns in plain.iter(batch_size=at_once):
        for values in zip(*columns.values(), strict=True):
            number += 1
            yield f"{name} row {number}", without_nulls(dict(zip(columns, values, strict=True)))
