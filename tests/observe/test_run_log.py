"""RunLog with real files and real trackers, TensorBoard's event files read back by TensorBoard."""

import io
import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_ft.config.settings.settings import TrackingConfig
from llama_ft.observe import ResumedLog, RunLog

NO_TRACKERS = TrackingConfig()
TENSORBOARD = TrackingConfig(use_tensorboard=True)
OFFLINE = TrackingConfig(use_wandb=True, wandb_mode="offline", use_tensorboard=True)


def records(output_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def events_in(output_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    return events


def losses(output_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events_in(output_dir).Scalars("train/loss")]


def log_steps(
    output_dir: Path, first: int, last: int, value: float, resume_step: int | None = None
) -> None:
    resumed = None if resume_step is None else ResumedLog(resume_step, output_dir, {})
    with RunLog(output_dir, TENSORBOARD, {"train": {"lr": 0.001}}, 9, resumed=resumed) as run_log:
        for step in range(first, last + 1):
            run_log.log_step(step, {"train/loss": value, "memory/host_peak_bytes": [1e9, 2e9]})
        if last == 6:
            assert losses(output_dir)[-1] == (6, 2.0), "read as a kill would leave it"


def test_a_step_with_its_evaluation_is_one_line(tmp_path: Path, screen: io.StringIO) -> None:
    steps = [
        {"step": 0, "eval/loss": 9.0, "eval/perplexity": 8103.1},
        {"step": 1, "epoch": 0.5, "tokens": 100, "train/loss": 8.25},
        {
            "step": 2,
            "epoch": 1.0,
            "tokens": 200,
            "train/loss": 7.0,
            "eval/loss": 7.5,
            "eval/perplexity": 1808.0,
        },
    ]
    with RunLog(tmp_path, NO_TRACKERS, {}, total_steps=2) as run_log, run_log.training():
        for metrics in steps:
            run_log.log_step(
                int(metrics["step"]), {key: metrics[key] for key in metrics if key != "step"}
            )
    assert records(tmp_path) == steps
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"], "no tracker starts unasked"
    assert screen.getvalue().splitlines() == [
        "step 0/2  validation loss 9  perplexity 8103.10",
        "step 1/2  loss 8.25",
        "step 2/2  loss 7",
        "step 2/2  validation loss 7.5  perplexity 1808.00",
    ]


def test_ranks_other_than_0_log_nothing(tmp_path: Path, screen: io.StringIO) -> None:
    with RunLog(tmp_path, OFFLINE, {}, total_steps=2, rank=1) as run_log, run_log.training():
        run_log.log_step(1, {"train/loss": 8.0})
        run_log.log_result(tmp_path, {"weights_of": 1, "best_step": 0}, 60)
    assert list(tmp_path.iterdir()) == []
    assert screen.getvalue() == ""


def test_a_run_resumed_in_another_directory_has_its_whole_history_there(
    tmp_path: Path, screen: io.StringIO
) -> None:
    earlier = tmp_path / "earlier"
    later = tmp_path / "later"
    for output_dir in (earlier, later):
        output_dir.mkdir()
    with RunLog(earlier, NO_TRACKERS, {}, total_steps=4) as run_log:
        run_log.log_step(0, {"eval/loss": 9.0, "eval/perplexity": 8103.1})
        for step in (1, 2, 3):
            run_log.log_step(step, {"train/loss": 8.0, "train/grad_norm": math.nan})
    with RunLog(
        later, TENSORBOARD, {}, total_steps=4, resumed=ResumedLog(2, earlier, {})
    ) as run_log:
        for step in (3, 4):
            run_log.log_step(step, {"train/loss": 7.0})
    assert [record["step"] for record in records(later)] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in records(earlier)] == [0, 1, 2, 3]
    assert losses(later) == [(1, 8.0), (2, 8.0), (3, 7.0), (4, 7.0)]
    events = events_in(later)
    assert [event.step for event in events.Scalars("eval/loss")] == [0]
    assert math.isnan(events.Scalars("train/grad_norm")[0].value)


@pytest.mark.parametrize("damage", [b'{"step": 2, "tra', b"\xff\xfe\x00", b"[]", b"[" * 100_000])
def test_corrupted_lines_are_reported_and_later_steps_kept(
    tmp_path: Path, screen: io.StringIO, damage: bytes
) -> None:
    with RunLog(tmp_path, NO_TRACKERS, {}, total_steps=6) as run_log:
        for step in range(1, 6):
            run_log.log_step(step, {"train/loss": 8.0})
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = damage + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 6, "train/lo')
    with RunLog(
        tmp_path, NO_TRACKERS, {}, total_steps=6, resumed=ResumedLog(5, tmp_path, {})
    ) as run_log:
        run_log.log_step(6, {"train/loss": 7.0})
    assert [record["step"] for record in records(tmp_path)] == [1, 3, 4, 5, 6]
    assert "1 line of earlier steps cannot be read" in screen.getvalue()


@pytest.mark.parametrize(
    ("resume_step", "expected"),
    [(3, [(step, 1.0) for step in range(4)]), (None, [(step, 2.0) for step in range(4)])],
)
def test_tensorboard_shows_each_step_of_a_resumed_run_once(
    tmp_path: Path, screen: io.StringIO, resume_step: int | None, expected: list[tuple[int, float]]
) -> None:
    log_steps(tmp_path, 0, 5, 1.0)
    log_steps(tmp_path, 0 if resume_step is None else resume_step + 1, 6, 2.0, resume_step)
    assert losses(tmp_path) == [*expected, (4, 2.0), (5, 2.0), (6, 2.0)]
    events = events_in(tmp_path)
    assert {event.value for event in events.Scalars("memory/host_peak_bytes/rank1")} == {2e9}
    config_text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    train:\n      lr: 0.001" in config_text
