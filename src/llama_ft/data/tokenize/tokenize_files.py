"""Tokenize a dataset to disk with several processes. They receive chunks of samples and return
tables of tokens.

The processes are forked. A forked process starts in 0.06 s and takes 9 MiB. A spawned one would
import the recipe again (41 s until four are ready). The processes use neither torch nor the GPU nor
the console.
"""

import gc
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

from llama_ft.data.chat.loss_mask import ChatDiffers
from llama_ft.data.media import MediaExample, checksums_of
from llama_ft.data.read.formats import (
    PREFERENCE,
    UNPAIRED,
    BadSample,
    Message,
    Sample,
    SampleFormat,
    is_desirable,
    tools_of,
)
from llama_ft.data.read.media import located, plain_messages
from llama_ft.data.read.sources import Source
from llama_ft.data.read.values import TOO_DEEP, in_own_names
from llama_ft.data.tokenize.content import content_hash, contents_of, tool_counts
from llama_ft.data.tokenize.encoder import (
    Encoded,
    Encoder,
    Example,
    ExamplesOf,
    mismatch,
    unpaired_examples,
)
from llama_ft.data.tokenize.lengths import LOST_END, count_lengths, loses_an_end
from llama_ft.data.tokenize.statistics import (
    SAMPLE_FIELDS,
    BadKind,
    Duplicates,
    SplitStatistics,
    describe_kind,
)
from llama_ft.errors import RunFailure, UserError, plural
from llama_ft.processes import end_with

# Tokenized examples or pieces of them. `group` neighboring rows of the table belong to one sample
# and stay together. `source` is the place of that sample. `desirable` is the label of a completion
# that has one, and null for all others.
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "target_tokens": Value("int32"),
        "group": Value("int32"),
        "source": Value("string"),
        "desirable": Value("bool"),
    }
)
# Data with media have two more columns, null for samples without any; see `MediaExample`.
MEDIA_FEATURES = Features({**FEATURES, "text": Value("string"), "media": List(Value("string"))})
CHUNK_SAMPLES = 256
CHUNK_BYTES = 2**20
BAD_SAMPLES_SHOWN = 5
OF_TEMPLATE = "the chat template"  # with which messages begin that are not about one sample
# Of bad_samples.jsonl, at most about 7 MB. Messages may quote a value of the sample.
BAD_ROWS_LISTED = 10_000
MESSAGE_LENGTH = 500
KINDS_COUNTED = 30
KIND_LENGTH = 120
OTHER_KINDS = "other faults"
BAD_SAMPLES_COUNTED = 1000  # at this number of bad samples the run stops reading
# neighboring samples: place; sample and format, pickled to know the size
Chunk = list[tuple[str, bytes]]


class Piece(NamedTuple):
    """A row of the table of tokenized examples, before it is written as Arrow."""

    sample: int  # index of its sample in the chunk
    encoded: Encoded
    together: int  # number of pieces that stay together
    position: int  # among them, counted from 0
    place: str  # of the sample, for messages


class EncodedChunk(NamedTuple):
    """The result of tokenizing a chunk."""

    table: pyarrow.Table  # the examples, with the columns of FEATURES
    # for each row of the table, the index of its sample in the chunk
    sample_of_piece: numpy.ndarray
    samples: numpy.ndarray  # dtype `SAMPLE_FIELDS`, one entry per sample of the chunk
    largest_id: int  # of the table's tokens; -1 if it is empty
    problems: list[str]  # one text per bad sample, with its place
    splits: dict[int, str]  # index of a chat that was split -> its place and the reason
    notes: dict[str, BadKind]  # what should be said about valid samples


def chunks_of(source: Source, format_name: str) -> Iterator[Chunk]:
    """Group samples by number and size, so that memory stays bounded. For the arguments see
    `Source.formatted_samples`."""
    chunk = Chunk()
    size = 0
    for place, sample, sample_format in source.formatted_samples(format_name):
        packed = pickle.dumps((sample, sample_format), pickle.HIGHEST_PROTOCOL)
        chunk.append((place, packed))
        size += len(packed)
        if len(chunk) == CHUNK_SAMPLES or size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk()
            size = 0
    if chunk:
        yield chunk


