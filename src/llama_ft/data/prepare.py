"""One call from `--dataset` to tokenized rows on disk, taken from the cache when nothing has changed."""

import dataclasses
import hashlib
import json
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from datasets import Dataset

from llama_ft.config import DataConfig, as_fraction
from llama_ft.data.build import BadRows, SplitWriter, chunks_of, encode_chunks, enough_processes, report_on
from llama_ft.data.cache import build_once
from llama_ft.data.chat_template import ensure_chat_template
from llama_ft.data.formats import FORMATS, BadRow, Message, TokenRow, find_format
from llama_ft.data.sources import Source, Split, brings_validation, open_source
from llama_ft.data.statistics import BuildReport, SplitStatistics, describe, warnings_of
from llama_ft.data.tokenize import Encoder
from llama_ft.errors import UserError
from llama_ft.processes import cores
from llama_ft.runtime.console import log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 5  # raise it when the same rows come out as other tokens, or meta.json changes
SECONDS_BETWEEN_LINES = 10.0
NO_VALIDATION = "no validation data: --validation FILE or --validation 0.05"
HOW_TO_VALIDATE = "Expected a larger fraction (equal rows go together), a file, or --run_validation False."


@dataclass(frozen=True)
class TokenizedData:
    """Rows ready for training, memory-mapped.

    Attributes:
        train: columns input_ids and labels (int32 lists), target_tokens (int32: labels that count in the loss) and
            source (the place of the row, for messages). None with streaming.
        validation: the same, or None.
        chat_sample: a chat of the validation (else the training) rows whose last turn is the reference answer.
        summary: lines for people.
        report: all that was counted.
        stream: with streaming, where the training rows come from and what tokenizes them.
    """

    train: Dataset | None
    validation: Dataset | None
    chat_sample: list[Message] | None
    summary: list[str]
    report: BuildReport
    stream: tuple[Source, Encoder] | None = None

    def fingerprints(self) -> dict[str, str]:
        """dataset, and validation where there is any -> a checksum of its tokens and labels; of streamed rows, of all
        that decides them."""
        prints = {"dataset": self.report.train.fingerprint}
        if self.validation is not None and self.report.validation is not None:
            prints["validation"] = self.report.validation.fingerprint
        return prints

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest training row before truncation; None with streaming."""
        return self.report.train.lengths[-1] if self.report.train.lengths else None

    @property
    def target_share(self) -> float:
        """Training tokens that count in the loss, of all; 1 with streaming."""
        return self.report.train.target_tokens / self.report.train.tokens if self.report.train.tokens else 1.0

    def facts(self) -> dict[str, Any]:
        """What was counted, as plain values, for the run's report."""
        counted = dataclasses.asdict(self.report)
        validation = counted["validation"] if self.validation is not None else None
        return {
            "summary": self.summary,
            "warnings": warnings_of(self.report, self.validation is not None),
            "train": counted["train"],
            "validation": validation,
            "edges": self.report.edges,
        }


@dataclass(frozen=True)
class _Job:
    """All that decides what the tokenized rows are, beside the encoder."""

    source: Source
    fraction: float | None
    validation: Source | None
    wanted_format: str
    skip_bad_rows: bool


