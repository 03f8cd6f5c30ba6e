"""RunLog with real files and real trackers."""

import io
import json
import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llama_ft.config.settings import TrackingConfig
from llama_ft.observe import RunLog

NO_TRACKERS = TrackingConfig()
OFFLINE = TrackingConfig(use_wandb=True, wandb_mode="offline", use_tensorboard=True)


def records(output_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_step_with_its_evaluation_is_one_line(tmp_path: Path, screen: io.StringIO) -> None:
    with RunLog(tmp_path, NO_TRACKERS, {}, total_steps=2) as run_log:
        run_log.log_step(0, {"eval/loss": 9.0, "eval/perplexity": 8103.1})
        run_log.log_step(1, {"epoch": 0.5, "tokens": 100, "train/loss": 8.0})
        run_log.log_step(
            2, {"epoch": 1.0, "tokens": 200, "train/loss": 7.0, "eval/loss": 7.5, "eval/perplexity": 1808.0}
        )
    assert records(tmp_path) == [
        {"step": 0, "eval/loss": 9.0, "eval/perplexity": 8103.1},
        {"step": 1, "epoch": 0.5, "tokens": 100, "train/loss": 8.0},
        {"step": 2, "epoch": 1.0, "tokens": 200, "train/loss": 7.0, "eval/loss": 7.5, "eval/perplexity": 1808.0},
    ]
    assert screen.getvalue().splitlines() == [
        "step 0/2  held-out loss 9.000  perplexity 8103.10",
        "step 1/2  loss 8.000",
        "step 2/2  loss 7.000",
        "step 2/2  held-out loss 7.500  perplexity 1808.00",
    ]


def test_ranks_other_than_0_log_nothing(tmp_path: Path, screen: io.StringIO) -> None:
    with RunLog(tmp_path, OFFLINE, {}, total_steps=2, rank=1) as run_log:
        run_log.log_step(1, {"train/loss": 8.0})
        run_log.log_result(tmp_path, {"weights_of": 1, "best_step": 0}, 60)
    assert list(tmp_path.iterdir()) == []
    assert screen.getvalue() == ""


def test_a_run_resumed_in_another_directory_has_its_whole_history_there(tmp_path: Path, screen: io.StringIO) -> None:
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    for output_dir in (earlier, later):
        output_dir.mkdir()
    with RunLog(earlier, NO_TRACKERS, {}, total_steps=4) as run_log:
        run_log.log_step(0, {"eval/loss": 9.0, "eval/perplexity": 8103.1})
        for step in (1, 2, 3):
            run_log.log_step(step, {"train/loss": 8.0, "train/grad_norm": math.nan})
    tracking = TrackingConfig(use_tensorboard=True)
    with RunLog(later, tracking, {}, total_steps=4, resume_step=2, resumed_dir=earlier) as run_log:
        for step in (3, 4):
            run_log.log_step(step, {"train/loss": 7.0})
    assert [record["step"] for record in records(later)] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in records(earlier)] == [0, 1, 2, 3]
    events = EventAccumulator(str(later / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 8.0), (2, 8.0), (3, 7.0), (4, 7.0)]
    assert [event.step for event in events.Scalars("eval/loss")] == [0]
    assert math.isnan(events.Scalars("train/grad_norm")[0].value)
