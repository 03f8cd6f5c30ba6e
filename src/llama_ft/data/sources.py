"""What `--dataset` and `--validation` may name, and the rows behind it."""

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llama_ft.config.sections import DataConfig
from llama_ft.data.demo import build_demo
from llama_ft.data.files import READERS, Rows, rows_of_file
from llama_ft.data.formats import BadRow, RowFormat, find_format
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
    """

    name: str
    identity: str
    read: Callable[[], Rows]

    def row_format(self, wanted: str, *, if_empty: str = "") -> RowFormat:
        """Tell the format of the rows from the columns of the first ones.

        Args:
            wanted: `auto`, or the format that they must have.
            if_empty: what to do about it when there are no rows, for the message.
        """
        first = list(itertools.islice(self.read(), ROWS_LOOKED_AT))
        if not first:
            raise UserError(f"{self.name}: holds no rows." + (f"\n{if_empty}" if if_empty else ""))
        columns = {column for _, row in first if not isinstance(row, BadRow) for column in row}
        problems = [f"{place}: {row}" for place, row in first if isinstance(row, BadRow)]
        if problems and not columns:  # not one usable row: most likely no file of this kind at all
            raise UserError(*problems[:PROBLEMS_SHOWN])
        return find_format(self.name, columns, wanted)


def open_source(
    dataset: str, split: Split, *, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", cache: Path
) -> Source:
    """Find what `dataset` names.

    Args:
        dataset: `demo`, a data file, or `path/to/file.py:function`.
        split: which part of the demo, and what a user's function is called with.
        config: handed to a user's function.
        tokenizer: handed to a user's function.
        cache: where the demo is built.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    if dataset == "demo":
        demo = build_demo(cache)
        return _file_source(demo.train_file if split == "train" else demo.validation_file)
    if found := _user_function(dataset):
        file, function = found
        rows = call_user_function(file, function, config, tokenizer, split)
        code = hashlib.sha256(file.read_bytes()).hexdigest()
        # _fingerprint is how datasets itself knows a table and all that was done to it
        return Source(dataset, f"{code} {rows._fingerprint}", lambda: _dataset_rows(dataset, rows))
    _check_is_data_file(dataset)
    return _file_source(Path(dataset))


def brings_validation(dataset: str) -> bool:
    """Tell whether a dataset has a validation split of its own."""
    return dataset == "demo" or _user_function(dataset) is not None


def _user_function(dataset: str) -> tuple[Path, str] | None:
    """The file and the function in `path/to/file.py:function`; None if `dataset` is something else."""
    file, _, function = dataset.rpartition(":")
    return (Path(file), function) if file.endswith(".py") else None


def read_rows(
    dataset: str, split: Split, *, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", cache: Path
) -> Rows:
    """Yield (place, row) of `dataset`; arguments and errors as of `open_source`."""
    return open_source(dataset, split, config=config, tokenizer=tokenizer, cache=cache).read()


def _file_source(path: Path) -> Source:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    return Source(str(path), f"{path} {digest}", lambda: rows_of_file(path))


def _dataset_rows(name: str, dataset: "Dataset") -> Iterator[tuple[str, dict]]:
    plain = dataset.with_format(None)  # a user's set_format("torch") would give tensors instead of lists
    for number, row in enumerate(plain, start=1):
        yield f"{name} row {number}", row


def _check_is_data_file(dataset: str) -> None:
    path = Path(dataset)
    if path.suffix == ".py":
        raise UserError(f"{dataset}: which function of this file? Expected {dataset}:function.")
    if path.suffix.lower() not in READERS:
        raise UserError(
            f"{dataset}: not a dataset.\nExpected demo, a file ({', '.join(READERS)}) or path/to/file.py:function."
        )
    if path.is_dir():
        raise UserError(f"{dataset}: is a folder; expected a file.")
    if not path.exists():
        folder = path.parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise UserError(f"{dataset}: no such file." + (f" Did you mean {folder / near[0]}?" if near else ""))
