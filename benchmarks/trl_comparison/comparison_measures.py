"""What benchmarks/trl_comparison/comparison.py measures of a run, and of the machine."""

import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainers.peers import FOLDER, Watched


def evaluation_record(record: dict[str, Any]) -> dict[str, float]:
    """Loss, margin and accuracy of an evaluation, by the names of neither side."""
    found = {"step": record["step"]}
    for name, value in record.items():
        if not name.startswith("eval"):
            continue
        short = name.replace("eval_", "").replace("eval/", "").replace("rewards/", "")
        if short in ("loss", "margins", "accuracies"):
            found[short] = value
    return found


def measured(watched: Watched, ends: list[float]) -> dict[str, Any]:
    """What was seen of a run from outside."""
    return {
        "started": watched.started,
        "ends": ends,
        "clocks": watched.clocks,
        "seconds": watched.clocks[-1][0] - watched.started,
        "cpu_seconds": max(cpu for _, cpu in watched.clocks),  # the last one may lack a rank
        "peak_bytes": max(watched.peaks.values()),
    }


def cpu_at(result: dict[str, Any], step: int) -> float:
    """CPU seconds of all ranks up to the end of a step."""
    end = result["ends"][step]
    before = [cpu for wall, cpu in result["clocks"] if wall <= end]
    return float(before[-1])


def whole_run(result: dict[str, Any]) -> dict[str, float]:
    """Memory and the median step's CPU seconds of a whole run. The median leaves out the steps with
    an evaluation or a save."""
    steps = range(1, len(result["ends"]))
    seconds = [cpu_at(result, step) - cpu_at(result, step - 1) for step in steps]
    return {
        "cpu_seconds_per_step": statistics.median(seconds),
        "peak_bytes": result["device_peak_bytes"] or result["peak_bytes"],
    }


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name in turns[0]:
        found[name] = statistics.median(turn[name] for turn in turns)
    return found


def disk_of(folder: Path) -> dict[str, int]:
    """Bytes of the checkpoint and of the final model."""
    sizes = {}
    checkpoints = [*folder.glob("checkpoint-*"), *folder.glob("checkpoints/step-*")]
    for name, parts in (("checkpoint", checkpoints), ("model", [folder / "model"])):
        files = [file for part in parts for file in part.rglob("*") if file.is_file()]
        sizes[name] = sum(file.stat().st_size for file in files)
    return sizes


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def machine() -> dict[str, Any]:
    flags = Path("/proc/cpuinfo").read_text()
    found = {
        "processor": processor_name(),
        "avx512_bf16": "avx512_bf16" in flags,
        "amx": "amx_bf16" in flags,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str:
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short=7", "HEAD"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return printed.stdout.strip()
