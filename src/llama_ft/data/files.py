"""Read samples from data files, local or remote (fsspec). Each sample has a place for error
messages.

A line without a valid sample yields a `BadSample` instead, so that several can be reported or skipped.
Only a few samples are in memory at a time; a JSON array is read as a whole.
"""

import codecs
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

from llama_ft.config.data_names import data_suffix, is_url
from llama_ft.data.formats import BadSample, Sample
from llama_ft.errors import UserError, reason

Samples = Iterator[tuple[str, Sample | BadSample]]  # (place, sample)
ReadSamples = Callable[[str], Iterator[tuple[str, Any]]]  # of a file, before their type is checked
LONGEST_FIELD = 2**27  # bytes in a CSV file; Python's default, 131,072, is too short for many chats
LONGEST_LINE = 2**26  # bytes of a sample in JSON, decompressed
LONGEST_HEADER = 4096  # bytes of a .csv file that are read to find its delimiter
ROWS_AT_ONCE = 64  # rows of a columnar file converted to Python objects at once


def samples_of_file(path: Path | str) -> Samples:
    """Yield (place, sample) of a data file. A place is `my.jsonl:381`, `my.csv row 12` or
    `my.parquet row 3`.

    Args:
        path: a file, or a URL that fsspec can read.

    Raises:
        UserError: the file cannot be read, or is malformed in more than one sample.
    """
    name = str(path)
    place = ""
    try:
        read = READERS[data_suffix(name)]
        for place, sample in read(name):
            if not isinstance(sample, dict | BadSample):
                sample = BadSample(f"{str(sample)[:40]} is not a JSON object.")
            yield place, sample
    except Exception as error:  # of the disk, a decoder, pyarrow or a network library
        after = f" after {place}" if place else ""
        way_out = ""
        if isinstance(error, UnicodeError):
            way_out = "\nConvert it to UTF-8: iconv -f cp1252 -t utf-8."
        raise UserError(f"{name}: cannot be read{after}: {reason(error)}.{way_out}") from error


def numbered(name: str, samples: Iterable[Sample]) -> Samples:
    """Yield the samples of a columnar source with their places, without nested nulls.

    In columnar data, every nested object has the keys of all objects; null fills the missing ones.
    """
    for number, sample in enumerate(samples, start=1):
        yield f"{name} row {number}", {column: _pruned(value) for column, value in sample.items()}


def _pruned(value: Any) -> Any:
    """Return a value without the nulls of nested objects. Texts and lists of numbers stay as they
    are."""
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_pruned(inner) for inner in value]
    return value


@contextmanager
def _opened(name: str) -> Iterator[io.BufferedReader]:
    """Open a file for reading: decompressed, and UTF-16 (found by its first two bytes) converted to
    UTF-8."""
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix)
    with _opened_bytes(name) as raw:
        stream = pyarrow.CompressedInputStream(raw, codec) if codec else raw
        # The readers need peek and readline, which only a BufferedReader has.
        file = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            text = file.read().decode("utf-16")
            file = io.BufferedReader(io.BytesIO(text.encode()))
        yield file


def _opened_bytes(name: str) -> Any:
    """Open a file or URL as it is."""
    if is_url(name):
        return fsspec.open(name, "rb").open()
    return open(name, "rb")


def _json_samples(name: str) -> Samples:
    """Yield the samples of a JSON array if the file begins with [, otherwise of one object per
    line, for any suffix."""
    with _opened(name) as file:
        beginning = file.peek(64).removeprefix(codecs.BOM_UTF8)
        if beginning.lstrip().startswith(b"["):
            samples = json.loads(file.read())
            for number, sample in enumerate(samples, start=1):
                yield f"{name} row {number}", sample
            return
        # A limit, since a file without line breaks would be read as one line. One byte more than
        # the limit shows that the line is longer. readline returns b"" at the end of the file.
        read_line = partial(file.readline, LONGEST_LINE + 1)
        for number, line in enumerate(iter(read_line, b""), start=1):
            if len(line) > LONGEST_LINE:
                raise ValueError(f"line {number} is longer than {LONGEST_LINE:,} bytes")
            text = line.strip()
            if text:
                yield f"{name}:{number}", _sample_of_line(text)


def _sample_of_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadSample(f"malformed JSON: {error}; expected one JSON object per line, in UTF-8.")


def _csv_samples(name: str) -> Samples:
    csv.field_size_limit(LONGEST_FIELD)  # not reset, because another file may be open
    with _opened(name) as file:
        header = file.peek(LONGEST_HEADER).partition(b"\n")[0].decode(errors="replace")
        delimiter = max(",;\t|", key=header.count)  # a comma if none of them occurs
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.DictReader(text, strict=True, delimiter=delimiter)
        for number, sample in enumerate(reader, start=1):
            # DictReader puts fields that are too many under the key None, and fills missing ones
            # with the value None.
            if None in sample or None in sample.values():
                yield f"{name} row {number}", BadSample("its fields do not match the header.")
            else:
                yield f"{name} row {number}", sample


def _parquet_samples(name: str) -> Samples:
    local_or_open = fsspec.open(name, "rb").open() if is_url(name) else name
    with pyarrow.parquet.ParquetFile(local_or_open, memory_map=True) as file:
        batches = file.iter_batches(batch_size=ROWS_AT_ONCE)
        samples = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from numbered(name, samples)


READERS: dict[str, ReadSamples] = {
    ".jsonl": _json_samples,
    ".json": _json_samples,
    ".csv": _csv_samples,
    ".parquet": _parquet_samples,
}
