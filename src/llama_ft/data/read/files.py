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
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, AnyStr

import fsspec
import pyarrow
import pyarrow.parquet

from llama_ft.config.data_names import data_suffix, is_url
from llama_ft.data.read.formats import BadSample, Sample
from llama_ft.data.read.values import TOO_DEEP
from llama_ft.errors import UserError, reason

Samples = Iterator[tuple[str, Sample | BadSample]]  # (place, sample)
ReadSamples = Callable[[str], Iterator[tuple[str, Any]]]  # of a file, before their type is checked
LONGEST_FIELD = 2**27  # bytes in a CSV file; Python's default, 131,072, is too short for many chats
LONGEST_LINE = 2**26  # bytes of a sample in JSON, decompressed
LONGEST_HEADER = 4096  # bytes of a .csv file that are read to find its delimiter
MOST_BLANK_LINES = 100_000  # one after another; 300 MB of them fit into 300 kB of gzip
DEEPEST = 100  # objects and lists inside each other
OVER_LINES = "it is JSON over several lines; expected one object per line, or an array of objects"
QUOTED = re.compile(r'"(?:[^"]|"")*(?:"|$)')  # a field of a .csv file, perhaps cut off
EXCEL_SEPARATOR = re.compile(r'\ufeff?"?sep=(.)"?\r?\n')  # Excel's first line, before the header
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
    except UserError:
        raise
    except Exception as error:  # of the disk, a decoder, pyarrow or a network library
        after = f" after {place}" if place else ""
        way_out = ""
        if isinstance(error, UnicodeError):
            way_out = "\nConvert it to UTF-8: iconv -f cp1252 -t utf-8."
        raise UserError(f"{name}: cannot be read{after}: {reason(error)}.{way_out}") from error


def numbered(
    name: str,
    samples: Iterable[Sample],
    schema: pyarrow.Schema | None = None,
    decode: Callable[[Any], Any] = lambda value: value,
) -> Samples:
    """Yield the samples of a columnar source with their places, without nested nulls.

    In columnar data, every nested object has the keys of all objects; null fills the missing ones.
    Values of the type arrow.json, `datasets`' Json, have keys of their own and keep their nulls.

    Args:
        name: of the source.
        samples: column -> value.
        schema: of the columns, to find those with arrow.json.
        decode: makes the value of one of these.
    """
    kinds = {column.name: column.type for column in schema or () if _holds_json(column.type)}
    for number, sample in enumerate(samples, start=1):
        place = f"{name} row {number}"
        values = {}
        try:
            for column, value in sample.items():
                kind = kinds.get(column)
                values[column] = _typed(value, kind, decode) if kind else _pruned(value)
        except (ValueError, RecursionError) as error:
            yield place, BadSample(f'"{column}" is not JSON: {error}.')
            continue
        yield place, BadSample(TOO_DEEP) if kinds and _is_deep(values) else values


