"""Files of JSON lines, and tables on the terminal, for all benchmarks."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def read_json(file: Path | str) -> Any:
    """Return the value of a JSON file."""
    return json.loads(Path(file).read_text(encoding="utf-8"))


def read_json_lines(file: Path | str) -> list[Any]:
    """Return the values of a file with one JSON value per line."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_json_lines(file: Path, values: Iterable[Any]) -> None:
    """Write one JSON value per line."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    file.write_text(text, encoding="utf-8")


def print_columns(table: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns."""
    widths = []
    for column in zip(*table, strict=True):
        widths.append(max(map(len, column)))
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
