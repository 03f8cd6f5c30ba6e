"""Read samples from data files, local or remote (fsspec). Each sample has a place for error
messages.

A line without a valid sample yields a `BadRow` instead, so that several can be reported or skipped.
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
from llama_ft.data.formats import BadRow, Row
from llama_ft.errors import UserError, reason

Rows = Iterator[tuple[str, Row | BadRow]]  # (place, sample)
LONGEST_FIELD = 2**27  # bytes in a CSV file; Python's default, 131,072, is too short for many chats
LONGEST_LINE = 2**26  # bytes of a sample in JSON, decompressed
LONGEST_HEADER = 4096  # bytes of a .csv file that are read to find its delimiter
ROWS_AT_ONCE = 64  # rows of a columnar file converted to Python objects at once


def rows_of_file(path: Path | str) -> Rows:
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
        for place, row in READERS[data_suffix(name)](name):
            yield (
                place,
                row
                if isinstance(row, dict | BadRow)
                else BadRow(f"{str(row)[:40]} is not a JSON object."),
            )
    except Exception as error:  # of the disk, a decoder, pyarrow or a network library
        after = f" after {place}" if place else ""
        way_out = (
            "\nConvert it to UTF-8: iconv -f cp1252 -t utf-8."
            if isinstance(error, UnicodeError)
            else ""
        )
        raise UserError(f"{name}: cannot be read{after}: {reason(error)}.{way_out}") from error


def numbered(name: str, rows: Iterable[Row]) -> Rows:
    """Yield the samples of a columnar source with their places, without nested nulls.

    In columnar data, every nested object has the keys of all objects; null fills the missing ones.
    """
    for number, row in enumerate(rows, start=1):
        yield f"{name} row {number}", {column: _pruned(value) for column, value in row.items()}


def _pruned(value: Any) -> Any:
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
    with fsspec.open(name, "rb").open() if is_url(name) else open(name, "rb") as raw:
        stream = pyarrow.CompressedInputStream(raw, codec) if codec else raw
        file = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            file = io.BufferedReader(io.BytesIO(file.read().decode("utf-16").encode()))
        yield file


def _json_rows(name: str) -> Rows:
    """Yield the samples of a JSON array if the file begins with [, otherwise of one object per
    line, for any suffix."""
    with _opened(name) as file:
        if file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from (
                (f"{name} row {number}", row)
                for number, row in enumerate(json.loads(file.read()), start=1)
            )
            return
        lines = iter(partial(file.readline, LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > LONGEST_LINE:
                raise ValueError(f"line {number} is longer than {LONGEST_LINE:,} bytes")
            if text := line.strip():
                yield f"{name}:{number}", _row_of_line(text)


def _row_of_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}; expected one JSON object per line, in UTF-8.")


def _csv_rows(name: str) -> Rows:
    csv.field_size_limit(LONGEST_FIELD)  # not reset, because another file may be open
    with _opened(name) as file:
        header = file.peek(LONGEST_HEADER).partition(b"\n")[0].decode(errors="replace")
        delimiter = max(",;\t|", key=header.count)  # a comma if none of them occurs
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.DictReader(text, strict=True, delimiter=delimiter)
        for number, row in enumerate(reader, start=1):
            is_row = None not in row and None not in row.values()
            yield (
                f"{name} row {number}",
                row if is_row else BadRow("its fields do not match the header."),
            )


def _parquet_rows(name: str) -> Rows:
    local_or_open = fsspec.open(name, "rb").open() if is_url(name) else name
    with pyarrow.parquet.ParquetFile(local_or_open, memory_map=True) as file:
        batches = file.iter_batches(batch_size=ROWS_AT_ONCE)
        yield from numbered(
            name, itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        )


READERS: dict[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
