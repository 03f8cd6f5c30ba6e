"""Rows to tokens on several cores: chunks of rows go out, arrays of tokens come back in the same order.

The processes are forked. Measured from a recipe that has imported all it needs: four forked ones answer after 0.06 s
and hold 9 MiB each of their own; with a fork server it is 9 s and 245 MiB, and spawned ones import the recipe again
(41 s until all four work). What forbids forking elsewhere is left alone in them: they use neither torch nor the GPU nor
the console, and are forked before the progress bar has its thread. (torch's DataLoader forks in the same place.)
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy
import xxhash

from llama_ft.data.formats import BadRow, Row
from llama_ft.data.sources import Source
from llama_ft.data.tokenize import IGNORED, Encoded, Encoder
from llama_ft.errors import RunFailure, UserError
from llama_ft.processes import end_with

CHUNK_ROWS, CHUNK_BYTES = 256, 2**20
ROWS_INLINE, BYTES_INLINE = 2000, 2**22  # up to here one process is done before others have had their first chunk
CHUNKS_AHEAD = 4  # of each process: read or tokenized, but not yet asked for


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


@dataclass(frozen=True)
class EncodedChunk:
    """What became of a chunk; pieces are what is trained on: a row, or each part of one that was split.

    Attributes:
        row_of_piece: [pieces], in order.
        lengths: [pieces] tokens.
        target_tokens: [pieces] labels that count in the loss; never 0.
        digests: [pieces] hash of the tokens and labels.
        input_ids: int32, of all pieces one after the other; labels: the same.
        pieces: [rows] before those without a target were left out; 0: dropped, -1: a bad row.
        truncated: [rows] whether a part was cut off.
        row_tokens: [rows] before truncation; 0 of a bad row.
        content: [rows] hash of the row itself, see `content_hash`.
        problems: row -> what is wrong with it.
    """

    row_of_piece: numpy.ndarray
    lengths: numpy.ndarray
    target_tokens: numpy.ndarray
    digests: numpy.ndarray
    input_ids: numpy.ndarray
    labels: numpy.ndarray
    pieces: numpy.ndarray
    truncated: numpy.ndarray
    row_tokens: numpy.ndarray
    content: numpy.ndarray
    problems: dict[int, str]

    @property
    def lost_tokens(self) -> numpy.ndarray:
        """[rows] Tokens that no piece has. Pieces of one row share tokens, so they may have more than the row."""
        kept = numpy.bincount(self.row_of_piece, self.lengths, len(self.row_tokens))
        return (self.row_tokens - kept.astype(numpy.int64)).clip(0)


def content_hash(row: Row) -> int:
    """64 bits that twins share, wherever they stand."""
    content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def chunks_of(source: Source, wanted: str, if_empty: str = "") -> Iterator[Chunk]:
    """Group rows by number and size, so that what is in work stays small whatever the rows are.

    Arguments as of `Source.row_format`.
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


def encode_chunk(rows: list[bytes], encoder: Encoder) -> EncodedChunk:
    """Tokenize the rows of a chunk."""
    encoded: list[Encoded] = []
    row_of_piece, problems = [], {}
    pieces = numpy.full(len(rows), -1, dtype=numpy.int32)
    row_tokens = numpy.zeros(len(rows), dtype=numpy.int32)
    content = numpy.zeros(len(rows), dtype=numpy.uint64)
    truncated = numpy.zeros(len(rows), dtype=bool)
    for number, packed in enumerate(rows):
        try:
            row, row_format = pickle.loads(packed)
            if isinstance(row, BadRow):
                raise row
            content[number] = content_hash(row)
            whole = encoder.tokenize(row, row_format)
            made = encoder.fit(*whole)
        except (BadRow, RecursionError) as problem:
            problems[number] = str(problem)
            continue
        pieces[number], row_tokens[number] = len(made), len(whole[0])
        truncated[number] = any(piece.truncated for piece in made)
        encoded += made
        row_of_piece += [number] * len(made)
    lengths = numpy.array([len(piece.input_ids) for piece in encoded], dtype=numpy.int32)
    input_ids = numpy.fromiter(itertools.chain.from_iterable(it.input_ids for it in encoded), dtype=numpy.int32)
    labels = numpy.fromiter(itertools.chain.from_iterable(it.labels for it in encoded), dtype=numpy.int32)
    ends = numpy.cumsum(lengths)
    starts = ends - lengths
    counts = labels != IGNORED
    counts[starts[lengths > 0]] = False  # nothing predicts position 0
    sums = numpy.concatenate([[0], numpy.cumsum(counts)])
    target_tokens = (sums[ends] - sums[starts]).astype(numpy.int32)
    kept = target_tokens > 0
    tokens_kept = numpy.repeat(kept, lengths)
    return EncodedChunk(
        row_of_piece=numpy.array(row_of_piece, dtype=numpy.int32)[kept],
        lengths=lengths[kept],
        target_tokens=target_tokens[kept],
        digests=numpy.array(
            [
                xxhash.xxh3_64_intdigest(input_ids[start:end].tobytes() + labels[start:end].tobytes())
                for start, end in zip(starts[kept], ends[kept], strict=True)
            ],
            dtype=numpy.uint64,
        ),
        input_ids=input_ids[tokens_kept],
        labels=labels[tokens_kept],
        pieces=pieces,
        truncated=truncated,
        row_tokens=row_tokens,
        content=content,
        problems=problems,
    )


