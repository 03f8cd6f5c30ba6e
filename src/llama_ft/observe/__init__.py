"""What a run measured: metrics.jsonl, the progress bar, W&B, TensorBoard and MLflow, peaks of memory. RunLog ties the
first ones together; nothing here calls back into training."""

from llama_ft.observe.memory import SNAPSHOT_STEPS, PhasePeaks, memory_metrics, memory_use, reset_peaks, write_snapshot
from llama_ft.observe.metrics import Metrics, MetricsLog
from llama_ft.observe.mlflow_tracker import MlflowTracker
from llama_ft.observe.progress import ProgressBar
from llama_ft.observe.run_log import RunLog
from llama_ft.observe.run_metadata import RunMetadata, environment
from llama_ft.observe.throughput import ThroughputMeter
from llama_ft.observe.trackers import Result, TensorboardTracker, Tracker, check_trackers, start_trackers
from llama_ft.observe.wandb_tracker import WandbTracker
from llama_ft.observe.watch import MemoryMonitor

__all__ = [
    "SNAPSHOT_STEPS",
    "MemoryMonitor",
    "Metrics",
    "MetricsLog",
    "MlflowTracker",
    "PhasePeaks",
    "ProgressBar",
    "Result",
    "RunMetadata",
    "RunLog",
    "ThroughputMeter",
    "TensorboardTracker",
    "Tracker",
    "WandbTracker",
    "check_trackers",
    "environment",
    "memory_metrics",
    "memory_use",
    "reset_peaks",
    "start_trackers",
    "write_snapshot",
]
