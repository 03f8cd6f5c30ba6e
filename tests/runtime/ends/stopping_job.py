"""A job of short steps that runs until it is asked to stop. Arguments: its directory, the name of a
special case, and --stop_after. It reports what happens by writing files into the directory."""

import itertools
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from llama_ft import runtime
from llama_ft.runtime.ends.signals import seconds_running


def hang(seconds: float = 60) -> None:
    """Wait in C++, as in a collective: Python's signal handlers do not run."""
    try:
        dist.HashStore().wait(["what never comes"], timedelta(seconds=seconds))
    except dist.DistStoreError:
        pass


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    way = sys.argv[2]
    stop_after = (sys.argv[3:] or [None])[0]
    with runtime.start("cpu", "world") as job:
        job.begin_run(folder)

        def report(event: str, content: object = "") -> None:
            aside = folder / f".{event}-{job.rank}"
            aside.write_text(str(content))
            aside.rename(folder / f"{event}-{job.rank}")

        report("process", os.getpid())
        report("started", time.time() - seconds_running())
        if way.startswith("loads in"):
            report("loading")
            hang() if way == "loads in C++" else time.sleep(60)
        with job.signals.between_steps(stop_after):
            for step in itertools.count(1):
                time.sleep(0.01 * (1 + job.rank))
                if step == 3:
                    report("training")
                    if way == "rank 0 hangs" and job.rank == 0:
                        hang()
                ranks = job.all_gather_floats(job.signals.request())
                job.record_step(step)
                stop = job.signals.agreed(ranks[:, 0])
                if stop is not None:
                    if way == "saves for ever":
                        hang(0.7)  # a Ctrl-C after so long is another one
                        report("saving", step)
                        hang()
                    if way == "rank 0 saves longer" and job.rank == 0:
                        hang(1)
                    report("saved", step)
                    raise runtime.Stopped(stop, step, folder / "checkpoints" / f"step-{step:06d}")
