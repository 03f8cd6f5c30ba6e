"""Measurements of a run: metrics.jsonl, the progress bar, trackers (W&B, TensorBoard, MLflow),
speed and peak memory. RunLog combines the first three. Nothing here calls code of training."""

from llama_ft.observe.memory import (
    SNAPSHOT_STEPS,
    MemoryMonitor,
    memory_metrics,
    memory_use,
    reset_peaks,
    write_snapshot,
)
from llama_ft.observe.own_work import OwnWork
from llama_ft.observe.run_log import ResumedLog, RunLog
from llama_ft.observe.run_metadata import RunMetadata, environment
from llama_ft.observe.summary import RunOutcome, summary
from llama_ft.observe.throughput import ThroughputMeter
from llama_ft.observe.trackers import check_trackers
