"""Tokenizing a dataset to disk: chunk by chunk, so that memory does not grow with the data."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy
import pyarrow
import xxhash
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from llama_ft.data.formats import Message
from llama_ft.data.parallel import Chunk, EncodedChunk
from llama_ft.data.statistics import BuildReport, SplitStatistics, histogram_edges
from llama_ft.data.tokenize import Encoder
from llama_ft.errors import UserError

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "target_tokens": Value("int32"),
        "source": Value("string"),
    }
)
ROWS_PER_WRITE, TOKENS_PER_WRITE = 1000, 2**20
PLACES_NAMED = 3
BAD_ROWS_SHOWN = 5
ROWS_SEARCHED_AFTER_A_BAD_ONE = 10_000  # for more bad rows to report at once; a big file must not take minutes
SKIP_HINT = "(--skip_bad_rows leaves such rows out and counts them)"


def table_of(
    input_ids: numpy.ndarray,
    labels: numpy.ndarray,
    lengths: numpy.ndarray,
    target_tokens: numpy.ndarray,
    places: list[str],
) -> pyarrow.Table:
    """Rows as FEATURES has them.

    Args:
        input_ids: int32, of all rows one after the other; labels: the same.
        lengths: tokens of each row; target_tokens: labels of each that count in the loss.
        places: of each row.
    """
    offsets = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int32)
    columns = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, input_ids),
        "labels": pyarrow.ListArray.from_arrays(offsets, labels),
        "target_tokens": pyarrow.array(target_tokens),
        "source": pyarrow.array(places, pyarrow.string()),
    }
    return pyarrow.table(columns, schema=FEATURES.arrow_schema)


class SplitWriter:
    """Streams tokenized rows into one Arrow file and counts them.

    Args:
        path: of the file.
        encoder: what tokenizes the rows.
        parts: names of the parts that a mix has.

    Attributes:
        first_chat: the chat of the first row that is one.
    """

    def __init__(self, path: Path, encoder: Encoder, parts: Sequence[str] = ()) -> None:
        self.statistics = SplitStatistics()
        self.first_chat: list[Message] | None = None
        self._path = path
        self._encoder = encoder
        # Of every row 14 bytes: a million take 14 MB.
        self._lengths: list[numpy.ndarray] = [numpy.zeros(0, numpy.int32)]
        self._parts: list[numpy.ndarray] = [numpy.zeros(0, numpy.int16)]
        # Of each part: rows, tokens and target tokens written.
        self._part_names, self._counts_of_parts = parts, numpy.zeros((3, max(1, len(parts))))
        self._repeats, self._last_row = 0, ("", 0)
        self._digests: list[numpy.ndarray] = [numpy.zeros(0, numpy.uint64)]
        self._checksums = {name: xxhash.xxh3_128() for name in ("lengths", "input_ids", "labels")}
        self._writer = ArrowWriter(path=str(path), features=FEATURES, writer_batch_size=ROWS_PER_WRITE)
        self._unwritten: list[pyarrow.Table] = []

    def add(self, chunk: Chunk, encoded: EncodedChunk, mine: numpy.ndarray) -> None:
        """Write what `chunk` became.

        Args:
            chunk: rows as they were read.
            encoded: the same, tokenized.
            mine: bool [rows], which of them belong to this split.
        """
        statistics, trained = self.statistics, numpy.zeros(len(mine), dtype=bool)
        trained[encoded.row_of_piece] = True
        usable = mine & (encoded.pieces >= 0)
        self._lengths.append(encoded.row_tokens[usable])
        self._parts.append(numpy.array(chunk.parts, dtype=numpy.int16)[usable])
        statistics.lost_tokens += int(encoded.lost_tokens[usable].sum())
        statistics.tokens_before += int(encoded.row_tokens[usable].sum())
        statistics.truncated += int((encoded.truncated & mine).sum())
        statistics.dropped += int(((encoded.pieces == 0) & mine).sum())
        statistics.split += int(((encoded.pieces > 1) & mine).sum())
        without = numpy.flatnonzero((encoded.pieces > 0) & ~trained & mine)
        statistics.without_target += len(without)
        first = dict.fromkeys([*statistics.first_without_target, *(chunk.places[row] for row in without)])
        statistics.first_without_target = list(first)[:PLACES_NAMED]
        kept = mine[encoded.row_of_piece]
        if not kept.any():
            return
        if self.first_chat is None:
            row, row_format = pickle.loads(chunk.rows[encoded.row_of_piece[kept][0]])
            self.first_chat = self._encoder.messages(row, row_format)
        tokens = numpy.repeat(kept, encoded.lengths)
        places = [chunk.places[row] for row in encoded.row_of_piece[kept]]
        lengths, targets = encoded.lengths[kept], encoded.target_tokens[kept]
        self._write(encoded.input_ids[tokens], encoded.labels[tokens], lengths, targets, places)
        of_part = numpy.array(chunk.parts, dtype=numpy.int16)[encoded.row_of_piece[kept]]
        for counts, each in zip(self._counts_of_parts, (None, lengths, targets), strict=True):
            counts += numpy.bincount(of_part, each, len(counts))
        self._digests.append(encoded.digests[kept])
        rows = list(zip(chunk.places, encoded.content.tolist(), strict=True))
        before = [self._last_row, *rows[:-1]]  # a mix takes some rows several times, one after the other
        again = numpy.array([row == last for row, last in zip(rows, before, strict=True)])
        self._repeats += int(again[encoded.row_of_piece[kept]].sum())
        self._last_row = rows[-1]

    def _write(
        self,
        input_ids: numpy.ndarray,
        labels: numpy.ndarray,
        lengths: numpy.ndarray,
        target_tokens: numpy.ndarray,
        places: list[str],
    ) -> None:
        statistics = self.statistics
        statistics.rows += len(lengths)
        statistics.tokens += len(input_ids)
        statistics.target_tokens += int(target_tokens.sum())
        if (largest_id := int(input_ids.max())) > statistics.largest_id:
            row = int(numpy.searchsorted(numpy.cumsum(lengths), input_ids.argmax(), side="right"))
            statistics.largest_id, statistics.largest_id_at = largest_id, places[row]
        for checksum, values in zip(self._checksums.values(), (lengths, input_ids, labels), strict=True):
            checksum.update(numpy.ascontiguousarray(values).data)
        self._unwritten.append(table_of(input_ids, labels, lengths, target_tokens, places))
        waiting = self._unwritten
        if sum(map(len, waiting)) >= ROWS_PER_WRITE or sum(it.nbytes for it in waiting) >= 8 * TOKENS_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        if self._unwritten:
            self._writer.write_table(pyarrow.concat_tables(self._unwritten))
            self._unwritten = []

    @property
    def lengths(self) -> numpy.ndarray:
        """Tokens of each row before truncation."""
        return numpy.concatenate(self._lengths)

    @property
    def digests(self) -> numpy.ndarray:
        """A hash of tokens and labels of each row written."""
        return numpy.concatenate(self._digests)

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.finalize()
        digests = self.digests
        self.statistics.copies = len(digests) - len(numpy.unique(digests)) - self._repeats
        checksums = "".join(checksum.hexdigest() for checksum in self._checksums.values())
        self.statistics.fingerprint = xxhash.xxh3_128_hexdigest(checksums.encode())

    def measure(self, edges: list[float]) -> None:
        """Fill in the statistics of lengths, in all and by part."""
        lengths, parts = self.lengths, numpy.concatenate(self._parts)
        self.statistics.measure(lengths, edges)
        for number, name in enumerate(self._part_names):
            mine = lengths[parts == number]
            rows, tokens, targets = map(int, self._counts_of_parts[:, number])
            part = SplitStatistics(rows, tokens, targets)
            part.measure(mine, edges)
            self.statistics.parts[name if name not in self.statistics.parts else f"{name} ({number + 1})"] = part

    def places(self, rows: numpy.ndarray) -> list[str]:
        """Where rows of the finished file came from."""
        return Dataset.from_file(str(self._path))[rows.tolist()]["source"] if len(rows) else []


def report_on(train: SplitWriter, validation: SplitWriter | None) -> BuildReport:
    """Close the files and say what is in them."""
    writers = [train] if validation is None else [train, validation]
    for writer in writers:
        writer.close()
    every = numpy.concatenate([writer.lengths for writer in writers])
    edges = histogram_edges(int(every.min()), int(every.max())) if len(every) else []
    for writer in writers:
        writer.measure(edges)
    report = BuildReport(train.statistics, validation.statistics if validation else None, edges)
    if validation is not None:
        twins = numpy.flatnonzero(numpy.isin(validation.digests, train.digests))
        first = [numpy.flatnonzero(train.digests == validation.digests[row])[0] for row in twins[:PLACES_NAMED]]
        pairs = zip(validation.places(twins[:PLACES_NAMED]), train.places(numpy.array(first)), strict=True)
        report.shared, report.first_shared = len(twins), [f"{held_out} ({at})" for held_out, at in pairs]
    return report


class BadRows:
    """Collects rows that cannot be used: to stop with the first few, or to leave them out and count."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: list[str] = []
        self._rows_since_first = 0

    def note(self, place: str, problem: str | None) -> None:
        """Note a row and what is wrong with it, if anything.

        Raises:
            UserError: there are bad rows, they are not to be skipped, and there is enough to report.
        """
        if problem is not None:
            self.count += 1
            if len(self.first) < BAD_ROWS_SHOWN:
                self.first.append(f"{place}: {problem}")
        if self.count and not self.skip:
            self._rows_since_first += 1
            if self.count >= BAD_ROWS_SHOWN or self._rows_since_first > ROWS_SEARCHED_AFTER_A_BAD_ONE:
                self.end()

    def note_chunk(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        """Note the rows of a chunk, in order; errors as of `note`."""
        if encoded.problems or (self.count and not self.skip):
            for number, place in enumerate(chunk.places):
                self.note(place, encoded.problems.get(number))

    def end(self) -> None:
        """Stop the run if there are bad rows that are not to be skipped; called when all rows are read, too."""
        if self.count and not self.skip:
            raise UserError(*self.first[:-1], f"{self.first[-1]}\n{SKIP_HINT}")
