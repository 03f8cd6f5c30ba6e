"""A job that fails in the way its first argument says; the second is its run directory."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from llama_ft import runtime
from llama_ft.errors import UserError

if __name__ == "__main__":
    way, output_dir = sys.argv[1], Path(sys.argv[2])
    with runtime.start(
        "cpu", "world", timeout_seconds=2 if way == "rank 0 goes first" else 60
    ) as job:
        job.begin_run(output_dir)
        job.note_step(3)
        print(f"pid {os.getpid()}", flush=True)
        if way == "rank 0 goes first":
            with job.local_main_process_first():
                if job.local_rank == 0:
                    time.sleep(5)
                    (output_dir / "done").touch()
                print(
                    f"rank {job.rank} is first or finds it done: {(output_dir / 'done').exists()}\n",
                    end="",
                    flush=True,
                )
        if way == "one rank raises" and job.rank == 1:
            raise ValueError("the flux capacitor is empty")
        if way == "every rank sees the same mistake" or (
            way == "one rank sees a mistake" and job.rank == 1
        ):
            raise UserError("mine.yaml:3: this is not right.\nThat would be.")
        if way == "one rank is killed" and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
