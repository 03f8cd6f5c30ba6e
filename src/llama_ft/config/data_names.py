"""What `--dataset` and `--validation` may name, told from the name and from what is on disk; nothing is read yet."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llama_ft.config.messages import nearest_file

Kind = Literal["demo", "ready", "function", "url", "file", "folder", "glob", "hub"]
READY_DATASETS = ("samsum", "grammar", "alpaca")  # by llama-recipes' names, also as samsum_dataset
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json", ".csv") for packed in (".gz", ".zst"))
DATA_FORMS = (
    ".jsonl, .json, .csv (also .gz, .zst) and .parquet, directories and globs of them, Hub names (org/name), and "
    "path/to/file.py:function"
)
NOT_REGULAR = "is not a regular file. Save a pipe's output to a file first."
HUB_NAME = re.compile(r"[\w.\-]+/[\w.\-]+(:[\w.\-]+)?")
SPLIT_NAME = re.compile(r"\w+(\[[^\]/]*\])?")  # train[:5%] is how datasets writes a part of one
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")  # what Dataset.save_to_disk leaves in a folder


def is_url(name: str) -> bool:
    """Tell what fsspec is to open (`s3://bucket/my.jsonl`) from what is on this machine."""
    return "://" in name


def data_suffix(name: str) -> str:
    """Return the suffix that says how a file is read, `.jsonl` of `my.jsonl.gz`; empty where it is no data file."""
    path = Path(name.partition("?")[0] if is_url(name) else name)
    if "".join(path.suffixes[-2:]).lower().endswith(COMPRESSED_SUFFIXES):
        return path.suffixes[-2].lower()
    return path.suffix.lower() if path.suffix.lower() in DATA_SUFFIXES else ""


def kind_of_data(name: str) -> Kind:
    """Tell what a name stands for. What does not exist is a hub name where it looks like one, else a file."""
    if name == "demo":
        return "demo"
    if name.removesuffix("_dataset") in READY_DATASETS:
        return "ready"
    if name.rpartition(":")[0].endswith(".py") or name.endswith(".py"):
        return "function"
    if is_url(name):
        return "url"
    path = Path(name).expanduser()
    if os.path.lexists(path):  # unlike Path.exists, it raises nothing where it is not allowed to look
        return "folder" if os.path.isdir(path) else "file"
    if glob.has_magic(name):
        return "glob"
    return "hub" if HUB_NAME.fullmatch(name) and not name.startswith(".") and not data_suffix(name) else "file"


def has_splits(name: str) -> bool:
    """Tell whether rows of this dataset may come in splits, such as train and test."""
    kind = kind_of_data(name)
    return kind in ("ready", "folder", "hub") or (kind == "url" and not data_suffix(name))


def is_split_of(validation: str, dataset: Any) -> bool:
    """Tell whether validation is the name of a split of dataset and not of data."""
    may_be = isinstance(dataset, str) and has_splits(dataset) and SPLIT_NAME.fullmatch(validation) is not None
    return may_be and kind_of_data(validation) in ("file", "glob") and not os.path.exists(validation)


def data_files(folder: Path) -> Iterator[Path]:
    """Yield the data files in a folder and the folders in it, hidden ones left out, in order of their names."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if data_suffix(path.name) and path.is_file() and not is_hidden:
            yield path


def globbed(pattern: str) -> list[str]:
    """Return the files that match, in order of their names."""
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    return sorted(file for file in found if Path(file).is_file())


def data_problem(name: str) -> str | None:
    """Say why `name` is no dataset, as far as can be seen from here; None where nothing is wrong."""
    kind, path = kind_of_data(name), Path(name).expanduser()
    if kind == "function":
        file = Path(name.rpartition(":")[0] or name).expanduser()
        if not file.is_file():
            return f"no such file.{nearest_file(file)}"
        return f"which function? Write {file}:function." if name.endswith((".py", ":")) else None
    if kind == "folder" and not any((path / sign).is_file() for sign in SAVED_BY_DATASETS):
        return None if any(data_files(path)) else f"is a directory without data files. Supported: {DATA_FORMS}."
    if kind == "glob":
        files = globbed(name)
        return None if files and all(map(data_suffix, files)) else f"matches no file, or not only {DATA_FORMS}."
    if kind != "file" or (path.is_file() and data_suffix(name)):
        return None
    if path.exists():  # data are read more than once, so a pipe is none
        return f"unknown suffix. Supported: {DATA_FORMS}." if path.is_file() else NOT_REGULAR
    if (near := nearest_file(path)) or data_suffix(name):
        return f"no such file.{near}"
    return f"is neither data nor a built-in dataset ({', '.join(('demo', *READY_DATASETS))}). Supported: {DATA_FORMS}."
