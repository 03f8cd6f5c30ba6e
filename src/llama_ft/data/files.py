"""Rows of .jsonl, .json, .csv and .parquet files, each with the place that an error message names.

A line that holds no usable row comes out as a `BadRow` in the row's stead, so that several can be reported together
or skipped; a file that cannot be read on at all raises UserError.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llama_ft.data.formats import BadRow, Row
from llama_ft.errors import UserError

Place = str
Rows = Iterator[tuple[Place, Row | BadRow]]
LARGEST_CSV_FIELD = 2**31 - 1  # bytes; Python's own limit of 131,072 is shorter than many chats


def rows_of_file(path: Path) -> Rows:
    """Yield (place, row) of a data file; the place is as in `my.jsonl:381`, `my.csv row 12` or `my.parquet row 3`.

    Raises:
        UserError: the file cannot be read, or is malformed beyond one row.
    """
    try:
        yield from READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _jsonl_rows(path: Path) -> Rows:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path}:{number}", _row_of_line(line)


def _row_of_line(line: bytes) -> Row | BadRow:
    try:
        value = json.loads(line.decode("utf-8").rstrip("\r\n"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return BadRow(f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; expected UTF-8 text.")
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} (column {error.colno}); expected one JSON object a line.")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}; expected one JSON object a line.")
    return _object_or_bad(value)


def _json_rows(path: Path) -> Rows:
    """Rows of a JSON array; a .json file that does not begin with [ is read as JSON lines."""
    with open(path, "rb") as file:
        beginning = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not beginning.startswith(b"["):
        yield from _jsonl_rows(path)
        return
    text = _whole_text(path)
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = _skip_blanks(text, text.index("[") + 1)
    line, counted_to, row_number = 1, 0, 0
    try:
        while not text.startswith("]", position):
            row_number += 1
            line, counted_to = line + text.count("\n", counted_to, position), position
            value, position = decoder.raw_decode(text, position)
            yield f"{path}:{line} (row {row_number})", _object_or_bad(value)
            position = _skip_blanks(text, position)
            if text.startswith(",", position):
                position = _skip_blanks(text, position + 1)
            elif not text.startswith("]", position):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        if (rest := _skip_blanks(text, position + 1)) < len(text):
            raise json.JSONDecodeError("Extra data after the array", text, rest)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: malformed JSON: {error.msg} (column {error.colno}).\nExpected an array of objects."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{line} (row {row_number}): malformed JSON: {error}.") from None


def _whole_text(path: Path) -> str:
    """The file's text. An array is parsed row by row, but its text is held: large data are better kept as .jsonl."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8.\nExpected a file of UTF-8 text."
        ) from None


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _object_or_bad(value: Any) -> Row | BadRow:
    if isinstance(value, dict):
        return value
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return BadRow(f"the row is {names.get(type(value), 'null')}; expected a JSON object.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _csv_rows(path: Path) -> Rows:
    default_limit = csv.field_size_limit(LARGEST_CSV_FIELD)
    row_number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, [])
            for values in reader:
                if not values:
                    continue  # a blank line
                row_number += 1
                yield f"{path} row {row_number}", _csv_row(columns, values)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte 0x{error.object[error.start]:02x} after row {row_number} is not UTF-8.\n"
            "Expected a file of UTF-8 text."
        ) from None
    except csv.Error as error:
        raise UserError(f"{path} row {row_number + 1}: malformed CSV: {error}.") from None
    finally:
        csv.field_size_limit(default_limit)


def _csv_row(columns: list[str], values: list[str]) -> Row | BadRow:
    if len(values) != len(columns):
        return BadRow(f"the row has {len(values)} fields; expected {len(columns)}, as in the header.")
    return dict(zip(columns, values, strict=True))


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    row_number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    row_number += 1
                    yield f"{path} row {row_number}", row
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file after row {row_number}: {reason}") from None


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
