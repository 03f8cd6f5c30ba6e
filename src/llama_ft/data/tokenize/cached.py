"""The tokenized samples in the cache: what determines them, which names their directory, and how they
are made."""

import hashlib
import inspect
import json
import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy

from llama_ft.config import DataConfig
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.cache import build_once
from llama_ft.data.read.media import IN_KEY
from llama_ft.data.read.sources import Source, Split
from llama_ft.data.tokenize.encoder import Encoder, ExamplesOf
from llama_ft.data.tokenize.statistics import BuildReport, SplitStatistics
from llama_ft.data.tokenize.tokenize_files import (
    BadSamples,
    SplitWriter,
    chunks_of,
    encode_chunks,
)
from llama_ft.errors import UserError, plural
from llama_ft.processes import cores
from llama_ft.runtime.console import log

# increase it if streamed samples get other tokens; without streaming, the cache hashes the code
CODE_VERSION = 9
# modules that determine the tokens
CODE = (
    "chat/chat_template tokenize/content read/files read/formats read/media chat/loss_mask tokenize/notes "
    "media read/reshape tokenize/lengths tokenize/statistics tokenize/encoder tokenize/tokenize_files read/values"
).split()
SECONDS_BETWEEN_LINES = 10.0
HASHES = "{}.hashes.npy"  # of the distinct samples of a split, uint64
# Numbers of the samples that a fraction keeps out of training, in the order of
# `Source.formatted_samples`, int64.
HELD_OUT = "held_out.npy"


@dataclass(frozen=True)
class Tokenization:
    """Everything that determines the tokenized samples."""

    source: Source
    validation: Source | None
    fraction: float | None
    config: DataConfig
    encoder: Encoder
    examples: ExamplesOf


def tokenized(tokenization: Tokenization, cache: Path, verify: bool) -> tuple[BuildReport, Path]:
    """Return the counts and the directory of the tokenized samples, from the cache or newly made.

    With streaming these are the validation samples, if there are any.
    """
    # A change of this code must not reuse samples that the old code has tokenized.
    code = hashlib.sha256(inspect.getsource(tokenization.examples).encode())
    folder_of_data = Path(__file__).parent.parent
    files = [folder_of_data / f"{name}.py" for name in CODE]
    files += sorted(folder_of_data.glob("read/traces/*.py"))
    media = tokenization.encoder.media
    if media is not None:
        files += media.code
    for file in files:
        code.update(file.read_bytes())
    is_streaming = tokenization.config.streaming
    key = _key(tokenization, f"{code.hexdigest()} {is_streaming}")
    folder = cache / "tokenized" / key
    report = BuildReport(SplitStatistics())
    if tokenization.validation or not is_streaming:
        build = partial(_build, tokenization=tokenization)
        build_once(folder, build, verify)
        if media and verify and media.remove_incomplete(folder):
            build_once(folder, build, verify)
        report = BuildReport.load(folder / "meta.json")
    if is_streaming:
        report.train.fingerprint = _streamed_fingerprint(tokenization)
    return report, folder


def _streamed_fingerprint(tokenization: Tokenization) -> str:
    """Return a checksum of what determines the streamed training samples.

    A run may resume with its data in another directory, with another validation file and with
    another --skip_bad_rows, so these are not part of it.
    """
    training_only = replace(
        tokenization,
        source=replace(tokenization.source, name=""),
        validation=None,
        config=replace(tokenization.config, skip_bad_rows=False),
    )
    return _key(training_only, f"{CODE_VERSION} {tokenization.examples.__qualname__}")


