"""The recipe on ranks of which one may not take more memory from some step on: MIB more than it
then has, in STEP."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import finetuning
import fire

train_step = finetuning.train_step
steps = 0


def with_a_limit(*arguments: Any, **more: Any) -> Any:
    global steps
    steps += 1
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if steps == int(os.environ["STEP"]) and int(os.environ.get("RANK", 0)) == int(
        os.environ["LIMITED_RANK"]
    ):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS,
            (pages * resource.getpagesize() + int(os.environ["MIB"]) * 2**20, limits[1]),
        )
    try:
        return train_step(*arguments, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)  # what is asked for advice has all there is


if __name__ == "__main__":
    finetuning.train_step = with_a_limit
    sys.argv = sys.argv[1:]
    fire.Fire(finetuning.main)
