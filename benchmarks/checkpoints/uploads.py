"""Measure how long training waits for a save with and without object storage.

    python benchmarks/checkpoints/uploads.py

It needs moto[server] and s3fs. A random Llama of 110 M parameters is trained in fp32 with AdamW on
2 ranks. Every turn launches torchrun in these ways, another one first each time:

    local       checkpoints on the disk only
    store       with --save_to: each checkpoint is also uploaded to a local S3 server (moto)
    slow store  the same, but the server answers each request 0.2 s late, and takes 20 MB/s

A launch saves several times while training continues. The first save only warms up. With a store,
the others begin while an earlier checkpoint is being uploaded; one that does not is not counted. At
the end of a launch its last upload is abandoned.

`stall` is how long training waits for a save: the median over the saves of all turns of the slower
rank, with the lowest and highest. `x` is the median of each turn's ratio to `local`. `cpu` is the
processor time of the training thread in a save: what the save itself does. `core` is how long this
thread was ready to run but had no core: ranks, uploads and the server share the cores here. `step`
is the median time of the training steps between the saves. All times are in seconds, of the slower
rank. The server has the lowest priority, because it would not be on the machines that train.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `import benchmarks`

import torch.distributed as dist

from benchmarks.checkpoints.checkpoint import Trainee, model_folder, slowest
from benchmarks.shared.moto_server import Application, start_s3_server
from benchmarks.shared.text_files import print_columns, read_json_lines
from benchmarks.shared.torchrun_command import torchrun_command
from llama_ft import runtime
from llama_ft.checkpoint import CheckpointWriter, SaveHooks
from llama_ft.config import CheckpointConfig
from llama_ft.extensions.store.object_store import ObjectStore
from llama_ft.extensions.store.uploads import Uploads
from llama_ft.runtime import log

WAYS = ("local", "store", "slow store")
SECONDS_PER_REQUEST = 0.2
BYTES_PER_SECOND = 20e6
MIN_STEPS = 2  # between two saves
Turn = dict[str, Any]


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


def worker(asked: argparse.Namespace) -> None:
    """Run by torchrun: one launch. Rank 0 adds its results to a file next to the model."""
    with runtime.start("cpu", "world") as ranks:
        log.setLevel(logging.ERROR)  # only the table
        folder: Path = asked.worker
        trainee = Trainee(folder, "full", asked.tokens, ranks)
        name = f"{asked.way.replace(' ', '-')}-{os.environ['TORCHELASTIC_RUN_ID']}"
        run = folder / name
        if ranks.is_main:
            run.mkdir()
        dist.barrier()
        uploads = None
        hooks = SaveHooks()
        if asked.way != "local":
            store = ObjectStore(f"s3://runs/{name}", "--save_to")
            uploads = Uploads(store, run, keep_last=1, resumed_step=0, ranks=ranks)
            hooks = uploads.hooks()
        writer = CheckpointWriter(run, CheckpointConfig(keep_last=1), {}, ranks, hooks)
        found: Turn = {"way": asked.way, "stalls": [], "cpu": [], "core": [], "steps": []}
        for save in range(asked.saves + 1):
            is_uploading = ranks.broadcast_from_rank0(lambda: bool(uploads and uploads.in_use()))
            stall, cpu, core = measure_save(writer, save + 1, trainee)
            steps = steps_until_written(writer, trainee)
            if save > 0 and (uploads is None or is_uploading):
                found["stalls"].append(stall)
                found["cpu"].append(cpu)
                found["core"].append(core)
                found["steps"] += steps
        writer.finish()
        if ranks.is_main:
            with open(folder / "found.jsonl", "a") as file:
                file.write(json.dumps(found) + "\n")
            print(found, file=sys.stderr)
        writer.finish_uploads(0)
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)  # requests of the abandoned upload are still waiting


def measure_save(
    writer: CheckpointWriter, step: int, trainee: Trainee
) -> tuple[float, float, float]:
    """Return how long training waits for a save, the processor time of the training thread in it,
    and how long this thread waited for a core."""
    cpu = core = 0.0

    def save() -> None:
        nonlocal cpu, core
        before = time.thread_time(), seconds_without_core()
        writer.save(step, trainee.model, trainee.optimizer, {})
        cpu = time.thread_time() - before[0]
        core = seconds_without_core() - before[1]

    stall = slowest(save, trainee.job)
    slower = trainee.job.all_gather_floats(cpu, core).max(0).values
    return stall, *slower.tolist()


def seconds_without_core() -> float:
    """Return how long this thread has been ready to run without a core, from Linux's statistics."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


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


def row(way: str, turns: list[Turn]) -> tuple[str, ...]:
    """A line of the table."""
    own = [turn for turn in turns if turn["way"] == way]
    local = [turn for turn in turns if turn["way"] == "local"]
    stalls = [seconds for turn in own for seconds in turn["stalls"]]
    ratios = [
        statistics.median(turn["stalls"]) / statistics.median(base["stalls"])
        for turn, base in zip(own, local, strict=True)
    ]
    return (
        way,
        str(len(stalls)),
        f"{statistics.median(stalls):.2f} ({min(stalls):.2f} to {max(stalls):.2f})",
        f"{statistics.median(ratios):.2f}",
        *(
            f"{statistics.median(seconds for turn in own for seconds in turn[key]):.2f}"
            for key in ("cpu", "core", "steps")
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="12 are 110 M parameters")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="of a launch that are measured")
    parser.add_argument("--tokens", type=int, default=16, help="of a training step")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return worker(asked)
    start_s3_server(as_elsewhere)
    with model_folder(asked.folder, asked.layers) as folder:
        command = [*torchrun_command(2), __file__, *sys.argv[1:]]
        for number in range(asked.turns):
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                own = ["--worker", str(folder.resolve()), "--way", way]
                subprocess.run([*command, *own], check=True)
        turns = read_json_lines(folder / "found.jsonl")
    titles = ("checkpoints", "saves", "stall", "x", "cpu", "core", "step")
    print_columns([titles, *(row(way, turns) for way in WAYS)])


if __name__ == "__main__":
    main()