def encode_chunk(chunk: Chunk, encoder: Encoder, examples_of: ExamplesOf) -> EncodedChunk:
    """Tokenize the samples of a chunk."""
    samples = numpy.zeros(len(chunk), SAMPLE_FIELDS)
    problems = list[str]()
    splits = dict[int, str]()
    notes = dict[str, BadKind]()
    # the examples of a sample; of each part if it is a chat that must be split
    tokenized = dict[int, list[list[Example]]]()
    desirable = dict[int, bool]()
    for number, (place, packed) in enumerate(chunk):
        sample, sample_format = pickle.loads(packed)
        try:
            if isinstance(sample, BadSample):
                raise sample
            located_sample = sample if encoder.media is None else located(sample, place)
            try:
                tokenized[number] = [examples_of(located_sample, sample_format, encoder)]
            except ChatDiffers as chat:
                tokenized[number] = _of_each_part(
                    chat, located_sample, sample_format, encoder, examples_of
                )
                splits[number] = f"{place}: {chat.reason}"
                samples[number]["whole"] = encoder.text_tokens(chat.text)
        except (BadSample, RecursionError) as problem:
            samples[number]["bad"] = True
            wrong = in_own_names(problem, sample)
            if isinstance(problem, RecursionError):
                wrong = TOO_DEEP
            problems.append(f"{place}: {wrong}")
            continue
        for note in encoder.notes_of(sample, sample_format, place):
            notes[note] = BadKind.counted(notes.get(note), 1, place)
        if sample_format == UNPAIRED:
            desirable[number] = is_desirable(sample)
        examples = list(itertools.chain.from_iterable(tokenized[number]))
        media = [one.media for one in examples if isinstance(one, MediaExample)]
        said = encoder.with_media(located_sample, sample_format) if media else sample
        checksums = b"".join(map(checksums_of, media))
        contents = contents_of(said, sample_format)
        samples[number]["content"] = content_hash(contents, checksums)
        samples[number]["tool_calls"], samples[number]["tool_results"] = tool_counts(contents)
        samples[number]["encoded"] = _encoded_hash(tokenized[number], desirable.get(number))
    if examples_of is unpaired_examples:
        # A completion is not split, so each sample has one list of examples.
        mismatch([examples for [examples] in tokenized.values()], encoder.context_length)
    pieces = list[Piece]()
    for number, parts in tokenized.items():
        counts = samples[number]
        if _loses_an_end(parts, encoder):
            notes[LOST_END] = BadKind.counted(notes.get(LOST_END), 1, chunk[number][0])
        for part, examples in enumerate(parts, start=1):
            place, _ = chunk[number]
            if number in splits:
                counts["responses"] += 1
                counts["tokens"] += sum(len(input_ids) for input_ids, _ in examples)
                place = f"{place}, part {part} of {len(parts)}"
            groups = _fitting_groups(examples, encoder, counts)
            for group in groups:
                for position, encoded in enumerate(group):
                    pieces.append(Piece(number, encoded, len(group), position, place))
    table = _table(pieces, desirable, with_media=encoder.media is not None)
    sample_of_piece = numpy.array([piece.sample for piece in pieces], numpy.int32)
    input_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
    largest_id = int(input_ids.max(initial=-1))
    return EncodedChunk(table, sample_of_piece, samples, largest_id, problems, splits, notes)


def _encoded_hash(responses: list[list[Example]], is_desirable: bool | None) -> int:
    """Return a 64-bit hash of all that a sample trains: its tokens and labels before truncation, its
    media, and the label of a completion. Equal samples share it, also in other formats."""
    digest = xxhash.xxh3_64(repr(is_desirable).encode())
    for example in itertools.chain.from_iterable(responses):
        input_ids, labels = example
        digest.update(numpy.array([len(input_ids), *input_ids, *labels], numpy.int32).data)
        if isinstance(example, MediaExample):
            digest.update(checksums_of(example.media))
    return digest.intdigest()


def _fitting_groups(
    examples: list[Example], encoder: Encoder, counts: numpy.void
) -> list[tuple[Encoded, ...]]:
    """Return the pieces of examples that stay together, without groups in which an example has no
    token in the loss.

    Args:
        examples: the examples of a sample, or of a response.
        encoder: brings them to its context_length.
        counts: the entry of dtype `SAMPLE_FIELDS` of their sample, to which this adds.
    """
    fitted = [encoder.fit_example(example) for example in examples]
    # With truncation=split, examples may have different numbers of pieces. Pieces without a partner
    # are left out.
    groups = list(zip(*fitted, strict=False))
    trained = []
    is_truncated = False
    for group in groups:
        if all(piece.target_tokens for piece in group):
            trained.append(group)
        if any(piece.truncated for piece in group):
            is_truncated = True
    lengths = [len(input_ids) for input_ids, _ in examples]
    counts["longest"] = max(counts["longest"], *lengths)
    count_lengths(examples, counts)
    counts["skipped"] += not trained
    counts["truncated"] += bool(trained) and is_truncated
    for example in examples:
        if trained and isinstance(example, MediaExample):
            counts["media"] += len(example.media)
            counts["media_tokens"] += example.media_tokens
            counts["longest_media"] = max(counts["longest_media"], example.media_tokens)
    return trained


