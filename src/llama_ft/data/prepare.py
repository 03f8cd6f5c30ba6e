"""Turn `--dataset` into tokenized samples on disk, or take them from the cache if nothing has
changed."""

import hashlib
import inspect
import json
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from llama_ft.config import DataConfig, as_fraction
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.cache import build_once
from llama_ft.data.chat_template import ensure_chat_template
from llama_ft.data.formats import FORMATS, BadSample
from llama_ft.data.reshape import reshaped
from llama_ft.data.sources import Source, Split, brings_validation, open_source
from llama_ft.data.statistics import BuildReport, SplitStatistics, describe, warnings_of
from llama_ft.data.tokenize import Encoder, ExamplesOf, one_example, unpaired_examples
from llama_ft.data.tokenize_files import BadSamples, SplitWriter, chunks_of, encode_chunks
from llama_ft.errors import UserError, plural
from llama_ft.processes import cores
from llama_ft.runtime.console import log

# increase it if streamed samples get other tokens; without streaming, the cache hashes the code
CODE_VERSION = 7
CODE = (
    "chat_template",
    "formats",
    "loss_mask",
    "reshape",
    "statistics",
    "tokenize",
    "tokenize_files",
)
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class TokenizedData:
    """Samples ready for training, memory-mapped, with the columns `tokenize_files.FEATURES`.

    With streaming, `train` is None and `stream` is set: the source of the training samples, their
    encoder, and the function that makes the examples of a sample.
    """

    train: Dataset | None
    validation: Dataset | None
    summary: list[str]  # lines for the log
    report: BuildReport  # all counts
    stream: tuple[Source, Encoder, ExamplesOf] | None = None
    bad_samples: Path | None = None  # a line of JSON per skipped bad sample

    def fingerprints(self) -> dict[str, str]:
        """Return dataset, and validation if it exists -> a checksum of its tokens and labels.

        For streamed samples it is a checksum of everything that determines them.
        """
        splits = {"dataset": self.report.train, "validation": self.report.validation}
        return {name: split.fingerprint for name, split in splits.items() if split is not None}

    @property
    def longest_example(self) -> int | None:
        """Tokens of the longest training sample before truncation; None with streaming."""
        return self.report.train.longest or None

    @property
    def target_share(self) -> float:
        """Share of the training tokens that is in the loss, 0 to 1; 1 with streaming."""
        return (
            self.report.train.target_tokens / self.report.train.tokens
            if self.report.train.tokens
            else 1.0
        )

    def facts(self) -> dict[str, Any]:
        """Return the counts as plain values, for the run's report."""
        counts = asdict(self.report)
        splits = {"train": counts["train"], "validation": counts["validation"]}
        return {"summary": self.summary, "warnings": warnings_of(self.report), **splits}


