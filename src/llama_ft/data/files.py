"""Rows of data files, here or wherever fsspec reads, each with the place that an error message names.

A line that holds no usable row comes out as a `BadRow` in the row's stead, so that several can be reported together
or skipped; a file that cannot be read on at all raises UserError. Memory holds a few rows at a time, of a JSON array
the text of all.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llama_ft.config.data_names import data_suffix, is_url
from llama_ft.data.formats import BadRow, Row
from llama_ft.errors import UserError, reason

Place = str
Rows = Iterator[tuple[Place, Row | BadRow]]
LONGEST_LINE = 2**27  # bytes; 10 million characters, the longest text of a row, take at most 120 million as JSON
BATCH_BYTES = 2**24  # of a columnar file turned into Python objects at a time
BLANKS = re.compile(r"[ \t\r\n]*")


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
    except pyarrow.ArrowException as error:
        kind = data_suffix(name).removeprefix(".")
        raise UserError(f"{name}: not a readable {kind} file{_after(place)}: {reason(error)}.") from None
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{name}: {byte} is not UTF-8{_after(place)}.\nExpected a file of UTF-8 text.") from None
    except (OSError, EOFError, zlib.error) as error:  # missing, not allowed, or a .gz or .zst that is cut off
        raise UserError(f"{name}: cannot be read{_after(place)}: {reason(error)}.") from None
    except Exception as error:
        if not is_url(name):
            raise  # only network libraries have errors of their own
        raise UserError(f"{name}: cannot be read{_after(place)}: {reason(error)}.") from error


def _after(place: str) -> str:
    return f" after {place}" if place else ""


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
    """Rows of a JSON array where the file begins with [, else of one object a line, whatever the suffix says."""
    with _opened(name) as file:
        if file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _array_rows(name, file)
            return
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)  # one of 1 GiB takes 1 MiB in a .gz: it is not read whole
            if len(line) > LONGEST_LINE:
                raise UserError(f"{name}:{number}: the line has over {LONGEST_LINE:,} bytes.\nExpected shorter rows.")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield f"{name}:{number}", _row_of_line(line)
            elif not line:
                return


def _row_of_line(line: bytes) -> Row | BadRow:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return BadRow(f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; expected UTF-8 text.")
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} (column {error.colno}); expected one JSON object a line.")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}; expected one JSON object a line.")
    return _object_or_bad(value)


def _array_rows(name: str, file: io.BufferedReader) -> Rows:
    """Rows of a JSON array. Its text is in memory as a whole, its rows one at a time."""
    text = file.read().decode("utf-8-sig")
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position, line = _after_blanks(text, text.index("[") + 1), 1
    row_number = counted_to = 0
    has_more = not text.startswith("]", position)
    try:
        while has_more:
            row_number += 1
            line, counted_to = line + text.count("\n", counted_to, position), position
            value, position = decoder.raw_decode(text, position)
            yield f"{name}:{line} (row {row_number})", _object_or_bad(value)
            position = _after_blanks(text, position)
            has_more = text.startswith(",", position)
            position = _after_blanks(text, position + has_more)
        if not text.startswith("]", position):
            raise json.JSONDecodeError("expecting ',' or ']'", text, position)
        if _after_blanks(text, position + 1) < len(text):
            raise json.JSONDecodeError("extra data after the array", text, position + 1)
    except (ValueError, RecursionError) as error:
        at = error.lineno if isinstance(error, json.JSONDecodeError) else line
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{name}:{at}: malformed JSON: {what}.\nExpected an array of objects.") from None


def _after_blanks(text: str, position: int) -> int:
    match = BLANKS.match(text, position)
    return match.end() if match else position


def _object_or_bad(value: Any) -> Row | BadRow:
    if isinstance(value, dict):
        return value
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return BadRow(f"the row is {names.get(type(value), 'null')}; expected a JSON object.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _csv_rows(name: str) -> Rows:
    # Python's own limit of 131,072 is shorter than many chats. It is one of the process: set back, it would hit another
    # file that is being read.
    csv.field_size_limit(LONGEST_LINE)
    row_number = 0
    try:
        with _opened(name) as file:
            reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
            columns = next(reader, [])
            if len(set(columns)) < len(columns):
                raise UserError(f"{name}: its header, {', '.join(columns)}, has a name twice; expected different ones.")
            for values in reader:
                if not values:
                    continue  # a blank line
                row_number += 1
                yield f"{name} row {row_number}", _csv_row(columns, values)
    except csv.Error as error:
        raise UserError(f"{name} row {row_number + 1}: malformed CSV: {error}.") from None


def _csv_row(columns: list[str], values: list[str]) -> Row | BadRow:
    if len(values) != len(columns):
        return BadRow(f"the row has {len(values)} fields; expected {len(columns)}, as in the header.")
    return dict(zip(columns, values, strict=True))


def _parquet_rows(name: str) -> Rows:
    with _arrow_file(name) as opened, pyarrow.parquet.ParquetFile(opened) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        yield from _batch_rows(name, file.iter_batches(batch_size=max(1, min(1000, BATCH_BYTES // (row_bytes + 1)))))


def _arrow_rows(name: str) -> Rows:
    """Rows of an Arrow file, or of the stream that `datasets` writes."""
    with _arrow_file(name) as file:
        begins = bytes(file.read(6))
        file.seek(0)
        if begins == b"ARROW1":
            whole = pyarrow.ipc.open_file(file)
            yield from _batch_rows(name, map(whole.get_batch, range(whole.num_record_batches)))
        else:
            yield from _batch_rows(name, pyarrow.ipc.open_stream(file))


def _arrow_file(name: str) -> Any:
    return pyarrow.PythonFile(fsspec.open(name, "rb").open(), "r") if is_url(name) else pyarrow.memory_map(name)


def _batch_rows(name: str, batches: Iterator[Any]) -> Rows:
    row_number = 0
    for batch in batches:
        at_once = max(1, min(1000, BATCH_BYTES * batch.num_rows // (batch.nbytes + 1)))
        for start in range(0, batch.num_rows, at_once):
            for row in batch.slice(start, at_once).to_pylist():
                row_number += 1
                yield f"{name} row {row_number}", without_nulls(row)


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
    ".arrow": _arrow_rows,
}