def _loses_an_end(responses: list[list[Example]], encoder: Encoder) -> bool:
    """Return whether truncation takes the end of a response from one of the examples."""
    if encoder.truncation != "right":
        return False
    examples = itertools.chain.from_iterable(responses)
    return any(loses_an_end(labels, encoder.context_length) for _, labels in examples)


def _table(
    pieces: list[Piece], desirable: dict[int, bool], with_media: bool = False
) -> pyarrow.Table:
    """Make the table of tokenized examples.

    Args:
        pieces: the rows.
        desirable: index of a sample -> its label, for completions with one. Only the first piece of
            the sample gets it: the second one has another completion.
        with_media: the table has the columns of MEDIA_FEATURES.
    """
    encoded = [piece.encoded for piece in pieces]
    lengths = [len(piece.input_ids) for piece in encoded]
    # Arrow stores a column of lists as all numbers, and where each list begins and ends.
    offsets = numpy.cumsum([0, *lengths]).astype(numpy.int32)
    # fromiter fills an array of int32 without a Python list of all tokens
    ids = itertools.chain.from_iterable(piece.input_ids for piece in encoded)
    labels = itertools.chain.from_iterable(piece.labels for piece in encoded)
    columns = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, numpy.fromiter(ids, numpy.int32)),
        "labels": pyarrow.ListArray.from_arrays(offsets, numpy.fromiter(labels, numpy.int32)),
        "target_tokens": [piece.target_tokens for piece in encoded],
        "group": [piece.together for piece in pieces],
        "source": [piece.place for piece in pieces],
        "desirable": [
            desirable.get(piece.sample) if piece.position == 0 else None for piece in pieces
        ],
    }
    if not with_media:
        return pyarrow.table(columns, schema=FEATURES.arrow_schema)
    columns["text"] = [piece.text for piece in encoded]
    columns["media"] = [list(piece.media) or None for piece in encoded]
    return pyarrow.table(columns, schema=MEDIA_FEATURES.arrow_schema)


