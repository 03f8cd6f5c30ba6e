"""Classify the values of `--dataset` and `--validation` by their name and by what exists on disk.
Nothing is read."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llama_ft import door
from llama_ft.config.home import expanded
from llama_ft.config.wording.messages import missing_file

Kind = Literal["demo", "ready", "function", "url", "file", "folder", "extension", "glob", "hub"]
# llama-recipes' names; samsum_dataset and so on also work
READY_DATASETS = ("samsum", "grammar", "alpaca")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED_SUFFIXES = tuple(
    kind + packed for kind in (".jsonl", ".json", ".csv") for packed in (".gz", ".zst")
)
# Suffixes of files that are not read, and what to do with them.
OTHER_SUFFIXES = {
    ".tsv": "Rename it to .csv: tabs are recognized.",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save it as .csv, in UTF-8."),
}
NOT_A_FILE = "is a directory, a pipe or a device; expected a file."
DATA_FORMS = (
    ".jsonl, .json, .csv (also .gz, .zst) and .parquet, directories and globs of them, Hub names (org/name), and "
    "path/to/file.py:function"
)
HUB_NAME = re.compile(r"[\w.\-]+/[\w.\-]+(:[\w.\-]+)?")
# such as train, or train[:5%] in the syntax of `datasets`
SPLIT_NAME = re.compile(r"\w+(\[[^\]/]*\])?")
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
# Dataset.save_to_disk writes one of these files
DATASETS_MARKER_FILES = ("dataset_dict.json", "state.json")


def is_url(name: str) -> bool:
    """Return whether fsspec must open `name`, such as `s3://bucket/my.jsonl`."""
    return "://" in name


def listed_names(text: str) -> list[str]:
    """Return the names of `a.jsonl,b.jsonl`; none if it is the name of one file, or a URL with
    commas."""
    names = [name.strip() for name in text.split(",")]
    urls = [is_url(name) for name in names]
    if len(names) == 1 or not all(names) or any(urls) != all(urls):
        return []
    return [] if os.path.exists(os.path.expanduser(text)) else names


def data_suffix(name: str) -> str:
    """Return the suffix that selects the reader, such as `.jsonl` for `my.jsonl.gz`; empty for
    other files."""
    without_query = name.partition("?")[0] if is_url(name) else name
    path = Path(without_query)
    last_two = "".join(path.suffixes[-2:]).lower()
    if last_two.endswith(COMPRESSED_SUFFIXES):
        return path.suffixes[-2].lower()
    suffix = path.suffix.lower()
    return suffix if suffix in DATA_SUFFIXES else ""


def kind_of_data(name: str) -> Kind:
    """Return the kind of dataset that a name means. A directory or file of that name comes before a
    built-in dataset. A name that does not exist is a Hub name if it looks like one."""
    if name == "demo":
        return "demo"
    path = expanded(name)
    exists = os.path.exists(path)  # Path.exists would raise an error without permission to look
    is_hub_name = HUB_NAME.fullmatch(name) is not None and not name.startswith(".")
    if name.removesuffix("_dataset") in READY_DATASETS and not exists:
        return "ready"
    if name.rpartition(":")[0].endswith(".py") or name.endswith(".py"):
        return "function"
    if is_url(name):
        return "url"
    if exists:
        if not os.path.isdir(path):
            return "file"
        return "extension" if door.holds_dataset(path) else "folder"
    if glob.has_magic(name):
        return "glob"
    return "hub" if is_hub_name and not data_suffix(name) else "file"


def has_splits(name: str) -> bool:
    """Return whether this dataset may have splits, such as train and test."""
    kind = kind_of_data(name)
    return kind in ("ready", "folder", "hub") or (kind == "url" and not data_suffix(name))


def is_split_of(validation: str, dataset: Any) -> bool:
    """Return whether `validation` names a split of `dataset`, not other data."""
    if not isinstance(dataset, str) or not has_splits(dataset):
        return False
    if SPLIT_NAME.fullmatch(validation) is None or os.path.exists(validation):
        return False
    # What has no other meaning is a "file"; the brackets of train[:5%] make it a "glob".
    return kind_of_data(validation) in ("file", "glob")


def data_files(folder: Path) -> Iterator[Path]:
    """Yield the data files in a directory and its subdirectories, sorted by path, without hidden
    files."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if data_suffix(path.name) and path.is_file() and not is_hidden:
            yield path


def globbed(pattern: str) -> list[str]:
    """Return the files that match the pattern, sorted by path."""
    paths = glob.glob(str(expanded(pattern)), recursive=True)
    return sorted(path for path in paths if Path(path).is_file())


def data_problem(name: str) -> str | None:
    """Return why `name` is not a dataset, as far as that is known without reading it, or None."""
    kind = kind_of_data(name)
    path = expanded(name)
    if kind == "function":
        file = expanded(name.rpartition(":")[0] or name)
        if not file.is_file():
            return "no such file."
        names_function = not name.endswith((".py", ":"))
        return None if names_function else f"which function? Write {file}:function."
    if kind == "folder":
        is_saved_dataset = any((path / marker).is_file() for marker in DATASETS_MARKER_FILES)
        if is_saved_dataset or any(data_files(path)):
            return None
        return f"is a directory without data files. Supported: {DATA_FORMS}."
    if kind == "glob":
        files = globbed(name)
        if files and all(data_suffix(file) for file in files):
            return None
        return f"matches no file, or not only {DATA_FORMS}."
    if kind != "file":  # known without reading: a built-in dataset, a URL, a Hub name
        return None
    has_data_suffix = data_suffix(name) != ""
    if path.exists():
        if not path.is_file():
            return NOT_A_FILE
        way_out = OTHER_SUFFIXES.get(path.suffix.lower(), f"Supported: {DATA_FORMS}.")
        return None if has_data_suffix else f"unknown suffix. {way_out}"
    if listed_names(name):
        return "no such file. Several validation sets have names: '{chat: a.jsonl, code: b.jsonl}'."
    if has_data_suffix:
        return missing_file(path)
    if percent := PERCENT.fullmatch(name):
        return f"expected a fraction of the samples: {float(percent[1]) / 100:g}."
    built_in = ", ".join(("demo", *READY_DATASETS))
    return f"is neither data nor a built-in dataset ({built_in}). Supported: {DATA_FORMS}."
