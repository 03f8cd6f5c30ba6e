"""Rank 1 comes late, but in time; then rank 1 is stopped and rank 2 never leaves a loop."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from llama_ft import runtime
from llama_ft.cpu.gloo import GlooAllGather
from llama_ft.runtime.shared_memory import SharedMemory

TIMEOUT = 6.0

if __name__ == "__main__":
    with runtime.start("cpu", "world", timeout_seconds=TIMEOUT) as job:
        job.begin_run(Path(sys.argv[1]))
        for _ in range(2):  # longer than the time-out in all, and a rank that waits each time
            if job.rank == 1:
                time.sleep(TIMEOUT * 0.6)
            job.all_gather_floats(1.0)
        whole = torch.zeros(3, 4)
        memory = SharedMemory.open(dist.group.WORLD, blocks=1)
        (Path(sys.argv[1]) / f"process-{job.rank}").write_text(str(os.getpid()))
        job.all_gather_floats(2.0)
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if job.rank == 2:
            for _ in itertools.count():  # here
                time.sleep(0.01)  # for the other tests
        if sys.argv[2] == "shared memory":
            memory.signal(1)
            memory.wait(1)
        if sys.argv[2] == "gloo, weights":
            GlooAllGather()(whole, whole[job.rank], dist.group.WORLD)
        job.all_gather_floats(3.0)