class ChunkEncoder:
    """Tokenizes chunks, on other processes once there is enough to do; iterate over it inside `with`.

    Args:
        chunks: of all rows.
        encoder: what tokenizes.
        processes: most of them; 1: this one.

    Attributes:
        used: processes that tokenize; 1: this one.
    """

    def __init__(self, chunks: Iterator[Chunk], encoder: Encoder, processes: int) -> None:
        self._encoder = encoder
        self._workers: dict[Connection, Any] = {}
        first, rows, nbytes = [], 0, 0
        while rows < ROWS_INLINE and nbytes < BYTES_INLINE and (chunk := next(chunks, None)):
            first.append(chunk)
            rows, nbytes = rows + len(chunk.rows), nbytes + sum(map(len, chunk.rows))
        self._chunks = itertools.chain(first, chunks)
        is_small = rows < ROWS_INLINE and nbytes < BYTES_INLINE
        self.used = 1 if is_small else processes

    def __enter__(self) -> "ChunkEncoder":
        if self.used > 1:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of forks else
            context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
            for _ in range(self.used):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(theirs, self._encoder, os.getpid()), daemon=True)
                worker.start()
                theirs.close()  # so that the end of a worker is the end of its pipe
                self._workers[ours] = worker
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, worker in self._workers.items():
            worker.kill()  # it has nothing to clean up, and may be in the middle of a chunk
            pipe.close()
        for worker in self._workers.values():
            worker.join()

    def __iter__(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        if not self._workers:
            return ((chunk, encode_chunk(chunk.rows, self._encoder)) for chunk in self._chunks)
        return self._spread()

    def _spread(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """A worker gets its next chunk when it has delivered the one before: neither ever waits to write to a pipe
        that the other does not read."""
        idle, busy = list(self._workers), dict[Connection, int]()
        waiting, done = dict[int, Chunk](), dict[int, EncodedChunk]()
        sent = yielded = 0
        is_more = True
        while is_more or waiting:
            while is_more and idle and sent - yielded < CHUNKS_AHEAD * self.used:
                chunk = next(self._chunks, None)
                if chunk is None:
                    is_more = False
                    break
                waiting[sent], pipe = chunk, idle.pop()
                busy[pipe] = sent
                with self._alive(waiting):
                    pipe.send(chunk.rows)
                sent += 1
            for ready in wait(list(busy)) if busy else ():
                assert isinstance(ready, Connection)
                with self._alive(waiting):
                    result = ready.recv()
                if isinstance(result, BaseException):
                    raise result
                done[busy.pop(ready)] = result
                idle.append(ready)
            while yielded in done:
                yield waiting.pop(yielded), done.pop(yielded)
                yielded += 1

    @contextmanager
    def _alive(self, in_work: dict[int, Chunk]) -> Iterator[None]:
        """Say what has probably happened when a worker is gone; other errors are sent by it."""
        try:
            yield
        except (EOFError, OSError):
            chunks = in_work.values()
            size, place = max(
                (len(row), at) for chunk in chunks for at, row in zip(chunk.places, chunk.rows, strict=True)
            )
            raise RunFailure(
                "a process that tokenized was killed, most likely by the kernel, for want of host memory.\n"
                f"There were {self.used} of them; the largest row they had was {place}, of {size:,} bytes.\n"
                f"--tokenize_processes {self.used // 2} takes less memory."
            ) from None


def _work(pipe: Connection, encoder: Encoder, parent: int) -> None:
    """What a worker does until it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal or a batch system sends them to all
        signal.signal(number, signal.SIG_IGN)
    end_with(parent, oom_score=500)  # where memory runs out, the kernel shall take this one: the run can then say why
    gc.freeze()  # the collector would touch, and so copy, all that is shared with the parent
    while True:
        try:
            rows = pipe.recv()
        except EOFError:
            return
        result: EncodedChunk | BaseException
        try:
            result = encode_chunk(rows, encoder)
        except UserError as error:
            result = error
        except Exception:
            result = RuntimeError(f"while tokenizing\n{traceback.format_exc()}")
        pipe.send(result)