@dataclass(frozen=True)
class _Tokenization:
    """Everything that determines the tokenized samples."""

    source: Source
    validation: Source | None
    fraction: float | None
    config: DataConfig
    encoder: Encoder
    examples: ExamplesOf


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    cache: Path,
    want_validation: bool,
    vocabulary_size: int | None = None,
    add_tokens: bool = False,
    use: Split = "train",
    examples: ExamplesOf = one_example,
    verify_cache: bool = True,
) -> TokenizedData:
    """Tokenize the data that `config` names, or take them from the cache.

    The tokenizer's chat template is set in place, so that it is saved with the final model: the
    requested one, or the built-in one if the tokenizer has none.

    Args:
        config: everything but batching_strategy. With streaming only validation samples are
            tokenized here.
        tokenizer: of the model to be trained.
        context_length: maximum tokens of a sample.
        cache: directory of the demo and of tokenized data, see `cache_dir`.
        want_validation: False returns no `validation`; a fraction of the samples is still kept out
            of training.
        vocabulary_size: of the model. A tokenizer may have larger ids if no sample has them. None:
            not checked.
        add_tokens: new tokens get embeddings in the model, so special tokens of the chat template
            may be added.
        use: purpose of config.dataset, which is returned as `train`: validation selects its
            validation split.
        examples: makes the examples of a sample, `Objective.examples`.
        verify_cache: compare tokenized samples in the cache with their checksums, which reads all
            of them. One rank per node does it, before the others.

    Raises:
        UserError: the data cannot be used; several bad samples are reported together.
    """
    opened = partial(open_source, config=config, tokenizer=tokenizer, cache=cache)
    source = reshaped(opened(config.dataset, use), config, config.max_samples)
    fraction = as_fraction(config.validation)
    held_out: Source | None = None
    if want_validation and fraction is None:
        brings_one = not config.validation and brings_validation(config.dataset, config.streaming)
        if name := config.dataset if brings_one else config.validation:
            held_out = reshaped(opened(name, "validation"), config)
    kinds, summary = _look_at_formats(source, held_out, config.dataset_format)
    if config.chat_template or list in kinds or not kinds:
        note = ensure_chat_template(tokenizer, config.chat_template, add_tokens)
        summary = [note, *summary] if note else summary
    encoder = Encoder(
        tokenizer, context_length, config.truncation, config.labels, config.reasoning_content
    )
    tokenization = _Tokenization(source, held_out, fraction, config, encoder, examples)
    report, folder = _tokenized(tokenization, cache, verify_cache)
    if not want_validation:
        report = replace(report, validation=None)
    for split in filter(None, (report.train, report.validation)):
        check_ids(split.largest_id, source.name, tokenizer, vocabulary_size)
    summary += describe(report)
    if want_validation and report.validation is None:
        summary.append("no validation data: --validation FILE or --validation 0.05")
    return TokenizedData(
        train=None if config.streaming else Dataset.from_file(str(folder / "train.arrow")),
        validation=Dataset.from_file(str(folder / "validation.arrow"))
        if report.validation
        else None,
        summary=summary,
        report=report,
        stream=(source, encoder, examples) if config.streaming else None,
        bad_samples=folder / BAD_SAMPLES_FILE if report.bad_samples else None,
    )


def _look_at_formats(
    source: Source, validation: Source | None, wanted: str
) -> tuple[set[type], list[str]]:
    """Return the types of the first samples' contents (list: a chat), and a line on format and
    columns per part."""
    kinds = set[type]()
    lines = list[str]()
    for part in [*(source.parts or (source,)), *([validation] if validation else [])]:
        sample_format = part.sample_format(wanted)
        columns = part.columns
        for sample in part.first_samples:
            with suppress(BadSample, LookupError, TypeError, AttributeError, ValueError):
                kinds.add(type(FORMATS[sample_format].read(sample)))
        known = [*FORMATS[sample_format].required, *FORMATS[sample_format].optional]
        theirs = {ours: f"{ours} ({name})" for name, ours in part.renamed.items()}
        used = [theirs.get(it, it) for it in known if it in columns]
        ignored = sorted(columns.difference(known))
        more = f"; ignored: {', '.join(ignored)}" if ignored else ""
        lines.append(f"{part.name}: format {sample_format}, columns {', '.join(used)}{more}")
    return kinds, lines


def _tokenized(tokenization: _Tokenization, cache: Path, verify: bool) -> tuple[BuildReport, Path]:
    """Return the counts and the directory of the tokenized samples, from the cache or newly made.

    With streaming these are the validation samples, if there are any.
    """
    # A change of this code must not reuse samples that the old code has tokenized.
    code = hashlib.sha256(inspect.getsource(tokenization.examples).encode())
    for name in CODE:
        code.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    folder = (
        cache
        / "tokenized"
        / _key(tokenization, f"{code.hexdigest()} {tokenization.config.streaming}")
    )
    report = BuildReport(SplitStatistics())
    if tokenization.validation or not tokenization.config.streaming:
        build_once(folder, lambda temporary: _build(temporary, tokenization), verify)
        report = BuildReport.load(folder / "meta.json")
    if tokenization.config.streaming:
        config = replace(tokenization.config, skip_bad_rows=False)
        nameless = replace(
            tokenization,
            source=replace(tokenization.source, name=""),
            validation=None,
            config=config,
        )
        report.train.fingerprint = _key(
            nameless, f"{CODE_VERSION} {tokenization.examples.__qualname__}"
        )
    return report, folder


