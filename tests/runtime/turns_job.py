"""Rank 0 goes first for longer than the time-out."""

import sys
import time
from pathlib import Path

from llama_ft import runtime

TIMEOUT = 2.0

if __name__ == "__main__":
    done = Path(sys.argv[1])
    with runtime.start("cpu", "world", timeout_seconds=TIMEOUT) as job:
        with job.local_main_process_first():
            if job.local_rank == 0:
                time.sleep(4 * TIMEOUT)
                done.write_text("")
            print(f"rank {job.rank} is first or finds it done: {done.exists()}\n", end="", flush=True)
