"""Turn `--dataset` into tokenized samples on disk, or take them from the cache if nothing has
changed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from llama_ft.config import DataConfig, as_fraction
from llama_ft.config.home import expanded
from llama_ft.config.objectives import DEFAULT_OBJECTIVE, PROMPTS, UNPAIRED, objectives_text
from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.chat.chat_template import ensure_chat_template, missing_end
from llama_ft.data.media import Media, MediaModel, media_reader
from llama_ft.data.read.formats import TokenizedSample
from llama_ft.data.read.media import have_media
from llama_ft.data.read.reshape import look_at_formats, reshaped
from llama_ft.data.read.sources import (
    SAMPLES_LOOKED_AT,
    Source,
    Split,
    brings_validation,
    open_source,
)
from llama_ft.data.tokenize.cached import HASHES, HELD_OUT, Tokenization, tokenized
from llama_ft.data.tokenize.encoder import (
    Encoder,
    ExamplesOf,
    check_ids,
    one_example,
    unpaired_examples,
)
from llama_ft.data.tokenize.held_out import write_held_out
from llama_ft.data.tokenize.prompt_tokens import PromptFormat
from llama_ft.data.tokenize.statistics import (
    TRAINED_ON,
    BuildReport,
    SplitStatistics,
    describe,
    note_lines,
    overlap_warning,
    warnings_of,
)
from llama_ft.errors import UserError, plural


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
    media: Media | None = None  # makes tensors for batches; None: all samples are text
    prompt_format: PromptFormat = "chat"  # of the training samples
    warnings: tuple[str, ...] = ()  # about the data, for the log and the report
    # why the validation loss is too low, for all places that show it
    leaks: tuple[str, ...] = ()
    # validation sets that have names; each is the `train` of its data
    named: dict[str, "TokenizedData"] = field(default_factory=dict)
    hashes: Path | None = None  # file of the hashes of the training samples
    # the training samples before tokenization, and what tokenizes them
    untokenized: tuple[Source, Encoder] | None = None

    @property
    def validations(self) -> dict[str, Dataset]:
        """The validation sets by name; a single one without a name has the name ""."""
        if self.validation is not None:
            return {"": self.validation}
        return {name: one.train for name, one in self.named.items() if one.train is not None}

    def fingerprints(self) -> dict[str, str]:
        """Return dataset, and validation if it exists -> a checksum of its tokens and labels.

        For streamed samples it is a checksum of everything that determines them.
        """
        splits = {"dataset": self.report.train, "validation": self.report.validation}
        fingerprints = {
            name: split.fingerprint for name, split in splits.items() if split is not None
        }
        if self.named:
            parts = [f"{name} {one.report.train.fingerprint}" for name, one in self.named.items()]
            fingerprints["validation"] = "\n".join(parts)
        return fingerprints

    @property
    def longest_example(self) -> int | None:
        """Tokens of the longest training sample before truncation; None with streaming."""
        return self.report.train.longest or None

    @property
    def target_share(self) -> float:
        """Share of the training tokens that is in the loss, 0 to 1; 1 with streaming."""
        train = self.report.train
        return train.target_tokens / train.tokens if train.tokens else 1.0

    def facts(self) -> dict[str, Any]:
        """Return the counts as plain values, for the run's report."""
        counts = asdict(self.report)
        splits = {"train": counts["train"], "validation": counts["validation"]}
        named = {name: asdict(one.report.train) for name, one in self.named.items()}
        warnings = [*warnings_of(self.report), *self.warnings, *self.leaks]
        return {
            "summary": self.summary,
            "warnings": warnings,
            "leaks": self.leaks,
            **splits,
            "named": named,
        }


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What samples are prepared for: the limits of the model, and what the recipe does with them.

    Attributes:
        context_length: maximum tokens of a sample.
        want_validation: False returns no `validation`; a fraction of the samples is still kept out
            of training.
        vocabulary_size: of the model. A tokenizer may have larger ids if no sample has them. None:
            not checked.
        add_tokens: new tokens get embeddings in the model, so special tokens of the chat template
            may be added.
        use: purpose of `--dataset`, which is returned as `train`: validation selects its
            validation split.
        media: reads what is not text; None: it is loaded if samples have media.
        examples: makes the examples of a sample, `Objective.examples`.
        media_model: the model that samples with media are read for. None: it, or this use of it,
            takes text only.
        no_media: why it is None, for messages.
        stop_ids: the model's tokens that end generation.
        evaluates: nothing is trained, so training samples are not reported if there is a validation
            set.
    """

    context_length: int
    want_validation: bool
    vocabulary_size: int | None = None
    add_tokens: bool = False
    use: Split = "train"
    media: Media | None = None
    examples: ExamplesOf = one_example
    media_model: MediaModel | None = None
    no_media: str = "only text is trained on"
    stop_ids: Sequence[int] = ()
    evaluates: bool = False


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    request: DataRequest,
    cache: Path,
    verify_cache: bool = True,
) -> TokenizedData:
    """Tokenize the data that `config` names, or take them from the cache.

    The tokenizer's chat template is set in place, so that it is saved with the final model: the
    requested one, or the built-in one if the tokenizer has none.

    Args:
        config: everything but batching_strategy. With streaming only validation samples are
            tokenized here.
        tokenizer: of the model to be trained.
        request: what the samples are for.
        cache: directory of the demo and of tokenized data, see `cache_dir`.
        verify_cache: compare tokenized samples in the cache with their checksums, which reads all
            of them, and write `validation_output`. One rank per node does both, before the others.

    Raises:
        UserError: the data cannot be used; several bad samples are reported together.
    """
    opened = _open_sources(config, tokenizer, request, cache)
    source = opened.training
    encoder, first_look = _make_encoder(opened, config, tokenizer, request, cache)
    tokenization = _tokenization(opened, encoder, config, request)
    report, folder = tokenized(tokenization, cache, verify_cache)
    if request.use == "train" and request.examples is unpaired_examples and not config.streaming:
        _check_labels(source.name, report.train)
    summary = first_look.summary
    if config.validation_output and verify_cache:  # on each node, which may have its own disk
        summary.append(_write_held_out(tokenization, folder))
    report = _report_of(report, config, request)
    for split in filter(None, (report.train, report.validation)):
        check_ids(split.largest_id, source.name, tokenizer, request.vocabulary_size)
    # All sets have media, or none, so that their tables have the same columns.
    of_named = replace(request, media=encoder.media)
    named = _prepare_named(config, tokenizer, of_named, cache, verify_cache)
    report = _with_chat(report, named)
    leaks = _leaks(report, folder, named, opened.is_trained_on, config.streaming)
    summary += _described(report, named, request)
    warnings = first_look.warnings + note_lines(report.notes)
    for name, one in named.items():
        warnings += [f"{name}: {line}" for line in one.warnings]
        if not config.streaming and TRAINED_ON not in leaks:
            summary += [f"{name}: {line}" for line in warnings_of(one.report)]
    return TokenizedData(
        train=None if config.streaming else _open_split(folder, "train"),
        validation=_open_split(folder, "validation") if report.validation else None,
        summary=summary,
        report=report,
        stream=(source, encoder, request.examples) if config.streaming else None,
        bad_samples=folder / BAD_SAMPLES_FILE if report.bad_samples else None,
        warnings=tuple(warnings),
        leaks=tuple(leaks),
        named=named,
        hashes=None if config.streaming else folder / HASHES.format("train"),
        untokenized=(source, encoder),
        media=encoder.media,
        prompt_format=first_look.prompt_format,
    )


def _tokenization(
    opened: "_OpenedSources", encoder: Encoder, config: DataConfig, request: DataRequest
) -> Tokenization:
    return Tokenization(
        source=opened.training,
        validation=opened.validation,
        fraction=as_fraction(config.validation),
        config=config,
        encoder=encoder,
        examples=request.examples,
    )


def _prepare_named(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    request: DataRequest,
    cache: Path,
    verify_cache: bool,
) -> dict[str, TokenizedData]:
    """Return the validation sets that have names, if they are wanted."""
    named = dict[str, TokenizedData]()
    if request.want_validation:
        own_request = replace(request, want_validation=False, use="validation")
        for name, own in _named_configs(config).items():
            named[name] = prepare(own, tokenizer, own_request, cache, verify_cache)
    return named


def _write_held_out(tokenization: Tokenization, folder: Path) -> str:
    """Write the samples that a fraction keeps out of training to `validation_output`. Return a line
    for the log."""
    config = tokenization.config
    assert config.validation_output is not None
    numbers = set(numpy.load(folder / HELD_OUT).tolist())
    file = expanded(config.validation_output)
    return write_held_out(tokenization.source, config, tokenization.encoder, numbers, file)


def _report_of(report: BuildReport, config: DataConfig, request: DataRequest) -> BuildReport:
    """Return the report of the splits that are wanted. No token of a prompt counts as in the loss: what
    stands for its answer is never trained on."""
    if not request.want_validation:
        report = replace(report, validation=None)
    for split in filter(None, (report.train, report.validation)):
        if config.dataset_format == PROMPTS:
            split.target_tokens = 0
    return report


def _with_chat(report: BuildReport, named: dict[str, TokenizedData]) -> BuildReport:
    """Return the report with a chat of a validation set that has a name, if it has none itself."""
    for one in named.values():
        if not report.chat_sample:
            other = one.report
            report = replace(report, chat_sample=other.chat_sample, chat_tools=other.chat_tools)
    return report


def _described(
    report: BuildReport, named: dict[str, TokenizedData], request: DataRequest
) -> list[str]:
    """Return the lines for the log about the numbers of samples."""
    statistics = {name: one.report.train for name, one in named.items()}
    # an evaluation gets its validation sets only
    is_evaluated = report.validation is not None or bool(named)
    lines = describe(report, statistics, with_training=not (request.evaluates and is_evaluated))
    if request.want_validation and not is_evaluated:
        lines.append("no validation data: --validation FILE or --validation 0.05")
    return lines


def _leaks(
    report: BuildReport,
    folder: Path,
    named: dict[str, TokenizedData],
    is_trained_on: bool,
    is_streaming: bool,
) -> list[str]:
    """Return why the validation loss is too low: training samples are in the validation sets.

    Args:
        report: the counts of training samples and of a validation set without a name.
        folder: the directory of both.
        named: the validation sets that have names.
        is_trained_on: the validation set is a part of the training data.
        is_streaming: the training samples are not known.
    """
    validation = report.validation
    if validation is not None:
        is_trained_on |= validation.fingerprint == report.train.fingerprint
    if is_trained_on:
        return [TRAINED_ON]
    if is_streaming:
        return []
    leaks = list[str]()
    hashes = folder / HASHES.format("train")
    if validation is not None:
        own = folder / HASHES.format("validation")
        leaks += overlap_warning("the validation set", own, hashes)
    for name, one in named.items():
        assert one.hashes is not None
        leaks += overlap_warning(f"the validation set {name}", one.hashes, hashes)
    return leaks


def _named_configs(config: DataConfig) -> dict[str, DataConfig]:
    """Return the settings of each validation set that has a name: it is prepared like a training set
    of its own."""
    if not isinstance(config.validation, dict):
        return {}
    return {
        name: replace(config, dataset=path, validation=None, max_samples=0, streaming=False)
        for name, path in config.validation.items()
    }


def _check_labels(name: str, train: SplitStatistics) -> None:
    """Raise a UserError if all completions have the same label, desirable or undesirable."""
    if train.desirable and train.undesirable:
        return
    completions = plural(train.samples // 2, "completion")  # each one has two examples
    objective = objectives_text(lambda entry: UNPAIRED in entry.formats)
    raise UserError(
        f"{name}: all {completions} have the label {bool(train.desirable)}.\n"
        f"Objective {objective} needs both. Check the column label, or use --objective {DEFAULT_OBJECTIVE} "
        "--dataset_format prompt_completion."
    )


def _open_split(folder: Path, name: Split) -> Dataset:
    """Map a file of tokenized samples into memory, so that all ranks of a node share one copy."""
    return Dataset.from_file(str(folder / f"{name}.arrow"))


class _OpenedSources(NamedTuple):
    training: Source
    validation: Source | None  # of its own; a fraction of the training samples is none
    named: list[Source]  # validation sets that have names
    is_trained_on: bool  # the validation set is a part of the training data


def _open_sources(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, request: DataRequest, cache: Path
) -> _OpenedSources:
    """Open the dataset, and the validation set if one is wanted and it is not a fraction."""
    opened = partial(open_source, config=config, tokenizer=tokenizer, cache=cache)
    original = opened(config.dataset, request.use)
    training = reshaped(original, config, config.max_samples)
    if request.want_validation and isinstance(config.validation, dict):
        named = []
        for own in _named_configs(config).values():
            one = open_source(
                own.dataset, "validation", config=own, tokenizer=tokenizer, cache=cache
            )
            named.append(reshaped(one, own))
        return _OpenedSources(training, None, named, is_trained_on=False)
    if not request.want_validation or as_fraction(config.validation) is not None:
        return _OpenedSources(training, None, [], is_trained_on=False)
    name: Any = config.validation  # a text or None
    if not name and brings_validation(config.dataset, config.streaming):
        name = config.dataset
    if not name:
        return _OpenedSources(training, None, [], is_trained_on=False)
    validation = opened(name, "validation")
    trained_on = {part.identity for part in original.datasets or (original,)}
    is_trained_on = validation.identity in trained_on
    return _OpenedSources(training, reshaped(validation, config), [], is_trained_on)


class _FirstLook(NamedTuple):
    """What the first samples say."""

    prompt_format: PromptFormat
    summary: list[str]  # lines for the log
    warnings: list[str]


def _make_encoder(
    opened: _OpenedSources,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    request: DataRequest,
    cache: Path,
) -> tuple[Encoder, _FirstLook]:
    """Look at the first samples, and return what makes tokens of all. Sets the tokenizer's chat
    template if there are chats.

    Returns:
        The encoder, and what the samples say.
    """
    source = opened.training
    sources = [source] if opened.validation is None else [source, opened.validation]
    no_media = request.no_media
    media = None
    if request.media is not None:
        media = request.media.in_cache(cache, is_full=config.streaming)
    elif request.media_model is not None:
        parts = [part for one in (*sources, *opened.named) for part in one.datasets or (one,)]
        if any(have_media(part.first_samples) for part in parts):
            media = media_reader().load(request.media_model, config, cache)
        no_media = f"none of the first {SAMPLES_LOOKED_AT} samples has one; put one of them first"
    look = partial(look_at_formats, format_name=config.dataset_format, with_media=media is not None)
    trained, summary = look(source)
    kinds = trained
    if opened.validation is not None:
        others, lines = look(opened.validation)
        kinds = trained | others
        summary += lines
    # Without a valid sample, there may be chats after the first samples.
    has_chats = list in kinds or not kinds
    warnings = list[str]()
    if config.chat_template or has_chats:
        note = ensure_chat_template(tokenizer, config.chat_template, request.add_tokens)
        if note:
            summary.insert(0, note)
        if warning := missing_end(tokenizer, request.stop_ids):
            warnings.append(warning)
    if media is not None:
        media.check()
    encoder = Encoder(
        tokenizer,
        request.context_length,
        config.truncation,
        config.labels,
        config.reasoning_content,
        media,
        no_media,
        takes_media=request.media_model is not None,
        stop_ids=request.stop_ids,
    )
    is_text = tuple in trained and trained.isdisjoint((list, TokenizedSample))
    return encoder, _FirstLook("text" if is_text else "chat", summary, warnings)
