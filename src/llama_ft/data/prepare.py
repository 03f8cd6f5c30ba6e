"""One call from `--dataset` to tokenized rows on disk, taken from the cache when nothing has changed."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset

from llama_ft.config import DataConfig, as_fraction
from llama_ft.data.batches import fingerprint
from llama_ft.data.build import BadRows, BuildReport, SplitStatistics, SplitWriter, good_rows, in_validation
from llama_ft.data.cache import build_once
from llama_ft.data.chat_template import ensure_chat_template
from llama_ft.data.formats import Message, RowFormat
from llama_ft.data.sources import Source, brings_validation, open_source
from llama_ft.data.tokenize import Encoder
from llama_ft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 2  # raise it when the same rows come out as other tokens, or meta.json changes
NO_VALIDATION = "no validation data: --validation FILE or --validation 0.05"
HOW_TO_VALIDATE = "Expected a larger fraction (--validation 0.1), a file, or --run_validation False."


@dataclass(frozen=True)
class TokenizedData:
    """Rows ready for training, memory-mapped.

    Attributes:
        train: columns input_ids and labels (int32 lists), target_tokens (int32: labels that count in the loss) and
            source (the place of the row, for messages).
        validation: the same, or None.
        chat_sample: a chat of the validation (else the training) rows whose last turn is the reference answer.
        summary: lines for people.
    """

    train: Dataset
    validation: Dataset | None
    chat_sample: list[Message] | None
    summary: list[str]

    def fingerprints(self) -> dict[str, str]:
        """dataset, and validation where there is any -> a checksum of its tokens and labels."""
        parts = {"dataset": self.train, "validation": self.validation}
        return {name: fingerprint(rows) for name, rows in parts.items() if rows is not None}


@dataclass(frozen=True)
class _Job:
    """All that decides what the tokenized rows are."""

    source: Source
    row_format: RowFormat
    fraction: float | None
    validation: Source | None
    validation_format: RowFormat | None
    skip_bad_rows: bool


def prepare(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    context_length: int,
    cache: Path,
    want_validation: bool,
    vocabulary_size: int | None = None,
) -> TokenizedData:
    """Tokenize what `config` names, or take it from the cache.

    A tokenizer without a chat template gets the built-in one, in place, so that it is saved with the result.

    Args:
        config: dataset, dataset_format, validation, truncation and skip_bad_rows.
        tokenizer: of the model to be trained.
        context_length: longest row in tokens.
        cache: folder of the demo and of tokenized data, see `cache_dir`.
        want_validation: False leaves `validation` None; a fraction of the rows is held out all the same.
        vocabulary_size: of the model; a tokenizer may have ids beyond it as long as no row does. None: not checked.

    Raises:
        UserError: the data cannot be used; several bad rows are reported together.
    """
    job = _plan(config, tokenizer, cache, want_validation)
    note = ensure_chat_template(tokenizer) if job.row_format != "tokenized" else ""
    encoder = Encoder(tokenizer, context_length)
    folder = cache / "tokenized" / _key(job, config, tokenizer, context_length)
    build_once(folder, "meta.json", lambda temporary: _build(temporary, job, encoder))
    report = BuildReport.load(folder / "meta.json")
    _check_ids(report, tokenizer, vocabulary_size)
    has_validation = report.validation is not None
    return TokenizedData(
        train=Dataset.from_file(str(folder / "train.arrow")),
        validation=Dataset.from_file(str(folder / "validation.arrow")) if has_validation and want_validation else None,
        chat_sample=report.chat_sample,
        summary=_summary(report, note, context_length, want_validation),
    )


def _plan(config: DataConfig, tokenizer: "PreTrainedTokenizerBase", cache: Path, want_validation: bool) -> _Job:
    """Open the sources that `--dataset` and `--validation` name."""
    source = open_source(config.dataset, "train", config=config, tokenizer=tokenizer, cache=cache)
    row_format = source.row_format(config.dataset_format)
    fraction = _fraction(config.validation)
    validation: Source | None = None
    if want_validation and fraction is None:
        if name := config.validation or (config.dataset if brings_validation(config.dataset) else None):
            validation = open_source(name, "validation", config=config, tokenizer=tokenizer, cache=cache)
    return _Job(
        source,
        row_format,
        fraction,
        validation,
        validation.row_format(config.dataset_format, if_empty=HOW_TO_VALIDATE) if validation else None,
        config.skip_bad_rows,
    )


def _fraction(validation: str | None) -> float | None:
    """`--validation 0.05` as a number; None for a file or nothing."""
    fraction = as_fraction(validation)
    if fraction is not None and not 0 < fraction < 1:
        raise UserError(f"--validation {validation}: expected a fraction between 0 and 1, such as 0.05, or a file.")
    return fraction


def _key(job: _Job, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", context_length: int) -> str:
    tokenizer("")  # the backend's text holds its last truncation and padding, too: a plain call resets them
    parts = [
        str(CODE_VERSION),
        job.source.identity,
        job.row_format,
        job.validation.identity if job.validation else str(job.fraction),
        str(job.validation_format),
        str(job.skip_bad_rows),
        config.truncation,
        str(context_length),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(tokenizer.get_vocab()),
        json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()[:32]


def _build(folder: Path, job: _Job, encoder: Encoder) -> None:
    """Write train.arrow, validation.arrow where there is validation data, and meta.json."""
    train = SplitWriter(folder / "train.arrow")
    validation = SplitWriter(folder / "validation.arrow") if job.fraction or job.validation else None
    bad = BadRows(job.skip_bad_rows)
    for place, row, messages, encoded in good_rows(job.source, job.row_format, encoder, bad):
        held_out = validation is not None and job.fraction is not None and in_validation(row, job.fraction)
        (validation if held_out and validation else train).add(place, encoded, messages)
    bad_in_train = bad.count
    if validation is not None and job.validation is not None and job.validation_format is not None:
        for place, _, messages, encoded in good_rows(job.validation, job.validation_format, encoder, bad):
            validation.add(place, encoded, messages)
    report = BuildReport(train.close(), validation.close() if validation else None, bad.count, bad.first)
    _check_rows_left(report, job, encoder.context_length, bad_in_train)
    report.chat_sample = validation.first_chat if validation else train.first_chat
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
        if report.train.without_target == 0 and job.fraction and held_out and held_out.rows:
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
        reasons.append(f"{split.without_target:,} rows have no answer token to train on")
    return " and ".join(reasons) or "it holds none"


def _longer_hint(split: SplitStatistics, context_length: int) -> str:
    if not split.truncated:
        return ""
    return f"\n{split.truncated:,} rows are longer than --context_length {context_length}, which cuts off their end."


def _summary(report: BuildReport, note: str, context_length: int, want_validation: bool) -> list[str]:
    lines = [note] if note else []
    for name, split in (("training", report.train), ("validation", report.validation if want_validation else None)):
        if split is not None:
            lines += _split_lines(name, split, context_length)
    if want_validation and report.validation is None:
        lines.append(NO_VALIDATION)
    if report.bad_rows:
        shown = "; ".join(text.splitlines()[0] for text in report.first_bad_rows)
        more = "; ..." if report.bad_rows > len(report.first_bad_rows) else ""
        lines.append(f"{report.bad_rows:,} bad rows left out: {shown}{more}")
    return lines


def _split_lines(name: str, split: SplitStatistics, context_length: int) -> list[str]:
    median, most, longest = split.lengths
    lines = [
        f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.target_tokens:,} of them trained on; "
        f"tokens a row: median {median}, 95 % up to {most}, longest {longest}"
    ]
    if name == "validation":
        lines[0] = lines[0].replace("trained on", "scored")
    if split.truncated:
        lines.append(f"{name}: {split.truncated:,} rows were cut at --context_length {context_length}")
    if split.without_target:
        lines.append(f"{name}: {split.without_target:,} rows left out: no answer token in the first {context_length}")
    return lines
