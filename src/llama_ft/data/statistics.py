"""What became of the rows: counted while they are tokenized, kept in meta.json, shown as a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy

from llama_ft.data.formats import Message

BINS = 14
LONGEST_NAME = 28
HEADINGS = ("rows", "tokens", "trained on", "median", "95 %", "longest")
# A row of the data: a hash of it; its tokens before truncation; what it became: pieces (0: dropped, -1: a bad row),
# those of them with a label that counts, the tokens and such labels of these; whether it was cut; its part of a mix.
ROW = numpy.dtype(
    [
        ("content", "u8"), ("tokens", "i4"), ("pieces", "i4"), ("trained", "i4"), ("kept", "i4"), ("targets", "i4"),
        ("truncated", "?"), ("part", "i2"),
    ]
)  # fmt: skip


@dataclass
class SplitStatistics:
    """What became of the rows of a split.

    Attributes:
        rows: rows written; of one that was split, its pieces.
        tokens: their tokens.
        target_tokens: those that count in the loss.
        lost_tokens: tokens of rows that were cut off, or of rows left out as too long or without_target.
        tokens_before: tokens of all rows of the data but bad ones, before truncation.
        truncated: rows of the data of which a part was cut off, whether written or without_target.
        dropped: rows left out as they are longer than context_length.
        split: rows that became several.
        without_target: rows left out as nothing of them would be trained on.
        first_without_target: places of the first of them.
        copies: rows that repeat an earlier one, token for token.
        lengths: tokens of a row before truncation: the median, the 95th percentile and the largest.
        histogram: rows by length before truncation, see `BuildReport.edges`.
        largest_id: the largest token id.
        largest_id_at: the place of the first row that holds it.
        fingerprint: a checksum of all tokens and labels, in order.
        parts: of a mix, the same by part, as far as `count` fills it in.
    """

    rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    lost_tokens: int = 0
    tokens_before: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    without_target: int = 0
    first_without_target: list[str] = field(default_factory=list)
    copies: int = 0
    lengths: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    largest_id: int = -1
    largest_id_at: str = ""
    fingerprint: str = ""
    parts: dict[str, "SplitStatistics"] = field(default_factory=dict)

    def count(self, rows: numpy.ndarray, edges: Sequence[float] = (), parts: Sequence[str] = ()) -> None:
        """Fill in all that follows from what became of each row.

        Args:
            rows: of the split but bad ones, see `ROW`.
            edges: of the histogram.
            parts: names of the parts that a mix has.
        """
        tokens, pieces = rows["tokens"], rows["pieces"]
        self.rows, self.tokens, self.target_tokens, self.tokens_before = (
            int(rows[name].sum()) for name in ("trained", "kept", "targets", "tokens")
        )
        # Pieces of one row share tokens, so they may have more than the row.
        self.lost_tokens = int((tokens - rows["kept"]).clip(0).sum())
        self.truncated, self.dropped = int(rows["truncated"].sum()), int((pieces == 0).sum())
        self.split = int((pieces > 1).sum())
        self.without_target = int(((pieces > 0) & (rows["trained"] == 0)).sum())
        if len(rows):
            self.lengths = [int(numpy.percentile(tokens, q, method="nearest")) for q in (50, 95, 100)]
        self.histogram = numpy.histogram(tokens, edges)[0].tolist() if len(edges) else []
        for number, name in enumerate(parts):
            part = self.parts[name if name not in self.parts else f"{name} ({number + 1})"] = SplitStatistics()
            part.count(rows[rows["part"] == number], edges)


@dataclass
class BuildReport:
    """What is written to meta.json.

    Attributes:
        train, validation: of each split; None where there is none.
        edges: tokens at which the bars of the histograms begin, and at the end the last one ends; each as many times
            the one before.
        shared: rows of the validation split that are in the training split too, token for token.
        first_shared: the first of them, both places.
        bad_rows: rows left out by skip_bad_rows.
        first_bad_rows: the first of them, place and reason.
        chat_sample: a chat of the validation (else the training) split, its reference answer last.
        seconds: that the build took.
        processes: that tokenized.
    """

    train: SplitStatistics
    validation: SplitStatistics | None = None
    edges: list[float] = field(default_factory=list)
    shared: int = 0
    first_shared: list[str] = field(default_factory=list)
    bad_rows: int = 0
    first_bad_rows: list[str] = field(default_factory=list)
    chat_sample: list[Message] | None = None
    seconds: float = 0.0
    processes: int = 1

    def save(self, path: Path) -> None:
        """Write as JSON."""
        # A message may hold half a character, which UTF-8 cannot: hence ASCII.
        path.write_text(json.dumps(asdict(self), indent=2), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> "BuildReport":
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        for split in ("train", "validation"):
            values[split] = values[split] and _statistics(values[split])
        return cls(**values)


def _statistics(values: dict) -> SplitStatistics:
    parts = {name: _statistics(part) for name, part in values.pop("parts").items()}
    return SplitStatistics(**values, parts=parts)


def histogram_edges(shortest: int, longest: int) -> list[float]:
    """The edges of BINS bars over the lengths of all rows, on a logarithmic scale: most rows are far shorter than the
    longest."""
    return numpy.geomspace(max(shortest, 1), max(longest, shortest, 1) + 1, BINS + 1).tolist()


def describe(report: BuildReport, context_length: int, want_validation: bool) -> list[str]:
    """The table and the lines under it.

    Args:
        report: what became of the rows.
        context_length: longest row in tokens.
        want_validation: whether the validation split is used.
    """
    validation = report.validation if want_validation else None
    splits = {"training": report.train} if report.train.rows else {}  # streamed rows are not counted beforehand
    splits |= {"validation": validation} if validation else {}
    lines = _table(splits) if splits else []
    for name, split in splits.items():
        lines += [f"{name}: {line}" for line in _notes(split, f"--context_length {context_length}")]
    return lines + warnings_of(report, want_validation)


def warnings_of(report: BuildReport, want_validation: bool) -> list[str]:
    """A line about validation samples that are trained on, and one about bad samples."""
    lines = []
    if want_validation and report.shared:
        first = _named(report.first_shared, report.shared)
        lines.append(f"validation: {_rows(report.shared)} in the training rows too, token for token: {first}")
    if report.bad_rows:
        lines.append(f"{report.bad_rows:,} bad rows left out: {_named(report.first_bad_rows, report.bad_rows)}")
    return lines


def _table(splits: dict[str, SplitStatistics]) -> list[str]:
    table: list[tuple[str, ...]] = [("", *HEADINGS)]
    for name, split in splits.items():
        parts = split.parts if len(split.parts) > 1 else {}
        for title, one in {name: split, **{f"  {part[-LONGEST_NAME:]}": one for part, one in parts.items()}}.items():
            numbers = (one.rows, one.tokens, one.target_tokens, *(one.lengths or [0, 0, 0]))
            table.append((title, *(f"{number:,}" for number in numbers)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    heading, *lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )
    return [f"{heading} (lengths before truncation)", *lines]


def _notes(split: SplitStatistics, limit: str) -> list[str]:
    without = _named(split.first_without_target, split.without_target)
    counts = {
        f"cut at {limit}": split.truncated,
        f"left out, longer than {limit}": split.dropped,
        f"split at {limit}": split.split,
        f"left out, nothing to train on within {limit}: {without}": split.without_target,
        "the same as an earlier one, token for token": split.copies,
    }
    lost = f"{split.lost_tokens:,} of {split.tokens_before:,}"
    notes = (
        [f"{split.lost_tokens / split.tokens_before:.1%} of the tokens are lost, {lost}"] if split.lost_tokens else []
    )
    return notes + [f"{_rows(count)} {what}" for what, count in counts.items() if count]


def _rows(count: int) -> str:
    return f"{count:,} row{' is' if count == 1 else 's are'}"


def _named(first: list[str], count: int) -> str:
    return "; ".join(text.splitlines()[0] for text in first) + ("; ..." if count > len(first) else "")
