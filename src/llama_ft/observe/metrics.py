"""output_dir/metrics.jsonl: one JSON object per logged step, on disk as soon as the step is done."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Metrics = Mapping[str, float | Sequence[float]]  # a sequence has one value per rank


class MetricsLog:
    """Appends records to a file of JSON lines.

    A last line without an end, left by a process that was killed while writing, is dropped on opening: whoever reads
    the file may rely on every line being valid JSON.

    Args:
        path: the file; made if it is not there, continued if it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab+")
        self._drop_half_line()

    def write(self, record: Metrics) -> None:
        """Append `record` as one line and flush it; infinities and NaN, which JSON does not have, become null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def _drop_half_line(self) -> None:
        self._file.seek(0)
        complete_bytes = self._file.read().rfind(b"\n") + 1
        self._file.truncate(complete_bytes)


def one_series_per_rank(metrics: Metrics) -> dict[str, float]:
    """`metrics` with each list spread out: memory/host_peak_bytes/rank0, .../rank1 and so on."""
    series: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Sequence):
            series.update({f"{name}/rank{rank}": number for rank, number in enumerate(value)})
        else:
            series[name] = value
    return series


def _finite(value: float | Sequence[float]) -> float | list[float | None] | None:
    if isinstance(value, Sequence):
        return [number if math.isfinite(number) else None for number in value]
    return value if math.isfinite(value) else None
