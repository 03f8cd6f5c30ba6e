"""The splits of a dataset that is files, here or remote, and what says that files have changed."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import xxhash

from llama_ft.config.data_names import SAVED_BY_DATASETS, data_files, data_suffix, globbed, is_url, kind_of_data
from llama_ft.data.hub_datasets import load_from_hub
from llama_ft.errors import UserError, reason

if TYPE_CHECKING:
    from datasets import Dataset

# As `datasets` tells them: a word in a file's or folder's name, between marks or digits.
SPLIT_WORDS = {"validation": "validation|valid|val|dev|eval|evaluation", "test": "test|testing"}
FIRST_CHOICE = ("validation", "test")  # of the splits that a dataset named by --validation may have
SAMPLED_FROM, SAMPLES, BLOCK = 2**31, 64, 2**22  # bytes; 2 GiB take a second to read


def splits_of(name: str) -> dict[str, Any]:
    """Split -> its files or Dataset; the split of data without splits is called ""."""
    kind, path = kind_of_data(name), Path(name).expanduser()
    if kind == "hub":
        return dict(load_from_hub(name, None))
    if kind == "file":
        return {"": [str(path)]}
    if kind == "glob":
        return {"": globbed(name)}
    if kind == "folder" and any((path / sign).is_file() for sign in SAVED_BY_DATASETS):
        return _saved_splits(name, path)
    files = _remote_files(name) if is_url(name) else [str(file) for file in data_files(path)]
    if len(files) == 1 and data_suffix(name):
        return {"": files}
    splits: dict[str, list[str]] = {}
    for file in files:
        inside = file.removeprefix(str(path)) if kind == "folder" else Path(file).name
        splits.setdefault(_split_of(inside), []).append(file)
    return {"": files} if set(splits) == {"train"} else splits


def _split_of(file: str) -> str:
    """The split that a file's path inside its folder speaks of."""
    for split, words in SPLIT_WORDS.items():
        if re.search(rf"(^|[-._ /0-9])({words})([-._ /0-9]|$)", file.lower()):
            return split
    return "train"


def _saved_splits(name: str, folder: Path) -> dict[str, "Dataset"]:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # of json, pyarrow and datasets: whatever is wrong with its files
        raise UserError(f"{name}: cannot be read as a folder that datasets saved: {reason(error)}.") from error
    return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"": saved}


def _remote_files(name: str) -> list[str]:
    """The files behind a URL, which may be a pattern or a folder."""
    if data_suffix(name) and not any(mark in name for mark in "*["):
        return [name]
    try:
        system, path = fsspec.core.url_to_fs(name)
        found = system.find(path) if name.endswith("/") else system.glob(path)
        files = [str(system.unstrip_protocol(file)) for file in sorted(found) if data_suffix(file)]
    except Exception as error:  # of any network library, or that none is installed for this kind of URL
        raise UserError(f"{name}: cannot be read: {reason(error)}.") from error
    if not files:
        raise UserError(f"{name}: no data files there.")
    return files


def best_for_validation(name: str, splits: list[str]) -> str:
    """Return the split that is validated on where none is named: the only one, or validation, or test.

    Raises:
        UserError: there are several others.
    """
    if len(splits) == 1:
        return splits[0]
    if best := next((split for split in FIRST_CHOICE if split in splits), None):
        return best
    raise UserError(f"--validation {name}: has no validation split. It has {', '.join(splits)}.")


def identity_of(files: Sequence[str]) -> str:
    """Their contents, wherever they lie; of files beyond SAMPLED_FROM bytes their size, time and some blocks, since
    each rank asks; of remote files what their server says: name, size, time, checksum."""
    digest = xxhash.xxh3_128()
    for name in files:
        try:
            if is_url(name):
                system, path = fsspec.core.url_to_fs(name)
                digest.update(str(sorted(system.info(path).items(), key=str)).encode())
                continue
            with open(name, "rb") as file:
                about = os.fstat(file.fileno())
                digest.update(f"{about.st_size}\n".encode())
                if about.st_size > SAMPLED_FROM:
                    digest.update(f"{about.st_mtime_ns}\n".encode())
                    for block in range(SAMPLES):
                        file.seek((about.st_size - BLOCK) * block // (SAMPLES - 1))
                        digest.update(file.read(BLOCK))
                    continue
                while data := file.read(BLOCK):
                    digest.update(data)
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {reason(error)}.") from None
        except Exception as error:
            if not is_url(name):
                raise
            raise UserError(f"{name}: cannot be read: {reason(error)}.") from error
    return digest.hexdigest()
