"""A job that fails in the way its first argument says; the second is its run directory."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from llama_ft import runtime
from llama_ft.checkpoint import CheckpointWriter
from llama_ft.config import CheckpointConfig
from llama_ft.errors import UserError
from llama_ft.runtime.ends.exit import RunStatus


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def fail_now(output_dir: Path) -> None:
    """Record when the failure begins."""
    (output_dir / "failed-at").write_text(str(time.time()))


if __name__ == "__main__":
    way = sys.argv[1]
    output_dir = Path(sys.argv[2])
    timeouts = {"rank 0 goes first": 2, "one rank never opens the run": 8}
    with runtime.start("cpu", "world", timeout_seconds=timeouts.get(way, 60)) as job:
        if way == "one rank raises before the first status":
            if job.rank == 1:
                job.status = RunStatus(output_dir)  # as begin_run, before it waits for rank 0
                fail_now(output_dir)
                raise ValueError("the flux capacitor is empty")
            while not (output_dir / "status.json").exists():
                time.sleep(0.05)
        job.begin_run(output_dir)
        job.record_step(3)
        dist.barrier()  # otherwise rank 0 may write that it runs after another has failed
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
            fail_now(output_dir)
            raise ValueError("the flux capacitor is empty")
        if way == "every rank has the same user error" or (
            way == "one rank has a user error" and job.rank == 1
        ):
            raise UserError("mine.yaml:3: this is not right.\nThat would be.")
        if way == "an error has no text":
            raise Unprintable
        if way == "too many files are open":
            raise RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Too many open files")
        if way == "one rank is killed" and job.rank == 1:
            fail_now(output_dir)
            os.kill(os.getpid(), signal.SIGKILL)
        if way.endswith("opens the run"):
            if job.rank == 1:
                time.sleep(2)  # rank 0 waits in new_group meanwhile
                fail_now(output_dir)
                if way == "one rank is killed while the other opens the run":
                    os.kill(os.getpid(), signal.SIGKILL)
                if way == "the disk is full while the other rank opens the run":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.yaml")
                time.sleep(60)
            CheckpointWriter(output_dir, CheckpointConfig(), {}, job)
        dist.barrier()
