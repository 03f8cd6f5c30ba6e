"""Tokenizing a dataset to disk: row by row, so that memory does not grow with the data."""

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter

from llama_ft.data.formats import BadRow, Message, Row, RowFormat
from llama_ft.data.sources import Source
from llama_ft.data.tokenize import Encoded, Encoder
from llama_ft.errors import UserError

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "target_tokens": Value("int32"),
        "source": Value("string"),
    }
)
ROWS_PER_WRITE = 500
BAD_ROWS_SHOWN = 5
ROWS_SEARCHED_AFTER_A_BAD_ONE = 10_000  # for more bad rows to report at once; a big file must not take minutes
SKIP_HINT = "(--skip_bad_rows leaves such rows out and counts them)"


@dataclass
class SplitStatistics:
    """What became of the rows of a split.

    Attributes:
        rows: rows written.
        tokens: their tokens.
        target_tokens: those that count in the loss.
        truncated: rows whose end was cut off, among those written and those without_target.
        without_target: rows left out as no answer token remained in context_length.
        lengths: tokens of a row: the median, the 95th percentile and the largest.
        largest_id: the largest token id.
        largest_id_at: the place of the first row that holds it.
    """

    rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    truncated: int = 0
    without_target: int = 0
    lengths: list[int] = field(default_factory=list)
    largest_id: int = -1
    largest_id_at: str = ""


@dataclass
class BuildReport:
    """What is written to meta.json.

    Attributes:
        train, validation: of each split; None where there is none.
        bad_rows: rows left out by skip_bad_rows.
        first_bad_rows: the first of them, place and reason.
        chat_sample: a chat of the validation (else the training) split, its reference answer last.
    """

    train: SplitStatistics
    validation: SplitStatistics | None = None
    bad_rows: int = 0
    first_bad_rows: list[str] = field(default_factory=list)
    chat_sample: list[Message] | None = None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "BuildReport":
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        for split in ("train", "validation"):
            values[split] = values[split] and SplitStatistics(**values[split])
        return cls(**values)


class SplitWriter:
    """Streams tokenized rows into one Arrow file and counts them."""

    def __init__(self, path: Path) -> None:
        self.statistics = SplitStatistics()
        self.first_chat: list[Message] | None = None
        self._lengths = array("i")
        self._writer = ArrowWriter(path=str(path), features=FEATURES, writer_batch_size=ROWS_PER_WRITE)

    def add(self, place: str, encoded: Encoded, messages: list[Message] | None) -> None:
        """Write a row, unless nothing of it would be trained on."""
        statistics, target_tokens = self.statistics, encoded.target_tokens
        statistics.truncated += encoded.truncated
        if target_tokens == 0:
            statistics.without_target += 1
            return
        if self.first_chat is None:
            self.first_chat = messages
        statistics.rows += 1
        statistics.tokens += len(encoded.input_ids)
        statistics.target_tokens += target_tokens
        self._lengths.append(len(encoded.input_ids))
        if (largest_id := max(encoded.input_ids)) > statistics.largest_id:
            statistics.largest_id, statistics.largest_id_at = largest_id, place
        self._writer.write(
            {
                # arrays: Arrow takes them as they are, lists it inspects element by element
                "input_ids": numpy.asarray(encoded.input_ids, dtype=numpy.int32),
                "labels": numpy.asarray(encoded.labels, dtype=numpy.int32),
                "target_tokens": target_tokens,
                "source": place,
            }
        )

    def close(self) -> SplitStatistics:
        """Finish the file and return its counts."""
        self._writer.finalize()
        if self._lengths:
            lengths = numpy.frombuffer(self._lengths, dtype=numpy.int32)
            self.statistics.lengths = [int(numpy.percentile(lengths, q, method="nearest")) for q in (50, 95, 100)]
        return self.statistics


class BadRows:
    """Collects rows that cannot be used: to stop with the first few, or to leave them out and count."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: list[str] = []
        self._rows_since_first = 0

    def add(self, place: str, problem: BadRow) -> None:
        """Note a bad row."""
        self.count += 1
        if len(self.first) < BAD_ROWS_SHOWN:
            self.first.append(f"{place}: {problem}")

    @property
    def stopping(self) -> bool:
        """The run will stop: rows are only checked from now on."""
        return self.count > 0 and not self.skip

    def raise_if_enough(self, at_end: bool = False) -> None:
        """Stop the run once there is enough to report. Called once a row while stopping, and at the end."""
        if not self.stopping:
            return
        self._rows_since_first += 1
        if at_end or self.count >= BAD_ROWS_SHOWN or self._rows_since_first > ROWS_SEARCHED_AFTER_A_BAD_ONE:
            raise UserError(*self.first[:-1], f"{self.first[-1]}\n{SKIP_HINT}")


def good_rows(
    source: Source, row_format: RowFormat, encoder: Encoder, bad: BadRows
) -> Iterator[tuple[str, Row, list[Message] | None, Encoded]]:
    """Yield (place, row, its chat, its tokens) of the rows that can be used; the others go to `bad`.

    Raises:
        UserError: there are bad rows and they are not to be skipped.
    """
    for place, row in source.read():
        try:
            if isinstance(row, BadRow):
                raise row
            messages = encoder.messages(row, row_format)
            if not bad.stopping:
                encoded = encoder.encode(row, row_format) if messages is None else encoder.encode_messages(messages)
                yield place, row, messages, encoded
        except BadRow as problem:
            bad.add(place, problem)
        bad.raise_if_enough()
    bad.raise_if_enough(at_end=True)


def in_validation(row: Row, fraction: float) -> bool:
    """Choose rows by a hash of their content: independent of order, and twins always land on the same side."""
    content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction
