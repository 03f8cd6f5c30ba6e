"""Measure how long training waits for a save with and without object storage.

    python benchmarks/uploads.py

It needs moto[server] and s3fs. A random Llama of 110 M parameters is trained in fp32 with AdamW on
2 ranks. Every turn runs these one after another, another one first each time:

    local       checkpoints on the disk only
    store       with --save_to: each checkpoint is also uploaded to a local S3 server (moto)
    slow store  the same, but the server answers each request 0.2 s late, and takes 100 MB/s

The server has the lowest priority, because it would not be on the machines that train.
Each saves several times while training continues. The first save of a turn only warms up. With a
store, all others begin while an earlier checkpoint is being uploaded; the script fails if not.

`stall` is how long training waits for a save: the median over the saves of all turns of the slower
rank, with the lowest and highest. `x` is the median of each turn's ratio to `local`, `step` the
median time of the training steps between the saves, and `upload` that of an upload. All times are
in seconds.
"""

import argparse
import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint import Trainee, model_folder, slowest
from moto_server import Application, start_s3_server
from text_files import print_columns, read_json_lines
from torchrun_command import torchrun_command

from llama_ft import runtime
from llama_ft.checkpoint import CheckpointWriter, ObjectStore, Uploads
from llama_ft.config import CheckpointConfig
from llama_ft.runtime import log

WAYS = ("local", "store", "slow store")
SECONDS_PER_REQUEST = 0.2
BYTES_PER_SECOND = 100e6
MIN_STEPS = 3  # between two saves
UPLOADED = re.compile(r"Uploaded step-\d+ .* in ([\d.]+) s")
Turn = dict[str, Any]


class UploadTimes(logging.Handler):
    """Collects the seconds that the log names for each upload."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = list[float]()

    def emit(self, record: logging.LogRecord) -> None:
        if match := UPLOADED.match(record.getMessage()):
            self.seconds.append(float(match[1]))


def as_elsewhere(application: Application) -> Application:
    """Serve requests with the lowest priority, and those for runs/slow-* like a distant store:
    late, and with a limited bandwidth that all connections share."""
    lock = threading.Lock()
    free_at = 0.0  # when the line has sent everything so far

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal free_at
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux, of this thread
        if environ["PATH_INFO"].startswith("/runs/slow-"):
            seconds = int(environ.get("CONTENT_LENGTH") or 0) / BYTES_PER_SECOND
            with lock:
                free_at = max(free_at, time.monotonic()) + seconds
                done_at = free_at
            time.sleep(done_at - time.monotonic() + SECONDS_PER_REQUEST)
        return application(environ, start_response)

    return serve


def measure_turn(
    way: str, number: int, saves: int, trainee: Trainee, folder: Path, times: UploadTimes
) -> Turn:
    """Save several times while training continues, then wait for the uploads."""
    ranks = trainee.job
    run = folder / "run"
    uploads = None
    if ranks.is_main:
        run.mkdir()
    dist.barrier()
    if way != "local":
        store = ObjectStore(f"s3://runs/{way.replace(' ', '-')}-{number}", "--save_to")
        uploads = Uploads(store, run, keep_last=1, resumed_step=0, ranks=ranks)
    settings = CheckpointConfig(keep_last=1)
    writer = CheckpointWriter(run, settings, {}, ranks, uploads)
    times.seconds.clear()
    stalls = []
    steps = []
    for save in range(saves + 1):
        is_uploading = uploads is not None and bool(uploads.in_use())
        if ranks.is_main and save > 0 and uploads is not None and not is_uploading:
            raise SystemExit("error: an upload had ended before the next save began")
        stall = slowest(lambda step=save + 1: write(writer, step, trainee), ranks)  # type: ignore[misc]
        between = steps_until_written(writer, trainee)
        if save > 0:
            stalls.append(stall)
            steps += between
    writer.finish()
    writer.finish_uploads()
    if ranks.is_main:
        shutil.rmtree(run)
        if uploads is not None:
            for name in store.sizes(""):
                store.delete(name)
    dist.barrier()
    return {"way": way, "stalls": stalls, "steps": steps, "uploads": list(times.seconds)}


def write(writer: CheckpointWriter, step: int, trainee: Trainee) -> None:
    writer.save(step, trainee.model, trainee.optimizer, {})


def steps_until_written(writer: CheckpointWriter, trainee: Trainee) -> list[float]:
    """Train until all ranks have written the checkpoint, so that the next save does not wait for
    this one. Return the seconds of each step."""
    seconds = []
    timings: dict[str, float] = {}
    is_written = False
    while not is_written or len(seconds) < MIN_STEPS:
        seconds.append(slowest(trainee.step, trainee.job))
        timings |= writer.timings()
        written = trainee.job.all_gather_floats("perf/save_seconds" in timings)
        is_written = bool(written.all())
    return seconds


def worker(asked: argparse.Namespace) -> None:
    """Run by torchrun: all turns on these ranks. Rank 0 writes the results next to the model."""
    times = UploadTimes()
    with runtime.start("cpu", "world") as ranks:
        log.setLevel(logging.INFO)
        log.addHandler(times)
        trainee = Trainee(asked.worker, "full", asked.tokens, ranks)
        measure_turn("local", 0, 1, trainee, asked.worker, times)  # warms up
        for number in range(asked.turns):
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                found = measure_turn(way, number, asked.saves, trainee, asked.worker, times)
                if ranks.is_main:
                    with open(asked.worker / "found.jsonl", "a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(f"turn {number + 1} of {asked.turns}: {found}", file=sys.stderr)


def row(way: str, turns: list[Turn]) -> tuple[str, ...]:
    """A line of the table."""
    own = [turn for turn in turns if turn["way"] == way]
    local = [turn for turn in turns if turn["way"] == "local"]
    stalls = [seconds for turn in own for seconds in turn["stalls"]]
    steps = [seconds for turn in own for seconds in turn["steps"]]
    uploads = [seconds for turn in own for seconds in turn["uploads"]]
    ratios = [
        statistics.median(turn["stalls"]) / statistics.median(base["stalls"])
        for turn, base in zip(own, local, strict=True)
    ]
    return (
        way,
        str(len(stalls)),
        f"{statistics.median(stalls):.3f} ({min(stalls):.3f} to {max(stalls):.3f})",
        f"{statistics.median(ratios):.2f}",
        f"{statistics.median(steps):.2f}",
        f"{statistics.median(uploads):.1f}" if uploads else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="12 are 110 M parameters")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="of a turn that are measured")
    parser.add_argument("--tokens", type=int, default=16, help="of a training step")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return worker(asked)
    start_s3_server(as_elsewhere)
    with model_folder(asked.folder, asked.layers) as folder:
        command = [*torchrun_command(2), __file__, *sys.argv[1:]]
        subprocess.run([*command, "--worker", str(folder.resolve())], check=True)
        turns = read_json_lines(folder / "found.jsonl")
    titles = ("checkpoints", "saves", "stall", "x", "step", "upload")
    print_columns([titles, *(row(way, turns) for way in WAYS)])


if __name__ == "__main__":
    main()
