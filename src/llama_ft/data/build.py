"""Tokenize a dataset to disk with several processes. They receive chunks of samples and return
tables of tokens.

The processes are forked. A forked process starts in 0.06 s and takes 9 MiB. A spawned one would
import the recipe again (41 s until four are ready). The processes use neither torch nor the GPU nor
the console.
"""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import textwrap
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pyarrow
import xxhash
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter

from llama_ft.data.formats import (
    PREFERENCE,
    UNPAIRED,
    BadRow,
    Message,
    Row,
    RowFormat,
    is_desirable,
)
from llama_ft.data.loss_mask import ChatDiffers
from llama_ft.data.sources import Source
from llama_ft.data.statistics import ROW, BadKind, SplitStatistics, describe_kind
from llama_ft.data.tokenize import (
    Encoded,
    Encoder,
    Example,
    ExamplesOf,
    mismatch,
    unpaired_examples,
)
from llama_ft.errors import RunFailure, UserError, counted
from llama_ft.processes import end_with

# Tokenized examples or pieces of them. `group` neighboring rows of the table belong to one sample
# and stay together. `source` is the place of that sample. `desirable` is the label of a completion
# that has one, and null for all others.
FEATURES = Features(
    {
        **{name: List(Value("int32")) for name in ("input_ids", "labels")},
        **{name: Value("int32") for name in ("target_tokens", "group")},
        "source": Value("string"),
        "desirable": Value("bool"),
    }
)
CHUNK_ROWS = 256
CHUNK_BYTES = 2**20
BAD_ROWS_SHOWN = 5
# Of bad_samples.jsonl, at most about 7 MB. Messages may quote a value of the sample.
BAD_ROWS_LISTED = 10_000
MESSAGE_LENGTH = 500
KINDS_COUNTED = 30
KIND_LENGTH = 120
OTHER_KINDS = "other faults"
BAD_ROWS_COUNTED = 1000  # at this number of bad samples the run stops reading
# neighboring samples: place; sample and format, pickled to know the size
Chunk = list[tuple[str, bytes]]


class EncodedChunk(NamedTuple):
    """The result of tokenizing a chunk."""

    table: pyarrow.Table  # the examples, with the columns of FEATURES
    row_of_piece: numpy.ndarray  # for each row of the table, the index of its sample in the chunk
    rows: numpy.ndarray  # dtype `ROW`, one entry per sample of the chunk
    largest_id: int  # of the table's tokens; -1 if it is empty
    problems: list[str]  # one text per bad sample, with its place
    splits: dict[int, str]  # index of a chat that was split -> its place and the reason


def chunks_of(source: Source, wanted: str) -> Iterator[Chunk]:
    """Group samples by number and size, so that memory stays bounded. For the arguments see
    `Source.formatted_rows`."""
    chunk = Chunk()
    size = 0
    for place, row, row_format in source.formatted_rows(wanted):
        chunk.append((place, pickle.dumps((row, row_format), pickle.HIGHEST_PROTOCOL)))
        size += len(chunk[-1][1])
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk()
            size = 0
    if chunk:
        yield chunk


def encode_chunk(chunk: Chunk, encoder: Encoder, examples_of: ExamplesOf) -> EncodedChunk:
    """Tokenize the samples of a chunk."""
    # Index of the sample, one of its pieces, the size of its group, the index in the group, place.
    pieces = list[tuple[int, Encoded, int, int, str]]()
    rows = numpy.zeros(len(chunk), ROW)
    problems = list[str]()
    splits = dict[int, str]()
    # the examples of a sample; of each response if it is a chat that must be split
    tokenized = dict[int, list[list[Example]]]()
    labels_of = dict[int, bool]()
    for number, (place, packed) in enumerate(chunk):
        row, row_format = pickle.loads(packed)
        try:
            if isinstance(row, BadRow):
                raise row
            try:
                tokenized[number] = [examples_of(row, row_format, encoder)]
            except ChatDiffers as chat:
                tokenized[number] = _of_each_response(chat, row, row_format, encoder, examples_of)
                splits[number] = f"{place}: {chat.reason}"
                rows[number]["whole"] = encoder.text_tokens(chat.text)
        except (BadRow, RecursionError) as problem:
            rows[number]["bad"] = True
            problems.append(f"{place}: {problem}")
            continue
        if row_format == UNPAIRED:
            labels_of[number] = is_desirable(row)
        content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode(
            "utf-8", "surrogatepass"
        )
        # equal rows share it
        rows[number]["content"] = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    if examples_of is unpaired_examples:
        mismatch([examples for [examples] in tokenized.values()], encoder.context_length)
    for number, samples in tokenized.items():
        row = rows[number]
        for response, examples in enumerate(samples, 1):
            groups = list(zip(*(encoder.fit(*example) for example in examples), strict=False))
            trained = [group for group in groups if all(piece.target_tokens for piece in group)]
            is_truncated = any(piece.truncated for group in groups for piece in group)
            lengths = [len(input_ids) for input_ids, _ in examples]
            row["longest"] = max(row["longest"], *lengths)
            row["skipped"] += not trained
            row["truncated"] += bool(trained) and is_truncated
            place = chunk[number][0]
            if number in splits:
                row["responses"] += 1
                row["tokens"] += sum(lengths)
                place = f"{place}, response {response} of {len(samples)}"
            pieces += [
                (number, piece, len(group), at, place)
                for group in trained
                for at, piece in enumerate(group)
            ]
    ends = numpy.cumsum([0, *(len(piece.input_ids) for _, piece, *_ in pieces)]).astype(numpy.int32)
    input_ids, labels = (
        numpy.fromiter(itertools.chain.from_iterable(column), numpy.int32)
        for column in (
            (piece.input_ids for _, piece, *_ in pieces),
            (piece.labels for _, piece, *_ in pieces),
        )
    )
    columns = {
        "input_ids": pyarrow.ListArray.from_arrays(ends, input_ids),
        "labels": pyarrow.ListArray.from_arrays(ends, labels),
        "target_tokens": [piece.target_tokens for _, piece, *_ in pieces],
        "group": [group for _, _, group, *_ in pieces],
        "source": [place for *_, place in pieces],
        "desirable": [labels_of.get(row) if at == 0 else None for row, _, _, at, _ in pieces],
    }
    table = pyarrow.table(columns, schema=FEATURES.arrow_schema)
    row_of_piece = numpy.array([row for row, *_ in pieces], numpy.int32)
    largest_id = int(input_ids.max(initial=-1))
    return EncodedChunk(table, row_of_piece, rows, largest_id, problems, splits)


