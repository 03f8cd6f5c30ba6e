"""One call from `--dataset` to tokenized rows on disk, taken from the cache when nothing has changed."""

import dataclasses
import hashlib
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from datasets import Dataset

from llama_ft.config import DataConfig, as_fraction
from llama_ft.data.build import BadRows, SplitWriter, report_on
from llama_ft.data.cache import build_once
from llama_ft.data.chat_template import ensure_chat_template
from llama_ft.data.formats import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, BadRow, Message, find_format
from llama_ft.data.parallel import ChunkEncoder, chunks_of
from llama_ft.data.rate import Rate
from llama_ft.data.sources import Source, Split, brings_validation, open_source
from llama_ft.data.statistics import BuildReport, SplitStatistics, describe, warnings_of
from llama_ft.data.tokenize import Encoder
from llama_ft.errors import UserError
from llama_ft.processes import cores
from llama_ft.runtime.console import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 4  # raise it when the same rows come out as other tokens, or meta.json changes
CHATS = ("alpaca", "messages", "sharegpt")
ROWS_LOOKED_AT = 100
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
    has_chats, formats = _look_at_formats(job)
    has_template = config.chat_template or has_chats
    note = ensure_chat_template(tokenizer, config.chat_template, add_tokens) if has_template else ""
    if not has_template and tokenizer.eos_token_id is None and not _is_tokenized(job):
        note = "the tokenizer has no EOS token: the model does not learn where to stop"
    encoder = Encoder(tokenizer, context_length, config.truncation, config.labels)
    stream = (job.source, encoder) if config.streaming else None
    streamed = SplitStatistics()
    to_build: _Job | None = job
    if stream is not None:
        nameless = dataclasses.replace(job.source, name="")
        streamed.fingerprint = _key(_Job(nameless, None, None, job.wanted_format, skip_bad_rows=False), encoder)
        held_out_rows = job.validation
        to_build = None if held_out_rows is None else dataclasses.replace(job, source=held_out_rows, validation=None)
    report = BuildReport(streamed)
    folder = cache / "tokenized" / _key(to_build or job, encoder)
    if to_build is not None:
        processes = config.tokenize_processes or cores()
        build_once(folder, lambda temporary: _build(temporary, to_build, encoder, processes), verify)
        report = BuildReport.load(folder / "meta.json")
        if stream is not None:
            report.train, report.validation = streamed, report.train
    _check_ids(report, tokenizer, vocabulary_size)
    is_plain = not console.encoding.startswith("utf")
    summary = [*([note] if note else []), *formats, *describe(report, context_length, want_validation, is_plain)]
    if want_validation and report.validation is None:
        summary.append(NO_VALIDATION)
    has_validation = report.validation is not None and want_validation
    held_out = "validation" if stream is None else "train"  # in a build of its own
    return TokenizedData(
        train=Dataset.from_file(str(folder / "train.arrow")) if stream is None else None,
        validation=Dataset.from_file(str(folder / f"{held_out}.arrow")) if has_validation else None,
        chat_sample=report.chat_sample,
        summary=summary,
        report=report,
        stream=stream,
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


def _look_at_formats(job: _Job) -> tuple[bool, list[str]]:
    """Whether any rows need a chat template (those of prompts and completions do where these are turns), and lines
    about the formats and columns of all parts."""
    has_chats, lines = False, dict[str, list[str]]()
    for source in (job.source, job.validation):
        for part in (source.parts or (source,)) if source else ():
            columns = part.columns(if_empty=HOW_TO_VALIDATE if source is job.validation else "")
            row_format = find_format(part.name, columns, job.wanted_format)
            first = itertools.islice(part.read(), ROWS_LOOKED_AT) if row_format == "prompt_completion" else ()
            has_turns = any(isinstance(row.get("prompt"), list) for _, row in first if not isinstance(row, BadRow))
            has_chats = has_chats or row_format in CHATS or has_turns
            known = (*REQUIRED_COLUMNS[row_format], *OPTIONAL_COLUMNS[row_format])
            line = f"format {row_format}, columns {', '.join(name for name in known if name in columns)}"
            if ignored := sorted(columns.difference(known)):
                line += f"; ignored: {', '.join(ignored)}"
            lines.setdefault(line, []).append(part.name)
    return has_chats, [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in lines.items()]


def _is_tokenized(job: _Job) -> bool:
    return job.source.row_format(job.wanted_format) == "tokenized"


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
    started = time.monotonic()
    names = [part.name for part in job.source.parts]
    train = SplitWriter(folder / "train.arrow", encoder, names)
    validation = None
    if job.fraction or job.validation:
        validation = SplitWriter(folder / "validation.arrow", encoder, names if job.fraction else [])
    bad = BadRows(job.skip_bad_rows)
    used = 1

    def write(source: Source, train: SplitWriter | None, if_empty: str = "") -> None:
        """Tokenize a source; what is not held out goes to `train`, all of it to validation where that is None."""
        nonlocal used
        spread = ChunkEncoder(chunks_of(source, job.wanted_format, if_empty), encoder, processes)
        used = max(used, spread.used)
        with spread, Rate(spread.used) as rate:
            for chunk, encoded in spread:
                bad.note_chunk(chunk, encoded)
                held_out = numpy.full(len(chunk.rows), train is None)
                if validation is not None and train is not None and job.fraction is not None:
                    held_out = encoded.content / 2**64 < job.fraction
                if validation is not None:
                    validation.add(chunk, encoded, held_out)
                if train is not None:
                    train.add(chunk, encoded, ~held_out)
                rate.update(len(chunk.rows), len(encoded.input_ids))
        bad.end()

    write(job.source, train)
    bad_in_train = bad.count
    if job.validation is not None:
        write(job.validation, None, HOW_TO_VALIDATE)
    report = report_on(train, validation)
    report.bad_rows, report.first_bad_rows = bad.count, bad.first
    _check_rows_left(report, job, encoder.context_length, bad_in_train)
    report.chat_sample = validation.first_chat if validation else train.first_chat
    report.seconds, report.processes = time.monotonic() - started, used
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
    held_out = report.validation
    if report.train.rows == 0:
        if not (report.train.without_target or report.train.dropped) and job.fraction and held_out and held_out.rows:
            raise UserError(f"{job.source.name}: --validation {job.fraction} leaves no row to train on.")
        raise UserError(
            f"{job.source.name}: no row can be trained on: {_left_out(report.train, bad_in_train)}."
            + _longer_hint(report.train, context_length)
        )
    if held_out is None or held_out.rows > 0:
        return
    if job.validation is None:
        raise UserError(
            f"--validation {job.fraction}: none of the {report.train.rows:,} rows of {job.source.name} was chosen for "
            f"validation.\n{HOW_TO_VALIDATE}"
        )
    raise UserError(
        f"{job.validation.name}: no row can be used for validation: "
        f"{_left_out(held_out, report.bad_rows - bad_in_train)}.{_longer_hint(held_out, context_length)}"
    )


def _left_out(split: SplitStatistics, bad: int) -> str:
    reasons = []
    if bad:
        reasons.append(f"{bad:,} bad rows were left out")
    if split.without_target:
        reasons.append(f"{split.without_target:,} rows have nothing to train on")
    if split.dropped:
        reasons.append(f"{split.dropped:,} rows are too long")
    return " and ".join(reasons) or "it holds none, or the weights of a mix take none"


def _longer_hint(split: SplitStatistics, context_length: int) -> str:
    if not (longer := split.truncated + split.dropped):
        return ""
    return (
        f"\n{longer:,} rows are longer than --context_length {context_length}; --truncation says what becomes of them."
    )
