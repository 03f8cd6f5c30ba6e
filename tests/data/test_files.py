"""Reading files, and the places that messages name."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llama_ft.data.files import rows_of_file
from llama_ft.data.formats import BadRow
from llama_ft.errors import UserError


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_jsonl_counts_blank_lines_and_takes_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path / "my.jsonl", b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\n  \n{"a": 2}')
    assert list(rows_of_file(path)) == [(f"{path}:1", {"a": "é"}), (f"{path}:4", {"a": 2})]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"a": 1,}', "malformed JSON: "),
        (b'{"a": "x', "malformed JSON: Unterminated string starting at (column 7); expected one JSON object a line."),
        (b'{"a": NaN}', "malformed JSON: NaN is no JSON value"),
        (b'{"a": "\xff"}', "byte 0xff at column 8 is not UTF-8"),
        (b"[1, 2]", "the row is an array; expected a JSON object."),
        (b"null", "the row is null; expected a JSON object."),
        (b"[" * 100_000, "malformed JSON: "),
    ],
)
def test_unusable_line_of_jsonl_is_told_and_the_next_is_read(tmp_path: Path, line: bytes, text: str) -> None:
    path = written(tmp_path / "my.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    (_, first), (place, problem), (_, third) = rows_of_file(path)
    assert (first, third) == ({"a": 1}, {"a": 3})
    assert place == f"{path}:2"
    assert isinstance(problem, BadRow) and str(problem).startswith(text)


def test_json_array_names_line_and_row(tmp_path: Path) -> None:
    path = written(tmp_path / "my.json", json.dumps([{"a": 1}, {"a": [2]}, 3], indent=1))
    rows = list(rows_of_file(path))
    assert rows[:2] == [(f"{path}:2 (row 1)", {"a": 1}), (f"{path}:5 (row 2)", {"a": [2]})]
    assert str(rows[2][1]) == "the row is a number; expected a JSON object."


def test_json_file_of_one_object_a_line_is_read_too(tmp_path: Path) -> None:
    path = written(tmp_path / "my.json", '{"a": 1}\n{"a": 2}\n')
    assert [row for _, row in rows_of_file(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("content", ["[]", " [ ] \n", ""])
def test_json_without_rows_has_none(tmp_path: Path, content: str) -> None:
    assert list(rows_of_file(written(tmp_path / "my.json", content))) == []


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[{"a": 1}\n{"a": 2}]', 2),
        ('[{"a": 1},\n{"a": 2}', 2),
        ('[{"a": 1},\n{"a"}]', 2),
        ('[\n\n{"a": 1}] x', 3),
        (b'[{"a": 1},\n\n{"a": "\xff"}]', 3),
    ],
)
def test_malformed_json_array_names_the_line(tmp_path: Path, content: bytes | str, line: int) -> None:
    path = written(tmp_path / "my.json", content)
    with pytest.raises(UserError) as caught:
        list(rows_of_file(path))
    assert caught.value.messages[0].startswith(f"{path}:{line}: ")


def test_csv_counts_rows_after_the_header(tmp_path: Path) -> None:
    path = written(tmp_path / "my.csv", '\ufeffinstruction,output\n"Hi,\nyou",yes\n\nHi,no\n')
    assert list(rows_of_file(path)) == [
        (f"{path} row 1", {"instruction": "Hi,\nyou", "output": "yes"}),
        (f"{path} row 2", {"instruction": "Hi", "output": "no"}),
    ]


def test_csv_takes_fields_longer_than_pythons_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "my.csv", "instruction,output\nHi," + "y" * 200_000 + "\n")
    assert len(next(rows_of_file(path))[1]["output"]) == 200_000


def test_csv_row_of_too_many_fields_is_told(tmp_path: Path) -> None:
    (_, problem), (_, good) = rows_of_file(written(tmp_path / "my.csv", "a,b\n1,2,3\n1,2\n"))
    assert str(problem) == "the row has 3 fields; expected 2, as in the header."
    assert good == {"a": "1", "b": "2"}


@pytest.mark.parametrize(("content", "text"), [('a,b\n1,2\n"x,3\n', " row 2: malformed CSV"), (b"a\n\xff\n", "0xff")])
def test_malformed_csv_is_told(tmp_path: Path, content: bytes | str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        list(rows_of_file(written(tmp_path / "my.csv", content)))
    assert text in caught.value.messages[0]


def test_parquet_gives_chats_as_lists_and_counts_rows(tmp_path: Path) -> None:
    path = tmp_path / "my.parquet"
    rows = [{"messages": [{"role": "user", "content": f"Hi {number}"}]} for number in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = list(rows_of_file(path))
    assert [row for _, row in read] == rows
    assert read[-1][0] == f"{path} row 2500"


def test_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a readable parquet file"):
        list(rows_of_file(written(tmp_path / "my.parquet", "PAR1 is not enough")))
