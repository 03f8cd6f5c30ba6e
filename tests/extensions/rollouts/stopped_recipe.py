"""recipes/finetuning.py, whose rank STOPPED_RANK (0) gets SIGTERM while it generates a batch of answers:
that with the number STOPPED_IN_BATCH, counted from 1. At its end it prints how many it has generated."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from conftest import RECIPE, load_script

from llama_ft.config.reading.parse import as_keywords
from llama_ft.extensions.rollouts.sampling import OwnSampler

WAIT_SECONDS = 60.0
answer = OwnSampler._answer
batches = list[OwnSampler]()


def stopped(sampler: OwnSampler, *arguments: Any) -> Any:
    batches.append(sampler)
    is_stopped = os.environ.get("RANK", "0") == os.environ.get("STOPPED_RANK", "0")
    if is_stopped and os.environ.get("STOPPED_IN_BATCH") == str(len(batches)):
        os.kill(os.getpid(), signal.SIGTERM)
        # a thread reads the signal, at some time
        sampler._ranks.signals.end_requested.wait(WAIT_SECONDS)
    return answer(sampler, *arguments)


if __name__ == "__main__":
    OwnSampler._answer = stopped  # type: ignore[method-assign]
    try:
        load_script(RECIPE).main(**as_keywords(sys.argv[1:]))
    finally:
        print("batches", len(batches))
