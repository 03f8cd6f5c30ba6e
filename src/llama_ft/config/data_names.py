"""Classify the values of `--dataset` and `--validation` by their name and by what exists on disk.
Nothing is read."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Kind = Literal["demo", "ready", "function", "url", "file", "folder", "glob", "hub"]
# llama-recipes' names; samsum_dataset and so on also work
READY_DATASETS = ("samsum", "grammar", "alpaca")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED_SUFFIXES = tuple(
    kind + packed for kind in (".jsonl", ".json", ".csv") for packed in (".gz", ".zst")
)
NOT_A_FILE = "is a directory, a pipe or a device; expected a file."
DATA_FORMS = (
    ".jsonl, .json, .csv (also .gz, .zst) and .parquet, directories and globs of them, Hub names (org/name), and "
    "path/to/file.py:function"
)
HUB_NAME = re.compile(r"[\w.\-]+/[\w.\-]+(:[\w.\-]+)?")
# such as train, or train[:5%] in the syntax of `datasets`
SPLIT_NAME = re.compile(r"\w+(\[[^\]/]*\])?")
# Dataset.save_to_disk writes one of these files
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")


def is_url(name: str) -> bool:
    """Return whether fsspec must open `name`, such as `s3://bucket/my.jsonl`."""
    return "://" in name


def data_suffix(name: str) -> str:
    """Return the suffix that selects the reader, such as `.jsonl` for `my.jsonl.gz`; empty for
    other files."""
    path = Path(name.partition("?")[0] if is_url(name) else name)
    if "".join(path.suffixes[-2:]).lower().endswith(COMPRESSED_SUFFIXES):
        return path.suffixes[-2].lower()
    return path.suffix.lower() if path.suffix.lower() in DATA_SUFFIXES else ""


def kind_of_data(name: str) -> Kind:
    """Return the kind of dataset that a name means. A directory or file of that name comes before a
    built-in dataset. A name that does not exist is a Hub name if it looks like one."""
    if name == "demo":
        return "demo"
    path = Path(name).expanduser()
    exists = os.path.exists(path)  # Path.exists would raise an error without permission to look
    if name.removesuffix("_dataset") in READY_DATASETS and not exists:
        return "ready"
    if name.rpartition(":")[0].endswith(".py") or name.endswith(".py"):
        return "function"
    if is_url(name):
        return "url"
    if exists:
        return "folder" if os.path.isdir(path) else "file"
    if glob.has_magic(name):
        return "glob"
    return (
        "hub"
        if HUB_NAME.fullmatch(name) and not name.startswith(".") and not data_suffix(name)
        else "file"
    )


def has_splits(name: str) -> bool:
    """Return whether this dataset may have splits, such as train and test."""
    kind = kind_of_data(name)
    return kind in ("ready", "folder", "hub") or (kind == "url" and not data_suffix(name))


def is_split_of(validation: str, dataset: Any) -> bool:
    """Return whether `validation` names a split of `dataset`, not other data."""
    may_be = (
        isinstance(dataset, str)
        and has_splits(dataset)
        and SPLIT_NAME.fullmatch(validation) is not None
    )
    return (
        may_be and kind_of_data(validation) in ("file", "glob") and not os.path.exists(validation)
    )


def data_files(folder: Path) -> Iterator[Path]:
    """Yield the data files in a directory and its subdirectories, sorted by path, without hidden
    files."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if data_suffix(path.name) and path.is_file() and not is_hidden:
            yield path


def globbed(pattern: str) -> list[str]:
    """Return the files that match the pattern, sorted by path."""
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    return sorted(file for file in found if Path(file).is_file())


def data_problem(name: str) -> str | None:
    """Return why `name` is not a dataset, as far as that is known without reading it, or None."""
    kind = kind_of_data(name)
    path = Path(name).expanduser()
    if kind == "function":
        file = Path(name.rpartition(":")[0] or name).expanduser()
        if not file.is_file():
            return "no such file."
        return f"which function? Write {file}:function." if name.endswith((".py", ":")) else None
    if kind == "folder" and not any((path / sign).is_file() for sign in SAVED_BY_DATASETS):
        return (
            None
            if any(data_files(path))
            else f"is a directory without data files. Supported: {DATA_FORMS}."
        )
    if kind == "glob":
        files = globbed(name)
        return (
            None
            if files and all(map(data_suffix, files))
            else f"matches no file, or not only {DATA_FORMS}."
        )
    if kind == "file" and path.exists() and not path.is_file():
        return NOT_A_FILE
    if kind != "file" or (path.exists() and data_suffix(name)):
        return None
    if path.exists():
        return f"unknown suffix. Supported: {DATA_FORMS}."
    if data_suffix(name):
        return "no such file."
    return f"is neither data nor a built-in dataset ({', '.join(('demo', *READY_DATASETS))}). Supported: {DATA_FORMS}."
