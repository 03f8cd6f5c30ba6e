"""Samples of data files, here or wherever fsspec reads, each with the place that an error message names.

A line that holds no usable sample comes out as a `BadRow` in its stead, so that several can be reported together or
skipped. Memory holds a few samples at a time, of a JSON array all of them.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

from llama_ft.config.data_names import data_suffix, is_url
from llama_ft.data.formats import BadRow, Row
from llama_ft.errors import UserError, reason

Rows = Iterator[tuple[str, Row | BadRow]]  # each with its place
LONGEST_LINE = 2**27  # bytes; the longest text of a sample, 10 million characters, takes at most 120 million as JSON
LONGEST_FIELD = 2**27  # bytes of a CSV field; Python's own limit of 131,072 is shorter than many chats
ROWS_AT_ONCE, BATCH_BYTES = 64, 2**24  # of a columnar file turned into Python objects


def rows_of_file(path: Path | str) -> Rows:
    """Yield (place, row) of a data file; the place is as in `my.jsonl:381`, `my.csv row 12` or `my.parquet row 3`.

    Args:
        path: a file, or a URL that fsspec reads.

    Raises:
        UserError: the file cannot be read, or is malformed beyond one row.
    """
    name, place = str(path), ""
    try:
        for place, row in READERS[data_suffix(name)](name):
            yield place, row
    except UserError:
        raise
    except Exception as error:  # of a disk, a decoder, pyarrow or any network library
        after = f" after {place}" if place else ""
        raise UserError(f"{name}: cannot be read{after}: {reason(error)}.") from error


@contextmanager
def _opened(name: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed."""
    with fsspec.open(name, "rb").open() if is_url(name) else open(name, "rb") as file:
        if name.endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)
        elif name.endswith(".zst"):
            file = pyarrow.CompressedInputStream(file, "zstd")
        yield file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)


def _json_rows(name: str) -> Rows:
    """Rows of a JSON array where the file begins with [, else of one object per line, whatever the suffix says."""
    with _opened(name) as file:
        if file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            values = json.loads(file.read().decode("utf-8-sig"), parse_constant=_refuse_constant)
            for number, value in enumerate(values, start=1):
                yield f"{name} row {number}", _object_or_bad(value)
            return
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")  # one of 1 GiB takes 1 MiB in a .gz
        for number, line in enumerate(lines, start=1):
            if len(line) > LONGEST_LINE:
                raise UserError(f"{name}:{number}: the line has over {LONGEST_LINE:,} bytes.")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield f"{name}:{number}", _row_of_line(line)


def _row_of_line(line: bytes) -> Row | BadRow:
    try:
        return _object_or_bad(json.loads(line.rstrip(b"\r\n").decode("utf-8"), parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        return BadRow(f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; expected UTF-8 text.")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}; expected one JSON object per line.")


def _object_or_bad(value: Any) -> Row | BadRow:
    return value if isinstance(value, dict) else BadRow(f"the row is {str(value)[:40]}; expected a JSON object.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _csv_rows(name: str) -> Rows:
    csv.field_size_limit(LONGEST_FIELD)  # for good: set back, it would hit another file that is being read
    with _opened(name) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        columns = next(reader, [])
        for number, values in enumerate(filter(None, reader), start=1):  # without blank lines
            row: Row | BadRow = dict(zip(columns, values, strict=False))
            if len(values) != len(columns):
                row = BadRow(f"the row has {len(values)} fields; expected {len(columns)}, as in the header.")
            yield f"{name} row {number}", row


def _parquet_rows(name: str) -> Rows:
    opened = fsspec.open(name, "rb").open() if is_url(name) else name
    with pyarrow.parquet.ParquetFile(opened, memory_map=True) as file:
        of_groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        row_bytes = sum(group.total_byte_size for group in of_groups) // max(1, file.metadata.num_rows) + 1
        batches = file.iter_batches(batch_size=max(1, min(ROWS_AT_ONCE, BATCH_BYTES // row_bytes)))
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, start=1):
            yield f"{name} row {number}", without_nulls(row)


def without_nulls(row: Row) -> Row:
    """Take nested nulls out of a row of a columnar file: there every object has the keys of all others too."""
    return {column: _pruned(value) for column, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_pruned(inner) for inner in value]
    return value


READERS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
