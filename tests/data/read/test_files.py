"""Reading files, and the places that messages name."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from llama_ft.data.read.files import LONGEST_LINE, numbered, samples_of_file
from llama_ft.data.read.formats import BadSample
from llama_ft.errors import UserError


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_jsonl_counts_blank_lines_and_takes_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path / "my.jsonl", b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\n  \n{"a": 2}')
    assert list(samples_of_file(path)) == [(f"{path}:1", {"a": "é"}), (f"{path}:4", {"a": 2})]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"a": 1,}', "malformed JSON: "),
        (b'{"a": "x', "malformed JSON: Unterminated string starting at"),
        (b'{"a": "\xff"}', "malformed JSON: 'utf-8' codec can't decode byte 0xff in position 7"),
        (b"[1, 2]", "[1, 2] is not a JSON object."),
        (b"null", "None is not a JSON object."),
        (b"[" * 100_000, "it is nested too deeply."),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "it is nested too deeply."),
        (b'{"a": ' + b"9" * 5_001 + b"}", "malformed JSON: a number has more than 4,300 digits;"),
    ],
)
def test_a_malformed_line_of_jsonl_is_reported_and_the_next_one_is_read(
    tmp_path: Path, line: bytes, text: str
) -> None:
    path = written(tmp_path / "my.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    (_, first), (place, problem), (_, third) = samples_of_file(path)
    assert (first, third) == ({"a": 1}, {"a": 3})
    assert place == f"{path}:2"
    assert isinstance(problem, BadSample) and str(problem).startswith(text)


def test_json_array_counts_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "my.json", json.dumps([{"a": 1}, {"a": [2]}, 3], indent=1))
    samples = list(samples_of_file(path))
    assert samples[:2] == [(f"{path} row 1", {"a": 1}), (f"{path} row 2", {"a": [2]})]
    assert isinstance(samples[2][1], BadSample)
    path.write_text('{"a": 1}\n{"a": 2}\n')  # or one object per line
    assert [sample for _, sample in samples_of_file(path)] == [{"a": 1}, {"a": 2}]
    assert (
        list(samples_of_file(written(path, " [ ] \n")))
        == list(samples_of_file(written(path, "")))
        == []
    )


def test_csv_counts_rows_after_the_header(tmp_path: Path) -> None:
    path = written(
        tmp_path / "my.csv",
        '\ufeffinstruction,output\n"Hi,\nyou",yes\n\nHi,' + "y" * 200_000 + "\n",
    )
    assert list(samples_of_file(path)) == [
        (f"{path} row 1", {"instruction": "Hi,\nyou", "output": "yes"}),
        (f"{path} row 2", {"instruction": "Hi", "output": "y" * 200_000}),
    ]


def test_a_csv_row_with_other_fields_than_the_header_is_reported(tmp_path: Path) -> None:
    (_, problem), (_, too_few), (_, good) = samples_of_file(
        written(tmp_path / "my.csv", "a,b\n1,2,3\n1\n1,2\n")
    )
    assert isinstance(problem, BadSample) and isinstance(too_few, BadSample)
    assert good == {"a": "1", "b": "2"}


SAMPLES = [{"instruction": f"Hi {number}", "output": "é"} for number in range(5)]
LINES = "".join(json.dumps(sample) + "\n" for sample in SAMPLES).encode()
CSV = b"instruction,output\n" + b"".join(f"Hi {number},é\n".encode() for number in range(5))


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


KINDS: dict[str, Callable[[Path], object]] = {
    "my.jsonl": lambda path: path.write_bytes(LINES),
    # two members
    "my.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(LINES[:60]) + gzip.compress(LINES[60:])
    ),
    "my.jsonl.zst": lambda path: path.write_bytes(zstd(LINES[:60]) + zstd(LINES[60:])),
    "my.json": lambda path: path.write_text(json.dumps(SAMPLES, indent=2, ensure_ascii=False)),
    "array.jsonl": lambda path: path.write_text(json.dumps(SAMPLES)),
    "MY.CSV": lambda path: path.write_bytes(CSV),
    "my.csv.zst": lambda path: path.write_bytes(zstd(CSV)),
    "my.parquet": lambda path: pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(SAMPLES), path
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_file_format_has_the_same_samples_on_disk_and_behind_a_url(
    tmp_path: Path, name: str
) -> None:
    KINDS[name](tmp_path / name)
    assert [sample for _, sample in samples_of_file(tmp_path / name)] == SAMPLES
    url = f"memory://{tmp_path.name}/{name}"
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / name).read_bytes())
    remote = list(samples_of_file(url))
    assert [sample for _, sample in remote] == SAMPLES
    assert remote[0][0].startswith(url)


def test_keys_of_other_objects_are_not_nulls_in_parquet(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "yes", "weight": 0},
    ]
    table = pyarrow.Table.from_pylist([{"messages": turns, "id": None, "labels": [1, 2]}])
    pyarrow.parquet.write_table(table, tmp_path / "my.parquet")
    [(_, sample)] = samples_of_file(tmp_path / "my.parquet")
    assert sample == {"messages": turns, "id": None, "labels": [1, 2]}


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("my.jsonl.gz", b"not zipped", "cannot be read: "),
        ("my.jsonl.zst", b"not zipped", "cannot be read: ZSTD decompress failed"),
        ("my.parquet", b"", "cannot be read: "),
        ("my.csv", b"a,b\n1,2\n3,\xff\n", "cannot be read: "),
        (
            "my.csv",
            b'a,b\n1,2\n"1\n2,3\n',
            "cannot be read after {path} row 1: unexpected end of data",
        ),
        ("my.json", b'[{"a": 1},\n\n' + b"[" * 100_000, "cannot be read: "),
        (
            "my.json",
            b'[{"a": 1},\n{"a": "never ends',
            "cannot be read: Unterminated string starting at: line 2",
        ),
    ],
)
def test_an_unreadable_rest_of_a_file_is_reported(
    tmp_path: Path, name: str, content: bytes, text: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        list(samples_of_file(path))
    assert caught.value.messages[0].removeprefix(f"{path}: ").startswith(text.format(path=path))


@pytest.mark.parametrize(
    ("header", "delimiter"),
    [
        ('"instruction (a|b|c)",output', ","),
        ('"in;out;""x"";",output', ","),
        ('instruction\t"a, b, c and d"', "\t"),
        ('"over\ntwo, lines, here";output', ";"),
        ("sep=;\r\ninstruction, in words, and more;output", ";"),
        ('\ufeff"sep=|"\na,b|output', "|"),
    ],
)
def test_the_separator_of_a_csv_is_found_outside_of_quotes_or_named_by_excel(
    tmp_path: Path, header: str, delimiter: str
) -> None:
    path = written(tmp_path / "my.csv", f"{header}\nHi{delimiter}yes\n")
    [(place, sample)] = samples_of_file(path)
    assert place == f"{path} row 1"
    assert list(sample.values()) == ["Hi", "yes"]


@pytest.mark.parametrize("name", ["my.jsonl.gz", "my.csv.gz", "my.json.gz"])
def test_a_file_of_blank_lines_ends_soon(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, gzip.compress(b"\n" * 300_000, 1))
    with pytest.raises(UserError, match="more than 100,000 blank lines after each other"):
        list(samples_of_file(path))


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ({"a": 1}, "jq -c . "),
        ({"version": 1, "data": [{"a": 1}, {"a": 2}]}, "jq -c '.data[]' "),
    ],
)
def test_json_over_several_lines_is_one_error_with_a_way_out(
    tmp_path: Path, value: object, way_out: str
) -> None:
    path = written(tmp_path / "my.jsonl", json.dumps(value, indent=2) + "\n" + json.dumps(value))
    with pytest.raises(UserError) as caught:
        list(samples_of_file(path))
    [message] = caught.value.messages
    assert message.startswith(f"{path}: it is JSON over several lines; expected one object per")
    assert f"\n{way_out}{path} > " in message


def test_columns_of_the_type_json_are_decoded_and_keep_their_nulls(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"unit": None, "number": 1}}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    rows = [
        {"messages": turns, "tools": [{"name": "f"}], "extra": {"a": [{"b": None}], "c": None}},
        {"messages": turns[:1], "tools": None, "extra": {"a": None, "c": "x"}},
    ]
    json_type = datasets.Json()
    features = datasets.Features(
        {
            "messages": datasets.List(json_type),
            "tools": json_type,
            "extra": {"a": datasets.List({"b": json_type}), "c": datasets.Value("string")},
        }
    )
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(tmp_path / "my.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    expected = [
        {**rows[0], "extra": {"a": [{}]}},  # nulls of other types are those of other rows
        {**rows[1], "extra": {"c": "x"}},
    ]
    found = [sample for _, sample in samples_of_file(tmp_path / "my.parquet")]
    assert found == expected
    assert [
        sample for _, sample in numbered("saved", saved, saved.features.arrow_schema)
    ] == expected
    for text, wrong in {"{": '"tools" is not JSON', "[" * 900 + "]" * 900: "nested too"}.items():
        column = pyarrow.array([text], pyarrow.json_())
        pyarrow.parquet.write_table(pyarrow.table({"tools": column}), tmp_path / "my.parquet")
        [(_, problem)] = samples_of_file(tmp_path / "my.parquet")
        assert isinstance(problem, BadSample) and wrong in str(problem)


def test_a_line_without_end_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path / "my.jsonl", b'{"a": 1}\n{"a": "' + b"x" * LONGEST_LINE)
    with pytest.raises(UserError, match="after .*my.jsonl:1: line 2 is longer than 67,108,864 b"):
        list(samples_of_file(path))


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1:9", "connection refused"), ("no-such-host.invalid", "host not found")],
)
def test_an_unreachable_host_is_not_reported_as_a_missing_file(host: str, why: str) -> None:
    with pytest.raises(UserError) as raised:
        list(samples_of_file(f"http://me:hunter2@{host}/my.jsonl"))
    assert (
        str(raised.value)
        == f"error: http://***@{host}/my.jsonl: cannot be read: the host does not answer ({why})."
    )


@pytest.mark.parametrize("name", ["my.jsonl", "my.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    sample = json.dumps({"text": "x" * 10_000})
    text = "\n".join([sample] * 3_001)
    path = written(
        tmp_path / name, gzip.compress(text.encode(), 1) if name.endswith(".gz") else text
    )
    del text
    tracemalloc.start()
    assert sum(1 for _ in samples_of_file(path)) == 3_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20
