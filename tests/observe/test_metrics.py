"""metrics.jsonl, read back as any JSON reader would."""

import json
import math
from pathlib import Path

import pytest

from llama_ft.observe import MetricsLog
from llama_ft.observe.metrics import one_series_per_rank


def strict_records(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_record_is_on_disk_as_a_line_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path)
    for step in (1, 2):
        metrics.write({"step": step, "train/loss": 6.5 / step, "memory/host_peak_bytes": [1024, 2048]})
        assert strict_records(path)[-1] == {
            "step": step,
            "train/loss": 6.5 / step,
            "memory/host_peak_bytes": [1024, 2048],
        }
        assert path.read_text().count("\n") == step
    metrics.close()
    metrics.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_json_does_not_have_become_null(tmp_path: Path, value: float) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1, "train/loss": value, "memory/device_peak_bytes": [1.0, value]})
    metrics.close()
    assert strict_records(metrics.path) == [{"step": 1, "train/loss": None, "memory/device_peak_bytes": [1.0, None]}]


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        metrics = MetricsLog(path)
        metrics.write({"step": step})
        metrics.close()
    assert strict_records(path) == [{"step": 1}, {"step": 2}]


def test_the_half_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/lo')
    metrics = MetricsLog(path)
    metrics.write({"step": 2})
    metrics.close()
    assert strict_records(path) == [{"step": 1}, {"step": 2}]


def test_lists_become_one_series_per_rank() -> None:
    flat = one_series_per_rank({"train/loss": 2.0, "memory/host_peak_bytes": [10, 20]})
    assert flat == {"train/loss": 2.0, "memory/host_peak_bytes/rank0": 10, "memory/host_peak_bytes/rank1": 20}