def _key(tokenization: Tokenization, code: str) -> str:
    """Return a checksum of `code` and of everything that determines the tokenized samples.

    The order of the parts must not change: a checkpoint of a streaming run stores this checksum.
    """
    source = tokenization.source
    encoder = tokenization.encoder
    tokenizer = encoder.tokenizer
    tokenizer("")  # to_str() includes the last truncation and padding; a plain call resets them
    validation = [str(tokenization.fraction)]
    if tokenization.validation:
        validation = [tokenization.validation.name, tokenization.validation.identity]
    parts = [
        code,
        source.name,  # the places of samples contain it
        source.identity,
        *validation,
        tokenization.config.dataset_format,
        str(tokenization.config.skip_bad_rows),
        encoder.truncation,
        encoder.labels,
        str(encoder.context_length),
        encoder.reasoning_content,
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    if encoder.takes_media:  # there are other warnings
        parts.append(IN_KEY)
    if encoder.media is not None:
        parts.append(encoder.media.identity)
        # paths of media are relative to the data files
        for each in (tokenization.source, tokenization.validation):
            if each is not None:
                files = each.datasets or (each,)
                parts += [os.path.abspath(file.name) for file in files]
    if tokenization.config.deduplicate:
        parts.append("deduplicate")
    if encoder.turn_ends:
        parts.append(json.dumps(encoder.turn_ends))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(folder: Path, tokenization: Tokenization) -> None:
    """Write train.arrow (except with streaming), validation.arrow (if there is validation data) and
    meta.json."""
    started = time.monotonic()
    bad = BadSamples(tokenization.config.skip_bad_rows, folder / BAD_SAMPLES_FILE)
    deduplicate = tokenization.config.deduplicate
    splits: dict[Split, SplitWriter] = {}
    if not tokenization.config.streaming:
        splits["train"] = SplitWriter(folder / "train.arrow", tokenization.encoder, deduplicate)
    if tokenization.fraction or tokenization.validation:
        splits["validation"] = SplitWriter(
            folder / "validation.arrow", tokenization.encoder, deduplicate
        )
    samples, held_out = _write_splits(tokenization, splits, bad)
    bad.refuse()
    # the validation split comes last, if there is one
    *_, last_split = splits.values()
    written = {name: split.close() for name, split in splits.items()}
    for name, statistics in written.items():
        if not statistics.samples:
            others = sum(split.samples for split in written.values())
            raise _nothing_left(tokenization, name, statistics, others, bad)
    train = written.get("train", SplitStatistics())
    validation = written.get("validation")
    numpy.save(folder / HELD_OUT, held_out)
    for name, split in splits.items():
        numpy.save(folder / HASHES.format(name), split.hashes)
    report = BuildReport(
        train,
        validation,
        bad.count,
        bad.kinds,
        last_split.first_chat or None,
        last_split.first_tools,
        notes=bad.notes,
    )
    report.save(folder / "meta.json")
    log.info(f"tokenized {plural(samples, 'sample')} in {time.monotonic() - started:.1f} s")


def _write_splits(
    tokenization: Tokenization, splits: dict[Split, SplitWriter], bad: BadSamples
) -> tuple[int, numpy.ndarray]:
    """Tokenize all samples, write them to their splits and count the bad ones. Return the number of
    samples read, and the numbers of those in the validation split."""
    config = tokenization.config
    sources = list[Source]()
    if not config.streaming:
        sources.append(tokenization.source)
    if tokenization.validation:
        sources.append(tokenization.validation)
    processes = config.tokenize_processes or cores()
    samples = 0
    held_out_numbers = [numpy.empty(0, numpy.int64)]
    started = time.monotonic()
    logged = started
    for source in sources:
        chunks = chunks_of(source, config.dataset_format)
        results = encode_chunks(chunks, tokenization.encoder, tokenization.examples, processes)
        with closing(results):  # ends its processes if an error stops this loop
            for chunk, encoded in results:
                bad.note(encoded)
                held_out = numpy.full(len(chunk), source is tokenization.validation)
                if tokenization.fraction is not None:
                    # The hash of the content is a random number from 0 to 1. So the split does not
                    # depend on the order of the samples, and equal samples are in the same split.
                    held_out = encoded.samples["content"] / 2**64 < tokenization.fraction
                for name, split in splits.items():
                    is_validation = name == "validation"
                    is_kept = split.add(chunk, encoded, held_out if is_validation else ~held_out)
                    if is_validation and tokenization.fraction is not None:
                        held_out_numbers.append(samples + numpy.flatnonzero(is_kept))
                samples += len(chunk)
                if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                    logged = time.monotonic()
                    log.info(f"tokenizing: {plural(samples, 'sample')} in {logged - started:.0f} s")
    return samples, numpy.concatenate(held_out_numbers)


def _nothing_left(
    tokenization: Tokenization,
    name: Split,
    statistics: SplitStatistics,
    others: int,
    bad: BadSamples,
) -> UserError:
    """Return the error for a split without samples. `others`: samples of the other split."""
    source = tokenization.source
    if name == "validation" and tokenization.validation:
        source = tokenization.validation
    taken = ""
    if tokenization.fraction is not None:
        samples = plural(others, "sample")
        taken = f"--validation {tokenization.fraction:g} put {samples} into the other split, "
    return UserError(
        f"{source.name}: no sample is left for {name}: {taken}{statistics.skipped:,} are longer than "
        f"--context_length {tokenization.encoder.context_length} (see --truncation) or "
        f"have no tokens in the loss, "
        f"{bad.count:,} are bad.\nUse other data, another fraction, or --run_validation False."
    )
