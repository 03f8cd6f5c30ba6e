"""What became of the samples: counted while they are tokenized, kept in meta.json, shown as a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy

from llama_ft.data.formats import Message

BINS = 14
HEADINGS = ("", "rows", "tokens", "trained on", "median", "95 %", "longest (lengths before truncation)")
# A row of the data: a hash of it; its tokens before truncation; what it became: pieces (0: dropped, -1: a bad row),
# the examples with a label that counts, the tokens and such labels of these; whether it was truncated.
ROW = numpy.dtype(
    [
        ("content", "u8"), ("tokens", "i4"), ("pieces", "i4"), ("trained", "i4"), ("kept", "i4"), ("targets", "i4"),
        ("truncated", "?"),
    ]
)  # fmt: skip


@dataclass
class SplitStatistics:
    """What became of the rows of a split.

    Attributes:
        rows: rows written; of one that was split, its pieces.
        tokens, target_tokens: their tokens, and those that count in the loss.
        lost_tokens: tokens that were truncated, or of rows that were skipped.
        truncated, dropped, split, without_target: rows of the data of which a part was cut off, that were skipped as
            too long, that became several, that were skipped as nothing of them would be trained on.
        copies: rows that repeat an earlier one, token for token.
        lengths: tokens of a row before truncation: the median, the 95th percentile and the largest.
        histogram: rows by length before truncation, see `BuildReport.edges`.
        largest_id: the largest token id.
        fingerprint: a checksum of all tokens and labels, in order.
    """

    rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    lost_tokens: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    without_target: int = 0
    copies: int = 0
    lengths: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    largest_id: int = -1
    fingerprint: str = ""

    def count(self, rows: numpy.ndarray, edges: Sequence[float]) -> None:
        """Count what became of each row but bad ones, see `ROW`; `edges` are those of the histogram."""
        tokens, pieces = rows["tokens"], rows["pieces"]
        self.rows, self.tokens, self.target_tokens = (int(rows[name].sum()) for name in ("trained", "kept", "targets"))
        self.lost_tokens = int((tokens - rows["kept"]).clip(0).sum())  # pieces share tokens: they may have more
        self.truncated, self.dropped = int(rows["truncated"].sum()), int((pieces == 0).sum())
        self.split = int((pieces > 1).sum())
        self.without_target = int(((pieces > 0) & (rows["trained"] == 0)).sum())
        if len(rows):
            self.lengths = [int(numpy.percentile(tokens, q, method="nearest")) for q in (50, 95, 100)]
            self.histogram = numpy.histogram(tokens, edges)[0].tolist()


@dataclass
class BuildReport:
    """What is written to meta.json.

    Attributes:
        train, validation: of each split; None where there is none.
        edges: tokens at which the bars of the histograms begin, and at the end the last one ends.
        shared: rows of the validation split that are in the training split too, token for token.
        first_shared: the first of them, both places.
        bad_rows: rows skipped by skip_bad_rows.
        first_bad_rows: the first of them, place and reason.
        chat_sample: a chat of the validation (else the training) split, its reference answer last.
    """

    train: SplitStatistics
    validation: SplitStatistics | None = None
    edges: list[float] = field(default_factory=list)
    shared: int = 0
    first_shared: list[str] = field(default_factory=list)
    bad_rows: int = 0
    first_bad_rows: list[str] = field(default_factory=list)
    chat_sample: list[Message] | None = None

    def save(self, path: Path) -> None:
        """Write as JSON, in ASCII: a message may hold half a character, which UTF-8 cannot."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> "BuildReport":
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="ascii"))
        splits = {name: values[name] and SplitStatistics(**values[name]) for name in ("train", "validation")}
        return cls(**values | splits)


def histogram_edges(lengths: numpy.ndarray) -> list[float]:
    """The edges of BINS bars on a logarithmic scale: most rows are far shorter than the longest."""
    return numpy.geomspace(max(lengths.min(), 1), max(lengths.max(), 1) + 1, BINS + 1).tolist() if len(lengths) else []


def describe(report: BuildReport, limit: int, want_validation: bool) -> list[str]:
    """The table and the lines under it; `limit` is the context length."""
    table, notes = list[tuple[str, ...]]([HEADINGS]), list[str]()
    for name, split in (("training", report.train), ("validation", report.validation if want_validation else None)):
        if split is None or not split.rows:  # streamed rows are not counted beforehand
            continue
        numbers = (split.rows, split.tokens, split.target_tokens, *split.lengths)
        table.append((name, *(f"{number:,}" for number in numbers)))
        if split.lost_tokens:
            share = split.lost_tokens / (split.lost_tokens + split.tokens)
            notes.append(f"{name}: {share:.1%} of the tokens are lost, {split.lost_tokens:,}")
        counts = {
            f"truncated at --context_length {limit}": split.truncated,
            f"skipped, longer than --context_length {limit}": split.dropped,
            f"split at --context_length {limit}": split.split,
            f"skipped, nothing to train on within --context_length {limit}": split.without_target,
            "the same as an earlier one, token for token": split.copies,
        }
        notes += [f"{name}: {count:,} rows {what}" for what, count in counts.items() if count]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    return [*(lines if len(table) > 1 else []), *notes, *warnings_of(report, want_validation)]


def warnings_of(report: BuildReport, want_validation: bool) -> list[str]:
    """A line about validation samples that are trained on, and one about bad samples."""
    lines = []
    if report.shared and want_validation:
        first = _named(report.first_shared, report.shared)
        lines.append(f"validation: {report.shared:,} rows are in the training rows too, token for token: {first}")
    if report.bad_rows:
        lines.append(f"{report.bad_rows:,} bad rows skipped: {_named(report.first_bad_rows, report.bad_rows)}")
    return lines


def _named(first: list[str], count: int) -> str:
    return "; ".join(text.splitlines()[0] for text in first) + ("; ..." if count > len(first) else "")