def _of_each_response(
    chat: ChatDiffers, row: Row, row_format: RowFormat, encoder: Encoder, examples_of: ExamplesOf
) -> list[list[Example]]:
    """Return the examples of each response of a chat that must be split.

    Raises:
        BadRow: the responses of a pair cannot be split.
    """
    if row_format in (PREFERENCE, UNPAIRED):
        raise BadRow(
            f"the chat template writes one of several messages of a response differently from how "
            f"inference does: {chat.reason}. Put all but the last message into the prompt, or use "
            "another --chat_template."
        )
    parts = encoder.piece_rows(chat, row)
    return [examples_of(part, "messages", encoder) for part in parts]


def encode_chunks(
    chunks: Iterator[Chunk], encoder: Encoder, examples_of: ExamplesOf, processes: int
) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Yield chunks and their results, in order. Closing the generator ends its processes.

    Args:
        chunks: chunks of samples.
        encoder: tokenizes them.
        examples_of: makes the examples of a sample.
        processes: number of processes that share the work.

    Raises:
        RunFailure: one of the processes was killed.
    """
    first = list(itertools.islice(chunks, processes))
    chunks = itertools.chain(first, chunks)
    if len(first) < 2:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, encoder, examples_of)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise it warns about forks
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(encoder, examples_of)) for _ in first]
        tasks = dict.fromkeys(workers, Chunk())
        for chunk, worker in zip(
            itertools.chain(chunks, [Chunk()] * len(first)), itertools.cycle(workers), strict=False
        ):
            done = tasks[worker]
            tasks[worker] = chunk
            # each process has at most one chunk: if both sides wrote at once, neither would read
            try:
                encoded = worker.recv() if done else None
                if chunk:
                    worker.send(chunk)
            except (EOFError, OSError):
                raise RunFailure(
                    f"one of {processes} tokenizer processes was killed, most likely by the kernel because host memory "
                    f"ran out.\nIt was near {(done or chunk)[0][0]}. --tokenize_processes {processes // 2} takes less."
                ) from None
            if isinstance(encoded, Exception):
                raise encoded
            if encoded is not None:
                yield done, encoded


@contextmanager
def _worker(encoder: Encoder, examples_of: ExamplesOf) -> Iterator[Connection]:
    """Fork a process that tokenizes chunks until the context ends, and yield the pipe to it.

    No other process holds the child's end of the pipe open. If the child is killed, reading from
    the pipe ends at once.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, os.getpid(), encoder, examples_of), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(pipe: Connection, parent: int, encoder: Encoder, examples_of: ExamplesOf) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run handles them and ends this process
        signal.signal(number, signal.SIG_IGN)
    # if memory runs out, the kernel kills this process, and the run reports it
    end_with(parent, oom_score=500)
    gc.freeze()  # the collector would write to, and so copy, all memory shared with the parent
    while True:
        pipe.send(attempt(encode_chunk, pipe.recv(), encoder, examples_of))


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Return its result, or the exception that it raised, to send it to another
    process."""
    try:
        return function(*arguments)
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(f"while samples were read and tokenized\n{traceback.format_exc()}")


class SplitWriter:
    """Writes tokenized samples to one Arrow file and counts them. `first_chat` is the first chat
    among the samples."""

    def __init__(self, path: Path, encoder: Encoder) -> None:
        self.statistics = SplitStatistics()
        self.first_chat = list[Message]()
        self._encoder = encoder
        self._checksums = [xxhash.xxh3_128() for _ in range(3)]
        self._writer = ArrowWriter(path=str(path), features=FEATURES)

    def add(self, chunk: Chunk, encoded: EncodedChunk, mine: numpy.ndarray) -> None:
        """Write the results of `chunk` for the samples of this split, which `mine`, bool [samples],
        marks."""
        self.statistics.count(encoded.rows[mine])
        if not self.statistics.first_split:
            reasons = (reason for number, reason in encoded.splits.items() if mine[number])
            self.statistics.first_split = next(reasons, "")
        kept = mine[encoded.row_of_piece]
        if not kept.any():
            return
        if not self.first_chat:
            content = self._encoder.read(*pickle.loads(chunk[encoded.row_of_piece[kept][0]][1]))
            self.first_chat = content if isinstance(content, list) else []
        table = encoded.table.filter(pyarrow.array(kept))
        input_ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
        arrays = [
            each.to_numpy()
            for each in (input_ids.value_lengths(), input_ids.flatten(), labels.flatten())
        ]
        told = table["desirable"].drop_null().to_numpy()
        self.statistics.desirable += int(told.sum())
        self.statistics.undesirable += int(len(told) - told.sum())
        for checksum, array in zip(
            self._checksums, [*arrays[:2], numpy.append(arrays[2], told)], strict=True
        ):
            checksum.update(numpy.ascontiguousarray(array).data)
        self.statistics.rows += len(table)
        self.statistics.tokens += len(arrays[1])
        self.statistics.target_tokens += int(table["target_tokens"].to_numpy().sum())
        self.statistics.largest_id = max(self.statistics.largest_id, encoded.largest_id)
        self._writer.write_table(table)

    def close(self) -> SplitStatistics:
        """Finish the file and return the statistics."""
        self._writer.finalize()
        checksums = "".join(checksum.hexdigest() for checksum in self._checksums)
        self.statistics.fingerprint = xxhash.xxh3_128_hexdigest(checksums.encode())
        return self.statistics


class BadRows:
    """Counts bad samples by kind. `refuse` stops a run that does not skip them.

    Args:
        skip: `--skip_bad_rows`.
        listing: file that gets a line of JSON per bad sample, BAD_ROWS_LISTED at most; None: no
            file. It is created with the first bad sample.
    """

    def __init__(self, skip: bool, listing: Path | None = None) -> None:
        self.skip = skip
        self.count = 0
        self.first = list[str]()
        self.kinds = dict[str, BadKind]()
        self._listing = listing

    def note(self, encoded: EncodedChunk) -> None:
        """Count the bad samples of a chunk.

        Raises:
            UserError: there are BAD_ROWS_COUNTED of them, and skip_bad_rows is off.
        """
        lines = list[str]()
        for problem in encoded.problems:
            place, _, message = problem.partition(": ")
            kind = _kind(message)
            if kind not in self.kinds and len(self.kinds) == KINDS_COUNTED:
                kind = OTHER_KINDS
            if self.count < BAD_ROWS_LISTED:
                shown = textwrap.shorten(message, MESSAGE_LENGTH, placeholder=" ...")
                lines.append(json.dumps({"sample": place, "kind": kind, "message": shown}) + "\n")
            self.count += 1
            known = self.kinds.get(kind, BadKind(0, place))
            self.kinds[kind] = known._replace(samples=known.samples + 1)
        self.first = [*self.first, *encoded.problems][:BAD_ROWS_SHOWN]
        if lines and self._listing is not None:
            with open(self._listing, "a", encoding="ascii") as listing:
                listing.writelines(lines)
        if self.count >= BAD_ROWS_COUNTED:
            self.refuse()

    def refuse(self) -> None:
        """Raise a UserError with the bad samples and their kinds, if there are any and
        skip_bad_rows is off."""
        if self.skip or not self.count:
            return
        kinds = [describe_kind(kind, *self.kinds[kind]) for kind in self.kinds]
        total = f"{counted(self.count, 'bad sample')}{' or more' if self.count >= BAD_ROWS_COUNTED else ''}:"
        way_out = (
            "--skip_bad_rows skips such samples and counts them; --repair_chats repairs chats."
        )
        raise UserError(
            *self.first[:-1], "\n  ".join([self.first[-1], total, *kinds]) + f"\n{way_out}"
        )


def _kind(message: str) -> str:
    """Return the message of a bad sample without its numbers, shortened, so that equal faults can
    be counted."""
    return textwrap.shorten(re.sub(r"(?<!UTF-)\d+", "N", message), KIND_LENGTH, placeholder=" ...")
