"""metrics.jsonl, read back as any JSON reader would."""

import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from random import Random

import pytest

from llama_ft.observe.run_log import MetricsLog, one_series_per_rank


def strict_records(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_record_is_on_disk_as_a_line_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path)
    for step in (1, 2):
        record = {"step": step, "train/loss": 6.5 / step, "memory/host_peak_bytes": [1024, 2048]}
        metrics.write({**record, "train/grad_norm": math.nan})
        assert strict_records(path)[-1] == {**record, "train/grad_norm": None}
        assert path.read_text().count("\n") == step
    metrics.close()
    metrics.close()


def write_steps(
    path: Path, first: int, last: int, resume_step: int | None = None, source: Path | None = None
) -> None:
    metrics = MetricsLog(path, resume_step, source)
    for step in range(first, last + 1):
        metrics.write({"step": step})
    metrics.close()


def steps(path: Path) -> list[object]:
    return [record["step"] for record in strict_records(path)]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 7)
    write_steps(path, 6, 9, resume_step=5)
    assert steps(path) == list(range(10))
    write_steps(path, 1, 3, resume_step=0)
    assert steps(path) == [0, 1, 2, 3]
    write_steps(path, 0, 2)  # a new run does not go on with the file of an earlier attempt
    assert steps(path) == [0, 1, 2]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "train/lo', b'{"step": 2}', b"\0\0\0\0", b'\0\0\n{"step": 3}\n']
)
def test_lines_half_written_before_a_kill_or_power_cut_are_dropped(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    write_steps(path, 2, 2, resume_step=1)
    assert steps(path) == [1, 2]
    path.write_bytes(b'{"step": 1}\n' + torn)
    # that step's own line was not logged, or is the one that is lost
    write_steps(path, 4, 4, resume_step=3)
    # a readable line after an unreadable one stays
    assert steps(path) == ([1, 3, 4] if b"3" in torn else [1, 4])


def test_a_run_resumed_in_another_directory_copies_the_earlier_lines(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.jsonl"
    path = tmp_path / "metrics.jsonl"
    write_steps(earlier, 0, 7)
    write_steps(path, 0, 99)
    write_steps(path, 6, 8, resume_step=5, source=earlier)
    assert steps(path) == list(range(9))
    assert steps(earlier) == list(range(8))


def resume_again_and_again(path: Path, checkpoint: Path) -> None:
    """As a run that is resumed from the checkpoint before its last one: forward 40 steps, back
    20."""
    while True:
        saved = int(checkpoint.read_text())
        metrics = MetricsLog(path, saved)
        for step in range(saved + 1, saved + 41):
            metrics.write({"step": step, "memory/host_peak_bytes": [float(step)] * 100})
            if step == saved + 20:
                aside = checkpoint.with_suffix(".tmp")
                aside.write_text(str(step))
                os.replace(aside, checkpoint)
        metrics.close()


def test_a_kill_at_any_moment_loses_no_line_of_a_saved_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    checkpoint = tmp_path / "checkpoint"
    write_steps(path, 0, 0)
    checkpoint.write_text("0")
    random = Random(0)
    saved = 0
    kills = 0
    deadline = time.monotonic() + 120
    while (kills < 15 or saved <= 60) and time.monotonic() < deadline:
        kills += 1
        process = multiprocessing.get_context("fork").Process(
            target=resume_again_and_again, args=(path, checkpoint)
        )
        process.start()
        time.sleep(random.uniform(0.01, 0.06))
        process.kill()
        process.join()
        saved = int(checkpoint.read_text())
        MetricsLog(path, saved).close()
        assert steps(path) == list(range(saved + 1))
    assert saved > 60


def test_lists_become_one_series_per_rank() -> None:
    flat = one_series_per_rank({"train/loss": 2.0, "memory/host_peak_bytes": [10, 20]})
    ranks = {
        "memory/host_peak_bytes/rank0": 10,
        "memory/host_peak_bytes/rank1": 20,
        "memory/host_peak_bytes/max": 20,
    }
    assert flat == {"train/loss": 2.0} | ranks
