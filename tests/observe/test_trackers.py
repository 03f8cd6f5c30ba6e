"""Which trackers start, and TensorBoard's event files read back by TensorBoard."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_ft.config.sections import TrackingConfig
from llama_ft.observe import start_trackers

RESOLVED = {"train": {"lr": 0.001, "num_epochs": 2}}


def test_no_tracker_starts_unasked(tmp_path: Path) -> None:
    assert start_trackers(TrackingConfig(), tmp_path, RESOLVED) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    (tracker,) = start_trackers(TrackingConfig(use_tensorboard=True), tmp_path, RESOLVED)
    for step in (1, 2, 3):
        tracker.log({"train/loss": 6.0 / step, "memory/host_peak_bytes": [1e9, 2e9]}, step)
    tracker.finish(0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 6.0), (2, 3.0), (3, 2.0)]
    assert [event.value for event in events.Scalars("memory/host_peak_bytes/rank1")] == [2e9] * 3
    config_text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    train:\n      lr: 0.001" in config_text
