"""What a run measured: metrics.jsonl, the progress bar, W&B and TensorBoard, peaks of memory. RunLog ties the first
ones together; nothing here calls back into training."""

from llama_ft.observe.memory import (
    device_peak_bytes,
    host_anonymous_bytes,
    host_peak_bytes,
    memory_metrics,
    reset_peaks,
)
from llama_ft.observe.metrics import Metrics, MetricsLog
from llama_ft.observe.progress import Progress
from llama_ft.observe.runlog import RunLog
from llama_ft.observe.trackers import TensorboardTracker, Tracker, start_trackers
from llama_ft.observe.wandb_tracker import WandbTracker, check_wandb_login

__all__ = [
    "Metrics",
    "MetricsLog",
    "Progress",
    "RunLog",
    "TensorboardTracker",
    "Tracker",
    "WandbTracker",
    "check_wandb_login",
    "device_peak_bytes",
    "host_anonymous_bytes",
    "host_peak_bytes",
    "memory_metrics",
    "reset_peaks",
    "start_trackers",
]
