"""Which trackers start, and TensorBoard's event files read back by TensorBoard."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_ft.config.settings import TrackingConfig
from llama_ft.observe.trackers import start_trackers

RESOLVED = {"train": {"lr": 0.001, "num_epochs": 2}}


def events_in(output_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    return events


def losses(output_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events_in(output_dir).Scalars("train/loss")]


def test_no_tracker_starts_unasked(tmp_path: Path) -> None:
    assert start_trackers(TrackingConfig(), tmp_path, RESOLVED, None, {}) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_back_what_was_logged_also_after_a_kill(tmp_path: Path) -> None:
    (tracker,) = start_trackers(TrackingConfig(use_tensorboard=True), tmp_path, RESOLVED, None, {})
    for step in (1, 2, 3):
        tracker.log({"train/loss": 6.0 / step, "memory/host_peak_bytes": [1e9, 2e9]}, step)
    assert losses(tmp_path) == [(1, 6.0), (2, 3.0), (3, 2.0)]  # read as a kill would leave it
    tracker.finish(0)
    events = events_in(tmp_path)
    assert [event.value for event in events.Scalars("memory/host_peak_bytes/rank1")] == [2e9] * 3
    config_text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    train:\n      lr: 0.001" in config_text


def log_steps(output_dir: Path, first: int, last: int, value: float, resume_step: int | None = None) -> None:
    (tracker,) = start_trackers(TrackingConfig(use_tensorboard=True), output_dir, RESOLVED, resume_step, {})
    for step in range(first, last + 1):
        tracker.log({"train/loss": value}, step)
    tracker.finish(0)


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5, 1.0)
    log_steps(tmp_path, 0, 6, 2.0, resume_step=3)  # the earlier steps, which are there, are told too
    assert losses(tmp_path) == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert "config/text_summary" in events_in(tmp_path).Tags()["tensors"]


def test_tensorboard_shows_nothing_of_an_attempt_that_was_begun_anew(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5, 1.0)
    log_steps(tmp_path, 0, 2, 2.0)
    assert losses(tmp_path) == [(0, 2.0), (1, 2.0), (2, 2.0)]
