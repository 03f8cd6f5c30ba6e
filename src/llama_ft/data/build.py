"""Tokenizing a dataset to disk: chunks of rows go out to several processes, tables of tokens come back in order.

The processes are forked. Measured from a recipe that has imported all it needs: four forked
ones answer after 0.06 s and hold 9 MiB each; spawned ones import the recipe again (41 s until all
four work). They use neither torch nor the GPU nor the console.
"""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pyarrow
import xxhash
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from llama_ft.data.formats import BadRow, Message, Row
from llama_ft.data.sources import Source
from llama_ft.data.statistics import ROW, BuildReport, SplitStatistics, histogram_edges
from llama_ft.data.tokenize import Encoded, Encoder
from llama_ft.errors import RunFailure, UserError
from llama_ft.processes import end_with

FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "target_tokens": Value("int32"),
        "source": Value("string"),
    }
)
CHUNK_ROWS, CHUNK_BYTES = 256, 2**20
CHUNKS_INLINE = 8  # up to here one process is done before others have had their first chunk
PLACES_NAMED = 3
BAD_ROWS_SHOWN = 5
ROWS_SEARCHED_AFTER_A_BAD_ONE = 10_000  # for more bad rows to report at once; a big file must not take minutes
SKIP_HINT = "(--skip_bad_rows leaves such rows out and counts them)"


class Chunk(NamedTuple):
    """Some neighbouring rows.

    Attributes:
        places: of each row.
        parts: which part of a mix each is of; 0 where there is no mix.
        rows: each row and its format, pickled: their size is known, and they are pickled once.
    """

    places: list[str]
    parts: list[int]
    rows: list[bytes]


class EncodedChunk(NamedTuple):
    """What became of a chunk.

    Attributes:
        table: what is trained on, columns of FEATURES: rows, or the pieces of those that were split.
        row_of_piece: the row of the chunk that each of them is of.
        digests: a hash of the tokens and labels of each.
        rows: what became of each row of the chunk, see `ROW`.
        problems: the bad rows, each with its place.
    """

    table: pyarrow.Table
    row_of_piece: numpy.ndarray
    digests: numpy.ndarray
    rows: numpy.ndarray
    problems: list[str]