def prepare(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    context_length: int,
    cache: Path,
    want_validation: bool,
    vocabulary_size: int | None = None,
    add_tokens: bool = False,
    use: Split = "train",
    verify: bool = True,
) -> TokenizedData:
    """Tokenize what `config` names, or take it from the cache.

    The tokenizer gets the chat template that is asked for, or the built-in one if it has none, in place, so that it is
    saved with the result.

    Args:
        config: everything but batching_strategy. With streaming only validation rows are tokenized here.
        tokenizer: of the model to be trained.
        context_length: longest row in tokens.
        cache: folder of the demo and of tokenized data, see `cache_dir`.
        want_validation: False leaves `validation` None; a fraction of the rows is held out all the same.
        vocabulary_size: of the model; a tokenizer may have ids beyond it as long as no row does. None: not checked.
        add_tokens: the model gets rows for special tokens that the chat template writes and the tokenizer lacks.
        use: what the rows of config.dataset, which come as `train`, are for: validation takes the split meant for it.
        verify: compare what is in the cache with its checksums; one process of a node does.

    Raises:
        UserError: the data cannot be used; several bad rows are reported together.
    """
    job = _plan(config, tokenizer, cache, want_validation, use)
    kinds, formats = _look_at_formats(job)
    note = ""
    if config.chat_template or list in kinds or not kinds:
        note = ensure_chat_template(tokenizer, config.chat_template, add_tokens)
    elif tokenizer.eos_token_id is None and kinds != {TokenRow}:
        note = "the tokenizer has no EOS token: the model does not learn where to stop"
    encoder = Encoder(tokenizer, context_length, config.truncation, config.labels)
    streamed, to_build = SplitStatistics(), job
    if config.streaming:
        nameless = dataclasses.replace(job.source, name="")
        streamed.fingerprint = _key(_Job(nameless, None, None, job.wanted_format, skip_bad_rows=False), encoder)
        to_build = dataclasses.replace(job, source=job.validation or job.source, validation=None)
    report = BuildReport(streamed)
    folder = cache / "tokenized" / _key(to_build, encoder)
    if not config.streaming or job.validation:
        processes = config.tokenize_processes or cores()
        build_once(folder, lambda temporary: _build(temporary, to_build, encoder, processes), verify)
        report = BuildReport.load(folder / "meta.json")
        if config.streaming:
            report.train, report.validation = streamed, report.train
    _check_ids(report, tokenizer, vocabulary_size)
    summary = [*([note] if note else []), *formats, *describe(report, context_length, want_validation)]
    if want_validation and report.validation is None:
        summary.append(NO_VALIDATION)
    held_out = "train" if config.streaming else "validation"  # streamed, it is a build of its own
    has_validation = report.validation is not None and want_validation
    return TokenizedData(
        train=None if config.streaming else Dataset.from_file(str(folder / "train.arrow")),
        validation=Dataset.from_file(str(folder / f"{held_out}.arrow")) if has_validation else None,
        chat_sample=report.chat_sample,
        summary=summary,
        report=report,
        stream=(job.source, encoder) if config.streaming else None,
    )


def _plan(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", cache: Path, want_validation: bool, use: Split
) -> _Job:
    """Open the sources that `--dataset` and `--validation` name."""
    source = open_source(config.dataset, use, config=config, tokenizer=tokenizer, cache=cache)
    fraction = _fraction(config.validation)
    validation: Source | None = None
    if want_validation and fraction is None:
        brings_one = not config.validation and brings_validation(config.dataset, config.streaming)
        if name := config.dataset if brings_one else config.validation:
            validation = open_source(name, "validation", config=config, tokenizer=tokenizer, cache=cache)
    return _Job(source, fraction, validation, config.dataset_format, config.skip_bad_rows)


def _look_at_formats(job: _Job) -> tuple[set[type], list[str]]:
    """What the first rows hold (a list is a chat), and lines about the formats and columns of all parts."""
    kinds, lines = set[type](), dict[str, list[str]]()
    for source in (job.source, job.validation):
        for part in (source.parts or (source,)) if source else ():
            rows = part.first_rows(if_empty=HOW_TO_VALIDATE if source is job.validation else "")
            columns = {column for row in rows for column in row}
            row_format = find_format(part.name, columns, job.wanted_format)
            for row in rows:
                with suppress(BadRow):
                    kinds.add(type(FORMATS[row_format].read(row)))
            known = (*FORMATS[row_format].required, *FORMATS[row_format].optional)
            line = f"format {row_format}, columns {', '.join(name for name in known if name in columns)}"
            if ignored := sorted(columns.difference(known)):
                line += f"; ignored: {', '.join(ignored)}"
            lines.setdefault(line, []).append(part.name)
    return kinds, [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in lines.items()]


def _fraction(validation: str | None) -> float | None:
    """`--validation 0.05` as a number; None for a file or nothing."""
    fraction = as_fraction(validation)
    if fraction is not None and not 0 < fraction < 1:
        raise UserError(f"--validation {validation}: expected a fraction between 0 and 1, such as 0.05, or a file.")
    return fraction


