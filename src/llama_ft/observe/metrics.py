"""output_dir/metrics.jsonl: one JSON object per logged step, written as soon as the step is done."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Metrics = Mapping[str, float | Sequence[float]]  # a sequence has one value per rank


class MetricsLog:
    """Appends records to a file of JSON lines.

    What an earlier attempt logged after the step that is resumed from goes, a line cut short by a kill included, so
    that the file has each step once. Steps only grow, so what stays is the file's beginning and cutting the rest off is
    one system call: a kill leaves the file as it was or as it should be.

    Args:
        path: the file.
        resume_step: the step that is resumed from, whose lines and those before it are kept; None for a new run,
            which keeps none.
        source: metrics.jsonl of the run that is resumed, when it is another file: its lines are taken over.
    """

    def __init__(self, path: Path, resume_step: int | None = None, source: Path | None = None) -> None:
        self.path = path
        self._file = path.open("ab")
        source = source if source is not None and source.exists() else path
        kept = b"".join(_lines_up_to(source, resume_step)) if resume_step is not None else b""
        if source.samefile(path):
            self._file.truncate(len(kept))
        else:
            self._file.truncate(0)
            self._file.write(kept)
            self._file.flush()

    def write(self, record: Metrics) -> None:
        """Append `record` as one line and flush it; infinities and NaN, which JSON does not have, become null."""
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        self._file.write(json.dumps(finite).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()


def _lines_up_to(path: Path, last_step: int) -> Iterator[bytes]:
    """The lines up to the first that is of a later step or that a kill or a power cut left unreadable."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                readable = line.endswith(b"\n") and json.loads(line)["step"] <= last_step
            except (ValueError, TypeError, KeyError):
                readable = False
            if not readable:
                return
            yield line


def records_up_to(path: Path, last_step: int) -> Iterator[tuple[int, Metrics]]:
    """Step and metrics of each line of a metrics.jsonl; null is read as NaN. Nothing where it is not there."""
    for line in _lines_up_to(path, last_step) if path.exists() else ():
        record = json.loads(line)
        yield record.pop("step"), {key: _number(value) for key, value in record.items()}


def one_series_per_rank(metrics: Metrics) -> dict[str, float]:
    """`metrics` with each list spread out: memory/host_peak_bytes/rank0, .../rank1 and so on, and .../max of them."""
    series: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Sequence):
            series.update({f"{name}/rank{rank}": number for rank, number in enumerate(value)})
            if len(value) > 1:
                series[f"{name}/max"] = max(value)
        else:
            series[name] = value
    return series


def _number(value: Any) -> Any:
    return [_number(one) for one in value] if isinstance(value, list) else math.nan if value is None else value