def content_hash(row: Row) -> int:
    """64 bits that twins share, wherever they stand."""
    content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def chunks_of(source: Source, wanted: str, if_empty: str = "") -> Iterator[Chunk]:
    """Group rows by number and size, so that what is in work stays small whatever the rows are.

    Arguments as of `Source.formatted_rows`.
    """
    chunk, size = Chunk([], [], []), 0
    for place, row, row_format, part in source.formatted_rows(wanted, if_empty=if_empty):
        try:
            packed = pickle.dumps((row, row_format), pickle.HIGHEST_PROTOCOL)
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            packed = pickle.dumps((BadRow(f"holds what is no data: {error}."), row_format))
        chunk.places.append(place)
        chunk.parts.append(part)
        chunk.rows.append(packed)
        size += len(packed)
        if len(chunk.rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = Chunk([], [], []), 0
    if chunk.rows:
        yield chunk


def encode_chunk(chunk: Chunk, encoder: Encoder) -> EncodedChunk:
    """Tokenize the rows of a chunk."""
    pieces: list[Encoded] = []
    row_of_piece, problems = [], []
    rows = numpy.zeros(len(chunk.rows), ROW)
    rows["pieces"], rows["part"] = -1, chunk.parts
    for number, packed in enumerate(chunk.rows):
        try:
            row, row_format = pickle.loads(packed)
            if isinstance(row, BadRow):
                raise row
            whole, _ = tokenized = encoder.tokenize(row, row_format)
            made = encoder.fit(*tokenized)
        except (BadRow, RecursionError) as problem:
            problems.append(f"{chunk.places[number]}: {problem}")
            continue
        trained = [piece for piece in made if piece.target_tokens]
        counts = [(1, len(piece.input_ids), piece.target_tokens) for piece in trained]
        rows[number] = (
            content_hash(row), len(whole), len(made), *(sum(column) for column in zip((0, 0, 0), *counts, strict=True)),
            any(piece.truncated for piece in made), chunk.parts[number],
        )  # fmt: skip
        pieces += trained
        row_of_piece += [number] * len(trained)
    ends = numpy.cumsum([0, *(len(piece.input_ids) for piece in pieces)]).astype(numpy.int32)
    input_ids, labels = (
        numpy.fromiter(itertools.chain.from_iterable(column), numpy.int32)
        for column in ((piece.input_ids for piece in pieces), (piece.labels for piece in pieces))
    )
    digests = [
        xxhash.xxh3_64_intdigest(input_ids[start:end].tobytes() + labels[start:end].tobytes())
        for start, end in itertools.pairwise(ends)
    ]
    columns = {
        "input_ids": pyarrow.ListArray.from_arrays(ends, input_ids),
        "labels": pyarrow.ListArray.from_arrays(ends, labels),
        "target_tokens": [piece.target_tokens for piece in pieces],
        "source": [chunk.places[row] for row in row_of_piece],
    }
    return EncodedChunk(
        pyarrow.table(columns, schema=FEATURES.arrow_schema),
        numpy.array(row_of_piece, numpy.int32),
        numpy.array(digests, numpy.uint64),
        rows,
        problems,
    )


def enough_processes(chunks: Iterator[Chunk], most: int) -> tuple[int, Iterator[Chunk]]:
    """Tell how many processes chunks are worth, after a look at the first; return the chunks as well."""
    first = list(itertools.islice(chunks, CHUNKS_INLINE))
    return most if len(first) == CHUNKS_INLINE else 1, itertools.chain(first, chunks)


def encode_chunks(
    chunks: Iterator[Chunk], encoder: Encoder, processes: int
) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Yield chunks and what became of them, in order. Closing it ends the processes.

    Args:
        chunks: of all rows.
        encoder: what tokenizes.
        processes: that share the work; 1: this one does it.

    Raises:
        RunFailure: one of them was killed.
    """
    if processes == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, encoder)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of forks else
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers, busy = list[Any](), deque[tuple[Connection, Chunk]]()
    try:
        # One chunk at a time to each, in turns: neither side waits to write to a pipe that the other does not read.
        for chunk in itertools.islice(chunks, processes):
            ours, theirs = context.Pipe()
            workers.append(context.Process(target=_work, args=(theirs, encoder, os.getpid()), daemon=True))
            workers[-1].start()
            theirs.close()  # so that the end of a worker is the end of its pipe
            busy.append((ours, chunk))
            ours.send(chunk)
        while busy:
            pipe, chunk = busy[0]
            result = pipe.recv()
            busy.popleft()
            if following := next(chunks, None):
                busy.append((pipe, following))
                pipe.send(following)
            if isinstance(result, Exception):
                raise result
            yield chunk, result
    except (EOFError, ConnectionError):
        size, place = max(
            (len(row), place) for _, chunk in busy for place, row in zip(chunk.places, chunk.rows, strict=True)
        )
        raise RunFailure(
            "a process that tokenized was killed, most likely by the kernel, for want of host memory.\n"
            f"There were {processes} of them; the largest row they had was {place}, of {size:,} bytes.\n"
            f"--tokenize_processes {processes // 2} takes less memory."
        ) from None
    finally:
        for worker in workers:
            worker.kill()  # it has nothing to clean up, and may be in the middle of a chunk
            worker.join()


def _work(pipe: Connection, encoder: Encoder, parent: int) -> None:
    """What a worker does until it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal or a batch system sends them to all
        signal.signal(number, signal.SIG_IGN)
    end_with(parent, oom_score=500)  # where memory runs out, the kernel shall take this one: the run can then say why
    gc.freeze()  # the collector would touch, and so copy, all that is shared with the parent
    while True:
        result: EncodedChunk | Exception
        try:
            result = encode_chunk(pipe.recv(), encoder)
        except EOFError:
            return
        except UserError as error:
            result = error
        except Exception:
            result = RuntimeError(f"while tokenizing\n{traceback.format_exc()}")
        pipe.send(result)


class SplitWriter:
    """Streams tokenized rows into one Arrow file and counts them.

    Args:
        path: of the file.
        encoder: what tokenizes the rows.
        parts: names of the parts that a mix has.

    Attributes:
        statistics: complete once `report_on` has closed the file.
        first_chat: the chat of the first row that is one.
    """

    def __init__(self, path: Path, encoder: Encoder, parts: Sequence[str] = ()) -> None:
        self.parts = parts
        self.statistics = SplitStatistics()
        self.first_chat: list[Message] | None = None
        self._path = path
        self._encoder = encoder
        self._rows = [numpy.zeros(0, ROW)]  # 35 bytes a row, with its digest 43: a million take 43 MB
        self._digests = [numpy.zeros(0, numpy.uint64)]
        self._repeats, self._last_row = 0, ("", 0)
        self._checksums = [xxhash.xxh3_128() for _ in range(3)]
        self._writer = ArrowWriter(path=str(path), features=FEATURES)

    def add(self, chunk: Chunk, encoded: EncodedChunk, mine: numpy.ndarray) -> None:
        """Write what `chunk` became.

        Args:
            chunk: rows as they were read.
            encoded: the same, tokenized.
            mine: bool [rows], which of them belong to this split.
        """
        statistics, rows = self.statistics, encoded.rows
        self._rows.append(rows[mine & (rows["pieces"] >= 0)])
        without = numpy.flatnonzero(mine & (rows["pieces"] > 0) & (rows["trained"] == 0))
        first = dict.fromkeys([*statistics.first_without_target, *(chunk.places[row] for row in without)])
        statistics.first_without_target = list(first)[:PLACES_NAMED]
        kept = mine[encoded.row_of_piece]
        if not kept.any():
            return
        if self.first_chat is None:
            row, row_format = pickle.loads(chunk.rows[encoded.row_of_piece[kept][0]])
            self.first_chat = self._encoder.messages(row, row_format)
        table = encoded.table if kept.all() else encoded.table.filter(pyarrow.array(kept))
        input_ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
        values = [input_ids.value_lengths().to_numpy(), *(each.flatten().to_numpy() for each in (input_ids, labels))]
        for checksum, each in zip(self._checksums, values, strict=True):
            checksum.update(numpy.ascontiguousarray(each).data)
        if (largest_id := int(values[1].max())) > statistics.largest_id:
            row = int(numpy.searchsorted(values[0].cumsum(), values[1].argmax(), side="right"))
            statistics.largest_id, statistics.largest_id_at = largest_id, table["source"][row].as_py()
        self._writer.write_table(table)
        self._digests.append(encoded.digests[kept])
        places = list(zip(chunk.places, rows["content"].tolist(), strict=True))
        before = [self._last_row, *places[:-1]]  # a mix takes some rows several times, one after the other
        again = numpy.array([row == last for row, last in zip(places, before, strict=True)])
        self._repeats += int(again[encoded.row_of_piece[kept]].sum())
        self._last_row = places[-1]

    def close(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Finish the file; return the rows it was made of and the digests of those in it."""
        self._writer.finalize()
        digests = numpy.concatenate(self._digests)
        self.statistics.copies = len(digests) - len(numpy.unique(digests)) - self._repeats
        checksums = "".join(checksum.hexdigest() for checksum in self._checksums)
        self.statistics.fingerprint = xxhash.xxh3_128_hexdigest(checksums.encode())
        return numpy.concatenate(self._rows), digests

    def places(self, rows: Sequence[int]) -> list[str]:
        """Where rows of the finished file came from."""
        return Dataset.from_file(str(self._path))[rows]["source"] if len(rows) else []


def report_on(train: SplitWriter, validation: SplitWriter | None) -> BuildReport:
    """Close the files and say what is in them."""
    writers = [train] if validation is None else [train, validation]
    closed = [writer.close() for writer in writers]
    lengths = numpy.concatenate([rows["tokens"] for rows, _ in closed])
    edges = histogram_edges(int(lengths.min()), int(lengths.max())) if len(lengths) else []
    for writer, (rows, _) in zip(writers, closed, strict=True):
        writer.statistics.count(rows, edges, writer.parts)
    report = BuildReport(train.statistics, validation.statistics if validation else None, edges)
    if validation is not None:
        trained, held_out = (digests for _, digests in closed)
        twins = numpy.flatnonzero(numpy.isin(held_out, trained))
        first = [int(numpy.flatnonzero(trained == held_out[row])[0]) for row in twins[:PLACES_NAMED]]
        pairs = zip(validation.places(twins[:PLACES_NAMED].tolist()), train.places(first), strict=True)
        report.shared, report.first_shared = len(twins), [f"{place} ({at})" for place, at in pairs]
    return report


class BadRows:
    """Collects rows that cannot be used: to stop with the first few, or to leave them out and count."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: list[str] = []
        self._rows_since_first = 0

    def note(self, encoded: EncodedChunk) -> None:
        """Note the bad rows of a chunk.

        Raises:
            UserError: there are bad rows, they are not to be skipped, and there is enough to report.
        """
        self.count += len(encoded.problems)
        self.first = [*self.first, *encoded.problems][:BAD_ROWS_SHOWN]
        self._rows_since_first += len(encoded.rows) if self.count else 0
        if self.count >= BAD_ROWS_SHOWN or self._rows_since_first > ROWS_SEARCHED_AFTER_A_BAD_ONE:
            self.end()

    def end(self) -> None:
        """Stop the run if there are bad rows that are not to be skipped; called when all rows are read, too."""
        if self.count and not self.skip:
            raise UserError(*self.first[:-1], f"{self.first[-1]}\n{SKIP_HINT}")