def _key(job: _Job, encoder: Encoder) -> str:
    tokenizer = encoder.tokenizer
    tokenizer("")  # the backend's text holds its last truncation and padding, too: a plain call resets them
    parts = [
        str(CODE_VERSION),
        *(job.source.name, job.source.identity),  # the name stands in the places of rows
        *((job.validation.name, job.validation.identity) if job.validation else (str(job.fraction),)),
        job.wanted_format,
        str(job.skip_bad_rows),
        encoder.truncation,
        encoder.labels,
        str(encoder.context_length),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(tokenizer.get_vocab()),
        json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()[:32]


def _build(folder: Path, job: _Job, encoder: Encoder, processes: int) -> None:
    """Write train.arrow, validation.arrow where there is validation data, and meta.json."""
    names = [part.name for part in job.source.parts]
    train, validation = SplitWriter(folder / "train.arrow", encoder, names), None
    if job.fraction or job.validation:
        validation = SplitWriter(folder / "validation.arrow", encoder, names if job.fraction else [])
    bad, bad_in_train = BadRows(job.skip_bad_rows), 0
    used, rows, tokens = 1, 0, 0
    started = told = time.monotonic()
    for source in (job.source, job.validation):
        if source is None:
            continue
        chunks = chunks_of(source, job.wanted_format, HOW_TO_VALIDATE if source is job.validation else "")
        workers, chunks = enough_processes(chunks, processes)
        used = max(used, workers)
        with closing(encode_chunks(chunks, encoder, workers)) as encoded_chunks:
            for chunk, encoded in encoded_chunks:
                bad.note(encoded)
                held_out = numpy.full(len(chunk.rows), source is job.validation)
                if job.fraction is not None:
                    held_out = encoded.rows["content"] / 2**64 < job.fraction
                if validation is not None:
                    validation.add(chunk, encoded, held_out)
                train.add(chunk, encoded, ~held_out)
                rows, tokens = rows + len(chunk.rows), tokens + int(encoded.rows["kept"].sum())
                if time.monotonic() - told > SECONDS_BETWEEN_LINES:
                    told = time.monotonic()
                    log.info(f"tokenizing: {rows:,} rows, {tokens:,} tokens in {told - started:.0f} s")
        bad.end()
        bad_in_train = bad.count if source is job.source else bad_in_train
    seconds = max(time.monotonic() - started, 0.001)
    where = f" on {used} processes" if used > 1 else ""
    speed = f"{rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s{where}"
    log.info(f"tokenized {rows:,} rows, {tokens:,} tokens in {seconds:.1f} s: {speed}")
    report = report_on(train, validation)
    report.bad_rows, report.first_bad_rows = bad.count, bad.first
    _check_rows_left(report, job, encoder.context_length, bad_in_train)
    report.chat_sample = validation.first_chat if validation else train.first_chat
    report.seconds, report.processes = seconds, used
    report.save(folder / "meta.json")


def _check_ids(report: BuildReport, tokenizer: "PreTrainedTokenizerBase", vocabulary_size: int | None) -> None:
    """Refuse ids the model has no embedding for: training would stop in the middle, at the first row with one."""
    for split in (report.train, report.validation):
        if split is not None and vocabulary_size is not None and split.largest_id >= vocabulary_size:
            token = tokenizer.convert_ids_to_tokens(split.largest_id)
            raise UserError(
                f"{split.largest_id_at}: token {split.largest_id} ({token}) is beyond the model's {vocabulary_size} "
                "tokens.\nThe tokenizer is not this model's: --tokenizer_name names another."
            )


def _check_rows_left(report: BuildReport, job: _Job, context_length: int, bad_in_train: int) -> None:
    """Refuse an empty split, saying where its rows went."""
    train, held_out = report.train, report.validation
    if held_out is not None and job.fraction and not (train.rows and held_out.rows) and (train.rows or held_out.rows):
        if not (train.without_target or train.dropped):
            left = "leaves no row to train on" if held_out.rows else f"chooses none of the {train.rows:,} rows"
            raise UserError(f"{job.source.name}: --validation {job.fraction} {left}.\n{HOW_TO_VALIDATE}")
    for source, split, bad in (
        (job.source, train, bad_in_train),
        (job.validation or job.source, held_out, report.bad_rows - bad_in_train),
    ):
        if split is None or split.rows:
            continue
        counts = {
            "bad rows were left out": bad,
            "rows have nothing to train on": split.without_target,
            "rows are too long": split.dropped,
        }
        why = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        hint = ""
        if longer := split.truncated + split.dropped:
            hint = f"\n{longer:,} rows are longer than --context_length {context_length}; see --truncation."
        use = "can be trained on" if split is train else "can be used for validation"
        why = why or "it holds none, or the weights of a mix take none"
        raise UserError(f"{source.name}: no row {use}: {why}.{hint}")