def _key(tokenization: _Tokenization, code: str) -> str:
    tokenizer = tokenization.encoder.tokenizer
    tokenizer("")  # to_str() includes the last truncation and padding; a plain call resets them
    parts = [
        code,
        *(
            tokenization.source.name,
            tokenization.source.identity,
        ),  # the places of samples contain the name
        *(
            (tokenization.validation.name, tokenization.validation.identity)
            if tokenization.validation
            else (str(tokenization.fraction),)
        ),
        *(tokenization.config.dataset_format, str(tokenization.config.skip_bad_rows)),
        *(
            tokenization.encoder.truncation,
            tokenization.encoder.labels,
            str(tokenization.encoder.context_length),
        ),
        tokenization.encoder.reasoning_content,
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(folder: Path, tokenization: _Tokenization) -> None:
    """Write train.arrow (except with streaming), validation.arrow (if there is validation data) and
    meta.json."""
    config = tokenization.config
    bad = BadSamples(tokenization.config.skip_bad_rows, folder / BAD_SAMPLES_FILE)
    samples = 0
    wanted = {
        "train": not config.streaming,
        "validation": tokenization.fraction or tokenization.validation,
    }
    splits = {
        name: SplitWriter(folder / f"{name}.arrow", tokenization.encoder)
        for name in wanted
        if wanted[name]
    }
    started = logged = time.monotonic()
    for source in filter(
        None, (None if config.streaming else tokenization.source, tokenization.validation)
    ):
        chunks = chunks_of(source, config.dataset_format)
        with closing(
            encode_chunks(
                chunks,
                tokenization.encoder,
                tokenization.examples,
                config.tokenize_processes or cores(),
            )
        ) as pairs:
            for chunk, encoded in pairs:
                bad.note(encoded)
                held_out = numpy.full(len(chunk), source is tokenization.validation)
                if tokenization.fraction is not None:
                    held_out = encoded.samples["content"] / 2**64 < tokenization.fraction
                for name, split in splits.items():
                    split.add(chunk, encoded, held_out if name == "validation" else ~held_out)
                samples += len(chunk)
                if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                    logged = time.monotonic()
                    log.info(f"tokenizing: {plural(samples, 'sample')} in {logged - started:.0f} s")
    bad.refuse()
    sample = [split.first_chat for split in splits.values()][-1] or None
    names = {
        "train": tokenization.source.name,
        "validation": (tokenization.validation or tokenization.source).name,
    }
    written = {name: split.close() for name, split in splits.items()}
    for name, statistics in written.items():
        if not statistics.samples:
            raise UserError(
                f"{names[name]}: no sample is left for {name}: {statistics.skipped:,} are longer than "
                f"--context_length {tokenization.encoder.context_length} (see --truncation) or "
                f"have no tokens in the loss, "
                f"{bad.count:,} are bad.\nUse other data, another fraction, or --run_validation False."
            )
    train = written.get("train", SplitStatistics())
    if (
        tokenization.examples is unpaired_examples
        and written.get("train")
        and not (train.desirable and train.undesirable)
    ):
        raise UserError(
            f"{names['train']}: all {plural(train.samples // 2, 'completion')} have "
            f"the label {bool(train.desirable)}.\n"
            "KTO needs both. Check the column label, or use --objective sft --dataset_format prompt_completion."
        )
    BuildReport(train, written.get("validation"), bad.count, bad.kinds, sample).save(
        folder / "meta.json"
    )
    log.info(f"tokenized {plural(samples, 'sample')} in {time.monotonic() - started:.1f} s")


def check_ids(
    largest_id: int, name: str, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int | None
) -> None:
    """Raise a UserError if the model has no embedding for `largest_id`; training would fail at that
    token's sample."""
    if vocabulary_size is not None and largest_id >= vocabulary_size:
        token = tokenizer.convert_ids_to_tokens(largest_id)
        raise UserError(
            f"{name}: token {largest_id} ({token}) is outside the model's vocabulary of {vocabulary_size}.\n"
            "The tokenizer does not match the model. Set --tokenizer_name."
        )
