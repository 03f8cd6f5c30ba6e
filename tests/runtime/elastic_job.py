"""Two short runs in one launch, of which the second fails in the way the first argument says; the
second argument is a folder for their directories."""

import os
import signal
import sys
from pathlib import Path

from llama_ft import runtime
from llama_ft.errors import UserError, exit_on_error

if __name__ == "__main__":
    way = sys.argv[1]
    folder = Path(sys.argv[2])
    if way == "early user error":
        with exit_on_error():
            raise UserError("mine.yaml:3: this is not right.\nThat would be.")
    for number in range(2):
        with runtime.start("cpu", "world") as job:
            earlier = job.broadcast_from_rank0(lambda: job.earlier_run)  # noqa: B023
            fresh = folder / f"run{number}-begun-by-{os.getpid()}"
            directory = earlier or job.broadcast_from_rank0(lambda: fresh)  # noqa: B023
            if job.is_main:
                directory.mkdir(exist_ok=True)
            job.begin_run(directory)
            print(
                f"rank {job.rank} {'resumes' if earlier else 'begins'} in {directory.name}\n",
                end="",
                flush=True,
            )
            if (
                way == "killed once"
                and number == 1
                and job.rank == job.world_size - 1
                and earlier is None
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "late user error" and number == 1 and job.rank == 1:
                raise UserError("mine.jsonl:7: this row is not right.")
            job.all_gather_floats(1.0)
