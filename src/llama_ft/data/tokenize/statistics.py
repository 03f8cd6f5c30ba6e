"""Statistics of samples: counted during tokenization, saved in meta.json, shown as a table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from llama_ft.config.paths import BAD_SAMPLES_FILE
from llama_ft.data.read.formats import Message
from llama_ft.data.read.media import describe_media
from llama_ft.data.tokenize.lengths import LENGTH_FIELDS, LengthCounts
from llama_ft.errors import plural

# of the table: field of SplitStatistics -> title
TRAINED_ON = (
    "the validation set has the training samples: its loss says nothing about other data. "
    "--validation 0.05 keeps samples out of training."
)
COLUMNS = {
    "samples": "samples",
    "tokens": "tokens",
    "target_tokens": "in the loss",
    "longest": "longest",
    "truncated": "truncated",
    "skipped": "skipped",
}
# Per sample: a hash of its content; a hash of its tokens and labels; whether it is bad; its longest
# example before truncation; how many of its parts were truncated and skipped. Of a chat that was
# split also the number of responses, their tokens, and the tokens of the whole chat. LENGTH_FIELDS
# count what each context length keeps.
SAMPLE_FIELDS = numpy.dtype(
    [
        ("content", "u8"),
        ("encoded", "u8"),
        ("bad", "?"),
        ("longest", "i4"),
        ("truncated", "i4"),
        ("skipped", "i4"),
        ("responses", "i4"),
        ("tokens", "i8"),
        ("whole", "i8"),
        ("media", "i4"),
        ("media_tokens", "i8"),
        ("longest_media", "i4"),
        ("tool_calls", "i4"),
        ("tool_results", "i4"),
        *LENGTH_FIELDS,
    ]
)


@dataclass
class SplitStatistics:
    """The number of samples and tokens of a split, and how many were truncated or skipped.

    Attributes:
        samples: samples written; each piece of a split sample counts.
        desirable, undesirable: number of completions with that label.
        tokens, target_tokens: number of tokens in them, and of those in the loss.
        truncated, skipped: samples that lost tokens; samples that are too long or have no token in
        the loss.
        longest: tokens of the longest sample before truncation.
        split_chats, split_samples: chats that became several samples; these samples.
        whole_tokens, split_tokens: tokens of these chats, and of these samples before truncation.
        media, media_tokens: number of images, and of tokens that stand for them; both before
            truncation.
        longest_media: largest number of such tokens in a sample.
        tool_calls, tool_results: number of tool calls, and of results of tools. The chat template writes
        all of them: a chat of which it drops one is a bad sample.
        tool_samples: samples with one.
        first_split: place of the first of these chats, and the reason; empty without one.
        duplicates: samples with the tokens and labels of an earlier one.
        deduplicated: these samples were left out.
        lengths: what each context length keeps.
        largest_id: the largest token id.
        fingerprint: a checksum of all tokens and labels, in order.
    """

    samples: int = 0
    desirable: int = 0
    undesirable: int = 0
    tokens: int = 0
    target_tokens: int = 0
    truncated: int = 0
    skipped: int = 0
    longest: int = 0
    split_chats: int = 0
    split_samples: int = 0
    whole_tokens: int = 0
    split_tokens: int = 0
    media: int = 0
    media_tokens: int = 0
    longest_media: int = 0
    tool_calls: int = 0
    tool_results: int = 0
    tool_samples: int = 0
    first_split: str = ""
    duplicates: int = 0
    deduplicated: bool = False
    lengths: LengthCounts = field(default_factory=LengthCounts)
    largest_id: int = -1
    fingerprint: str = ""

    def count(self, samples: numpy.ndarray) -> None:
        """Add samples to the counts. `samples` is an array of dtype `SAMPLE_FIELDS`."""
        self.truncated += int(samples["truncated"].sum())
        self.skipped += int(samples["skipped"].sum())
        longest = int(samples["longest"].max(initial=0))
        self.longest = max(self.longest, longest)
        self.split_chats += int((samples["responses"] > 0).sum())
        self.split_samples += int(samples["responses"].sum())
        self.split_tokens += int(samples["tokens"].sum())
        self.whole_tokens += int(samples["whole"].sum())
        self.media += int(samples["media"].sum())
        self.media_tokens += int(samples["media_tokens"].sum())
        longest_media = int(samples["longest_media"].max(initial=0))
        self.longest_media = max(self.longest_media, longest_media)
        self.tool_calls += int(samples["tool_calls"].sum())
        self.tool_results += int(samples["tool_results"].sum())
        self.tool_samples += int((samples["tool_calls"] + samples["tool_results"] > 0).sum())
        self.lengths.count(samples)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SplitStatistics":
        """Return what `dataclasses.asdict` made of statistics."""
        return cls(**{**values, "lengths": LengthCounts(**values["lengths"])})


class Duplicates:
    """Finds samples of a split with the tokens and labels of an earlier one. Copies that a weight in
    a dataset mixture makes are not duplicates.

    Args:
        leave_out: `--deduplicate`; otherwise they are only counted.
    """

    def __init__(self, leave_out: bool) -> None:
        self._leaves_out = leave_out
        self._seen = set[int]()  # only with leave_out
        self._hashes = list[numpy.ndarray]()  # of all samples, each copy by a weight once
        self._last = ("", 0)  # place and hash of the sample before
        self._is_last_kept = True

    def first_ones(
        self, places: list[str], hashes: numpy.ndarray, mine: numpy.ndarray
    ) -> numpy.ndarray:
        """Return which of neighboring samples stay in the split, bool [samples].

        Args:
            places: of each sample.
            hashes: of their tokens and labels, uint64 [samples].
            mine: which samples are of this split, bool [samples].
        """
        result = mine.copy()
        is_first = numpy.zeros(len(places), bool)
        for number in numpy.flatnonzero(mine):
            current = (places[number], int(hashes[number]))
            if current != self._last:  # else a copy, which follows its sample
                self._last = current
                is_first[number] = True
                self._is_last_kept = current[1] not in self._seen
                if self._leaves_out:
                    self._seen.add(current[1])
            result[number] = self._is_last_kept
        self._hashes.append(hashes[is_first])
        return result

    def distinct(self) -> tuple[numpy.ndarray, int]:
        """Return the hashes of the distinct samples so far, and the number of the others."""
        every = numpy.concatenate([numpy.empty(0, numpy.uint64), *self._hashes])
        hashes = numpy.unique(every)
        return hashes, len(every) - len(hashes)


class BadKind(NamedTuple):
    """How many bad samples have the same fault, and the place of the first one."""

    samples: int
    first: str

    @classmethod
    def counted(cls, before: "BadKind | None", samples: int, first: str) -> "BadKind":
        """Return the counts with further samples, of which the first is at `first`."""
        if before is None:
            return cls(samples, first)
        return before._replace(samples=before.samples + samples)


@dataclass
class BuildReport:
    """The content of meta.json.

    Attributes:
        train, validation: the statistics of each split; None if the split does not exist.
        bad_samples: number of samples skipped by skip_bad_rows.
        bad_kinds: kind of fault -> number and first place of these samples.
        notes: what should be said about valid samples -> their number and the first place.
        chat_sample: a chat of the validation split, else of the training split. Its last message is
            the reference response.
        chat_tools: the tools of this chat.
    """

    train: SplitStatistics
    validation: SplitStatistics | None = None
    bad_samples: int = 0
    bad_kinds: dict[str, BadKind] = field(default_factory=dict)
    chat_sample: list[Message] | None = None
    chat_tools: list[dict[str, Any]] | None = None
    notes: dict[str, BadKind] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as ASCII JSON: a message may hold half a surrogate pair, which UTF-8 cannot
        encode."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> "BuildReport":
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="ascii"))
        values["train"] = SplitStatistics.from_json(values["train"])
        if values["validation"] is not None:
            values["validation"] = SplitStatistics.from_json(values["validation"])
        # JSON has a named tuple as a list
        kinds = {kind: BadKind(*counts) for kind, counts in values["bad_kinds"].items()}
        values["bad_kinds"] = kinds
        values["notes"] = {text: BadKind(*counts) for text, counts in values["notes"].items()}
        return cls(**values)


def describe(
    report: BuildReport,
    named: Mapping[str, SplitStatistics] = {},
    with_training: bool = True,
) -> list[str]:
    """Return the lines of a table of all splits, followed by the warnings. `named`: of validation
    sets that have names."""
    splits = {"training": report.train, "validation": report.validation, **named}
    if not with_training:
        del splits["training"]
    width = max(10, *(len(name) + 1 for name in splits))
    columns = dict(COLUMNS)
    if not any(split.target_tokens for split in splits.values() if split is not None):
        del columns["target_tokens"]  # of prompts, whose answers will be in the loss
    header = " " * width + "".join(f"{title:>13}" for title in columns.values())
    lines = []
    for name, split in splits.items():
        # the statistics of streamed samples are not known in advance
        if split is not None and split.samples:
            counts = [f"{getattr(split, column):13,}" for column in columns]
            lines.append(f"{name:{width}}" + "".join(counts))
    if with_training and report.train.desirable:
        labels = f"{report.train.desirable:,} desirable, {report.train.undesirable:,} undesirable"
        lines.append(f"labels of the training data: {labels}")
    for name, split in splits.items():
        if split is not None and split.media:
            text = describe_media(
                split.media, split.media_tokens, split.tokens, split.longest_media
            )
            lines.append(f"{name}: {text}")
        if split is not None and split.tool_samples:
            lines.append(_tools_line(name, split))
        if split is not None and split.duplicates:
            lines.append(_duplicates_line(name, split))
    for name, split in splits.items():
        if split is not None and split.split_chats:
            lines += _split_lines(name, split)
        if split is not None:
            lines += split.lengths.lines(name)
    if lines:
        lines = [header, *lines]
    return [*lines, *warnings_of(report)]


def _tools_line(name: str, split: SplitStatistics) -> str:
    """Return the numbers of tool calls and results."""
    calls = plural(split.tool_calls, "tool call")
    results = plural(split.tool_results, "tool result")
    samples = plural(split.tool_samples, "sample")
    return f"{name}: {calls} and {results} in {samples}; the chat template writes all of them"


def _duplicates_line(name: str, split: SplitStatistics) -> str:
    """Return how many samples have the tokens of an earlier one."""
    line = f"{name}: {plural(split.duplicates, 'exact duplicate')} of earlier samples"
    if split.deduplicated:
        return f"{line} left out"
    return f"{line} (--deduplicate leaves them out)"


def _split_lines(name: str, split: SplitStatistics) -> list[str]:
    """Return how many samples the chats became that had to be split, and why."""
    growth = split.split_tokens / split.whole_tokens
    chats = plural(split.split_chats, "chat")
    tokens = f"{split.whole_tokens:,} -> {split.split_tokens:,} tokens, {growth:.2f}x"
    return [
        f"{name}: {chats} became {plural(split.split_samples, 'sample')} ({tokens}): "
        "inside a chat, the chat template writes responses differently from how it does at inference",
        f"  {split.first_split}",
    ]


def warnings_of(report: BuildReport) -> list[str]:
    """Return a line per kind of skipped bad samples, or no line."""
    if not report.bad_samples:
        return []
    kinds = [f"  {describe_kind(kind, *counts)}" for kind, counts in report.bad_kinds.items()]
    return [
        f"skipped {plural(report.bad_samples, 'bad sample')}, listed in {BAD_SAMPLES_FILE}:",
        *kinds,
    ]


def describe_kind(kind: str, count: int, first: str) -> str:
    """Return a line about the bad samples with the same fault."""
    return f"{count:,} x {kind} (first: {first})"


def note_lines(notes: Mapping[str, BadKind]) -> list[str]:
    """Return a line about each note of samples."""
    return [
        f"{plural(count, 'sample')}: {text} (first: {first})."
        for text, (count, first) in notes.items()
    ]


def overlap_warning(name: str, validation: Path, train: Path) -> list[str]:
    """Return a warning if samples of a validation set are in the training data, too. `validation`,
    `train`: files with the hashes of their samples."""
    shared = numpy.isin(numpy.load(validation), numpy.load(train)).sum()
    if not shared:
        return []
    verb = "is" if shared == 1 else "are"
    return [
        f"{plural(int(shared), 'sample')} of {name} {verb} in the training data, too: the validation loss is too "
        "low. Remove them from one of both."
    ]
