"""A job that fails in the way its first argument says; the second is its run directory."""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from llama_ft import runtime
from llama_ft.errors import UserError

if __name__ == "__main__":
    way, output_dir = sys.argv[1], Path(sys.argv[2])
    with runtime.start("cpu", "world") as job:
        job.begin_run(output_dir)
        job.note_step(3)
        print(f"pid {os.getpid()}", flush=True)
        if way == "one rank raises" and job.rank == 1:
            raise ValueError("the flux capacitor is empty")
        if way == "every rank sees the same mistake":
            raise UserError("mine.yaml:3: this is not right.\nThat would be.")
        if way == "one rank sees a mistake" and job.rank == 1:
            raise UserError("mine.jsonl:7: this row is not right.")
        if way == "one rank is killed" and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "the run directory is deleted":
            shutil.rmtree(output_dir)
            job.status.write_step()
        dist.barrier()