def _of_each_part(
    chat: ChatDiffers,
    sample: Sample,
    sample_format: SampleFormat,
    encoder: Encoder,
    examples_of: ExamplesOf,
) -> list[list[Example]]:
    """Return the examples of each part of a chat that must be split.

    Raises:
        BadSample: the responses of a pair cannot be split.
    """
    if sample_format in (PREFERENCE, UNPAIRED):
        raise BadSample(
            f"the chat template writes one of several messages of a response differently from how "
            f"inference does: {chat.reason}. Put all but the last message into the prompt, or use "
            "another --chat_template."
        )
    parts = encoder.piece_rows(chat, sample)
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
        # The chunks go to the processes in turn, so the results come back in order. An empty chunk
        # per process at the end fetches the last results.
        no_chunks = [Chunk()] * len(first)
        all_chunks = itertools.chain(chunks, no_chunks)
        for chunk, worker in zip(all_chunks, itertools.cycle(workers), strict=False):
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
    among the samples, and `first_tools` are its tools. `deduplicate` leaves out samples with the
    tokens and labels of an earlier one."""

    def __init__(self, path: Path, encoder: Encoder, deduplicate: bool = False) -> None:
        self.statistics = SplitStatistics(deduplicated=deduplicate)
        self.hashes = numpy.empty(0, numpy.uint64)  # of the distinct samples, after close()
        self._duplicates = Duplicates(deduplicate)
        self.first_chat = list[Message]()
        self.first_tools: list[dict[str, Any]] | None = None
        self._encoder = encoder
        self._checksums = [xxhash.xxh3_128() for _ in range(3)]
        self._with_media = encoder.media is not None
        features = MEDIA_FEATURES if self._with_media else FEATURES
        self._writer = ArrowWriter(path=str(path), features=features)
        if self._with_media:
            self._checksums.append(xxhash.xxh3_128())

    def add(self, chunk: Chunk, encoded: EncodedChunk, mine: numpy.ndarray) -> numpy.ndarray:
        """Write the results of `chunk` for the samples of this split, which `mine`, bool [samples],
        marks. Return those of them that are valid and not left out as duplicates."""
        places = [place for place, _ in chunk]
        valid = mine & ~encoded.samples["bad"]
        mine = self._duplicates.first_ones(places, encoded.samples["encoded"], valid)
        self.statistics.count(encoded.samples[mine])
        if not self.statistics.first_split:
            for number, reason in encoded.splits.items():
                if mine[number]:
                    self.statistics.first_split = reason
                    break
        is_kept = mine[encoded.sample_of_piece]
        if not is_kept.any():
            return mine
        if not self.first_chat:
            first_kept = encoded.sample_of_piece[is_kept][0]
            place, packed = chunk[first_kept]
            sample, sample_format = pickle.loads(packed)
            if self._with_media:
                sample = located(sample, place)
            content = self._encoder.read(sample, sample_format)
            if isinstance(content, list):
                self.first_chat = plain_messages(content)
                self.first_tools = tools_of(sample)
        table = encoded.table.filter(pyarrow.array(is_kept))
        lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
        input_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        labels = table["labels"].combine_chunks().flatten().to_numpy()
        desirable = table["desirable"].drop_null().to_numpy()
        self.statistics.desirable += int(desirable.sum())
        self.statistics.undesirable += int(len(desirable) - desirable.sum())
        checked = [lengths, input_ids, numpy.append(labels, desirable)]
        if self._with_media:
            references = table["media"].combine_chunks().flatten().to_pylist()
            checked.append(numpy.frombuffer(checksums_of(references), numpy.uint8))
        for checksum, array in zip(self._checksums, checked, strict=True):
            checksum.update(numpy.ascontiguousarray(array).data)
        self.statistics.samples += len(table)
        self.statistics.tokens += len(input_ids)
        self.statistics.target_tokens += int(table["target_tokens"].to_numpy().sum())
        self.statistics.largest_id = max(self.statistics.largest_id, encoded.largest_id)
        self._writer.write_table(table)
        return mine

    def close(self) -> SplitStatistics:
        """Finish the file and return the statistics."""
        self._writer.finalize()
        self.hashes, self.statistics.duplicates = self._duplicates.distinct()
        checksums = "".join(checksum.hexdigest() for checksum in self._checksums)
        self.statistics.fingerprint = xxhash.xxh3_128_hexdigest(checksums.encode())
        return self.statistics


class BadSamples:
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
        self.notes = dict[str, BadKind]()  # about samples that are valid
        self._listing = listing

    def note(self, encoded: EncodedChunk) -> None:
        """Count the bad samples of a chunk, and what should be said about the others.

        Raises:
            UserError: there are BAD_SAMPLES_COUNTED of them, and skip_bad_rows is off.
        """
        lines = list[str]()
        for problem in encoded.problems:
            place, _, message = problem.partition(": ")
            kind = _kind(message)
            if kind not in self.kinds and len(self.kinds) == KINDS_COUNTED:
                kind = OTHER_KINDS
            if self.count < BAD_ROWS_LISTED:
                shown = textwrap.shorten(message, MESSAGE_LENGTH, placeholder=" ...")
                line = {"sample": place, "kind": kind, "message": shown}
                lines.append(json.dumps(line) + "\n")
            self.count += 1
            self.kinds[kind] = BadKind.counted(self.kinds.get(kind), 1, place)
            # A fault of the template is shown once, whatever the number of samples.
            is_known = any(shown.endswith(message) for shown in self.first)
            if len(self.first) < BAD_SAMPLES_SHOWN and not (
                is_known and message.startswith(OF_TEMPLATE)
            ):
                self.first.append(problem)
        if lines and self._listing is not None:
            with open(self._listing, "a", encoding="ascii") as listing:
                listing.writelines(lines)
        for text, (samples, first) in encoded.notes.items():
            if text in self.notes or len(self.notes) < KINDS_COUNTED:
                self.notes[text] = BadKind.counted(self.notes.get(text), samples, first)
        if self.count >= BAD_SAMPLES_COUNTED:
            self.refuse()

    def refuse(self) -> None:
        """Raise a UserError with the bad samples and their kinds, if there are any and
        skip_bad_rows is off."""
        if self.skip or not self.count:
            return
        kinds = list[str]()
        if self.count > len(self.first):  # else all bad samples are shown
            kinds = [describe_kind(kind, *counts) for kind, counts in self.kinds.items()]
        or_more = " or more" if self.count >= BAD_SAMPLES_COUNTED else ""
        total = f"{plural(self.count, 'bad sample')}{or_more}{':' if kinds else '.'}"
        way_out = (
            "--skip_bad_rows skips such samples and counts them; --repair_chats repairs chats."
        )
        # Each argument is an error of its own. The counts follow the last one.
        *first, last = self.first
        counts_of_kinds = "\n  ".join([last, total, *kinds])
        raise UserError(*first, f"{counts_of_kinds}\n{way_out}")


def _kind(message: str) -> str:
    """Return the message of a bad sample without its numbers and paths, shortened, so that
    equal faults can be counted."""
    without_paths = re.sub(r"(?<!\S)/\S+", "FILE", message)
    without_numbers = re.sub(r"(?<!UTF-)\d+", "N", without_paths)
    return textwrap.shorten(without_numbers, KIND_LENGTH, placeholder=" ...")
