"""Write the samples that --validation 0.1 keeps out of training to a file that the same settings
can read."""

import base64
import filecmp
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llama_ft.config import DataConfig
from llama_ft.data.read.formats import FORMATS, BadSample, Sample, SampleFormat, tools_of
from llama_ft.data.read.media import COLUMNS, FOLDER, located, plain_messages
from llama_ft.data.read.sources import Source
from llama_ft.data.read.values import RenamedSample
from llama_ft.data.tokenize.encoder import Encoder
from llama_ft.errors import UserError, plural


def write_held_out(
    source: Source, config: DataConfig, encoder: Encoder, held_out: set[int], file: Path
) -> str:
    """Write samples as JSON lines. Return a line for the log.

    Args:
        source: the training samples.
        config: its columns apply to the file, too.
        encoder: reads the samples.
        held_out: numbers of the samples, in the order of `Source.formatted_samples`.
        file: to be written. It may exist with the same content.

    Raises:
        UserError: the file has other samples, or one file cannot hold those of a dataset mixture.
    """
    count = 0
    aside = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("w", encoding="ascii") as opened:
            for row in _rows(source, config, encoder, held_out):
                # ASCII: JSON allows half a surrogate pair, which UTF-8 cannot encode
                opened.write(json.dumps(row, default=str) + "\n")
                count += 1
        if file.exists() and not filecmp.cmp(aside, file, shallow=False):
            raise UserError(
                f"--validation_output {file}: exists with other samples. Name another file."
            )
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    return f"{plural(count, 'validation sample')}: {file}"


def _rows(
    source: Source, config: DataConfig, encoder: Encoder, held_out: set[int]
) -> Iterator[dict[str, Any]]:
    """Yield the samples as the data have them, so that --columns and other settings apply. Parts of a
    mixture with different columns get the columns of their format; with different formats, their
    chats become messages."""
    datasets = source.datasets or (source,)
    formats = {dataset.sample_format(config.dataset_format) for dataset in datasets}
    has_one_kind = len(formats) == 1
    has_same_names = all(dataset.renamed == datasets[0].renamed for dataset in datasets)
    samples = source.formatted_samples(config.dataset_format)
    for number, (place, sample, sample_format) in enumerate(samples):
        if number not in held_out or isinstance(sample, BadSample):
            continue
        in_folder = located(sample, place)
        if not has_one_kind:
            row = _as_messages(in_folder, sample_format, encoder, config)
        elif has_same_names:
            row = _original(sample, datasets[0].renamed)
        else:
            row = dict(sample)
        if source.datasets and has_one_kind:
            row = _without_ignored(
                row, sample_format, datasets[0].renamed if has_same_names else {}
            )
        if encoder.media is not None:
            columns = [_original_name(column, datasets[0].renamed) for column in COLUMNS]
            row = encoder.media.with_absolute_paths(row, str(in_folder[FOLDER]), columns)
        yield _as_json(row)


def _original(sample: Sample, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return a sample as the data have it. Optional columns that it lacks are null, because --columns
    must name columns of the file."""
    own = sample.original if isinstance(sample, RenamedSample) else sample
    return {**dict.fromkeys(renamed), **own}


def _without_ignored(
    row: Mapping[str, Any], sample_format: SampleFormat, renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Return a row without columns that its part of a mixture ignores: with those of other parts they
    could look like another format."""
    one = FORMATS[sample_format]
    used = {_original_name(column, renamed) for column in (*one.required, *one.optional, *COLUMNS)}
    return {name: value for name, value in row.items() if name in used}


def _original_name(column: str, renamed: Mapping[str, str]) -> str:
    return next((theirs for theirs, ours in renamed.items() if ours == column), column)


def _as_messages(
    sample: Sample, sample_format: SampleFormat, encoder: Encoder, config: DataConfig
) -> dict[str, Any]:
    """Return a sample of a mixture of formats as one of the format messages."""
    content = encoder.read(sample, sample_format)
    if not isinstance(content, list) or config.columns:
        what = "--columns and parts of several formats"
        if not config.columns:
            what = f"samples of the format {sample_format} mixed with those of another format"
        raise UserError(
            f"--validation_output: the dataset mixture has {what}, which one file cannot hold.\n"
            "Write the validation samples of each part in a run of its own, or leave --validation_output out."
        )
    row: dict[str, Any] = {"messages": plain_messages(content)}
    if tools := tools_of(sample):
        row["tools"] = tools
    return row


def _as_json(value: Any) -> Any:
    """Return a value that JSON can hold: bytes, as of a picture, become a data: URL, which is read
    like them."""
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):  # of an ignored column
        return None
    return value
