"""What a run measured: metrics.jsonl, the progress bar, W&B, TensorBoard and MLflow, peaks of memory. RunLog ties the
first ones together; nothing here calls back into training."""

from llama_ft.observe.memory import (
    SNAPSHOT_STEPS,
    MemoryMonitor,
    memory_metrics,
    memory_use,
    reset_peaks,
    write_snapshot,
)
from llama_ft.observe.run_log import RunLog
from llama_ft.observe.run_metadata import RunMetadata, environment
from llama_ft.observe.summary import summary
from llama_ft.observe.throughput import ThroughputMeter
from llama_ft.observe.trackers import check_trackers

__all__ = [
    "SNAPSHOT_STEPS",
    "MemoryMonitor",
    "RunLog",
    "RunMetadata",
    "ThroughputMeter",
    "check_trackers",
    "environment",
    "memory_metrics",
    "memory_use",
    "reset_peaks",
    "summary",
    "write_snapshot",
]