def _holds_json(kind: pyarrow.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return isinstance(kind, pyarrow.JsonType) or any(map(_holds_json, inner))


def _typed(value: Any, kind: pyarrow.DataType, decode: Callable[[Any], Any]) -> Any:
    """Return a value of a type with arrow.json inside as `numbered` says."""
    if value is None:
        return None
    if not _holds_json(kind):
        return _pruned(value)
    if isinstance(kind, pyarrow.JsonType):
        return decode(value)
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {
            key: _typed(inner, kinds[key], decode)
            for key, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [_typed(inner, kind.field(0).type, decode) for inner in value]
    return value


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
                is_deep = _is_deep(sample)
                yield f"{name} row {number}", BadSample(TOO_DEEP) if is_deep else sample
            return
        # A limit, since a file without line breaks would be read as one line. One byte more than
        # the limit shows that the line is longer. readline returns b"" at the end of the file.
        read_line = partial(file.readline, LONGEST_LINE + 1)
        is_first = True
        for number, line in enumerate(_limited(iter(read_line, b"")), start=1):
            if len(line) > LONGEST_LINE:
                raise ValueError(f"line {number} is longer than {LONGEST_LINE:,} bytes")
            text = line.strip()
            if not text:
                continue
            sample = _sample_of_line(text)
            if is_first and isinstance(sample, BadSample):
                _refuse_several_lines(name)
            is_first = False
            yield f"{name}:{number}", sample


def _limited(lines: Iterable[AnyStr]) -> Iterator[AnyStr]:
    """Yield all lines. Raises ValueError if too many blank ones follow each other."""
    blank = 0
    for line in lines:
        blank = blank + 1 if line.isspace() else 0
        if blank > MOST_BLANK_LINES:
            raise ValueError(f"it has more than {MOST_BLANK_LINES:,} blank lines after each other")
        yield line


def _sample_of_line(line: bytes) -> Any:
    try:
        sample = json.loads(line)
    except RecursionError:
        return BadSample(TOO_DEEP)
    except ValueError as error:
        what = str(error)
        if "set_int_max_str_digits" in what:
            what = "a number has more than 4,300 digits"
        return BadSample(f"malformed JSON: {what}; expected one JSON object per line, in UTF-8.")
    # Counting is fast, and few samples have so many.
    if line.count(b"[") + line.count(b"{") > DEEPEST and _is_deep(sample):
        return BadSample(TOO_DEEP)
    return sample


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects inside of a value are nested deeper than DEEPEST."""
    inside = [value]
    for _ in range(DEEPEST):
        of_next = list[Any]()
        for each in inside:
            if isinstance(each, dict):
                of_next += each.values()
            elif isinstance(each, list):
                of_next += each
        inside = of_next
        if not inside:
            return False
    return True


def _refuse_several_lines(name: str) -> None:
    """Raise UserError if a file whose first line is not JSON begins with an object over several
    lines."""
    with _opened(name) as file:
        text = file.read(LONGEST_LINE).decode("utf-8-sig", errors="replace").lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return  # its lines are reported one by one
    if "\n" not in text[:end]:
        return
    lists = [key for key in value if is_list_of_objects(value[key])]
    way_out = "jq -c ."
    if lists:
        way_out = f"jq -c '.{lists[0]}[]'"
    raise UserError(f"{name}: {OVER_LINES}.\n{way_out} {name} > lines.jsonl converts it.")


def columns_of_first(files: Iterable[str]) -> set[str]:
    """Return the columns of the first sample of each file."""
    columns = set[str]()
    for file in files:
        _, sample = next(samples_of_file(file), ("", BadSample()))
        columns |= set() if isinstance(sample, BadSample) else set(sample)
    return columns


def whole_object(name: str) -> dict[str, Any] | None:
    """Return the object that a .json file consists of; None if it has several, or is an array of
    objects. A file with another value, such as a list of texts, counts as an empty object."""
    try:
        with _opened(name) as file:
            content = file.read(LONGEST_LINE + 1)
        if len(content) > LONGEST_LINE:
            return None
        text = content.decode("utf-8-sig").strip()
        if re.match(r"\[\s*[{\]]", text):
            return None
        value = json.loads(text)
    except (OSError, ValueError, RecursionError):  # its samples are read later, and reported
        return None
    return value if isinstance(value, dict) else {}


def is_list_of_objects(value: Any) -> bool:
    """Return whether a value is a list of objects, as samples are."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _csv_samples(name: str) -> Samples:
    csv.field_size_limit(LONGEST_FIELD)  # not reset, because another file may be open
    with _opened(name) as file:
        beginning = file.peek(LONGEST_HEADER)[:LONGEST_HEADER].decode(errors="replace")
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        if excel := EXCEL_SEPARATOR.match(beginning):
            text.readline()
            delimiter = excel[1]
        else:
            header = QUOTED.sub("", beginning).partition("\n")[0]
            delimiter = max(",;\t|", key=header.count)  # a comma if none of them occurs
        reader = csv.DictReader(_limited(text), strict=True, delimiter=delimiter)
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
        yield from numbered(name, samples, file.schema_arrow, json.loads)


READERS: dict[str, ReadSamples] = {
    ".jsonl": _json_samples,
    ".json": _json_samples,
    ".csv": _csv_samples,
    ".parquet": _parquet_samples,
}
