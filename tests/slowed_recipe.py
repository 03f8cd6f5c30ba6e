"""recipes/finetuning.py, with steps that take longer, so that a test can act between two of them.

BRAKE: a file with the seconds that every step takes at least; the test may change it.
HOLD_AT: before this step, the run waits to be killed.
SLOW_RANK: each step takes this rank twice as long as its own work, and at least 0.1 s longer: it waits
for its data (LATE=data), or computes (LATE=computing).
STORE_SECONDS: how long --save_to waits for an answer.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from conftest import RECIPE, load_script

from llama_ft.config.reading.parse import as_keywords
from llama_ft.extensions.store import object_store as store
from llama_ft.observe import flops
from llama_ft.run import TrainingRun
from llama_ft.run.parts.slow_ranks import SlowRanks

begin_step = TrainingRun.begin_step
delays = list[float]()


def slowly(run: TrainingRun, step: Any, waited_seconds: float) -> None:
    if os.environ.get("HOLD_AT") == str(step.step):
        threading.Event().wait()
    with suppress(OSError, ValueError):  # no brake, or it is being written
        time.sleep(float(Path(os.environ["BRAKE"]).read_text()))
    delay = 0.0
    if is_slow:
        delay = 0.1
        if delays:  # so that it is slow on any machine
            slow_ranks = next(part for part in run._parts if isinstance(part, SlowRanks))
            numbers = slow_ranks.numbers(run)
            delay = max(delay, numbers["own_work"] - delays[-1])
        delays.append(delay)
    if late == "data":
        time.sleep(delay)
        waited_seconds += delay
    begin_step(run, step, waited_seconds)
    if late == "computing":
        end = time.perf_counter() + delay
        while time.perf_counter() < end:
            pass


if __name__ == "__main__":
    os.environ.setdefault("BRAKE", "")
    is_slow = os.environ.get("SLOW_RANK") == os.environ["RANK"]
    late = os.environ.get("LATE")
    TrainingRun.begin_step = slowly  # type: ignore[method-assign]
    flops.SECONDS_MEASURED = 0.0
    default = store.SECONDS_WITHOUT_PROGRESS
    store.SECONDS_WITHOUT_PROGRESS = float(os.environ.get("STORE_SECONDS", default))
    load_script(RECIPE).main(**as_keywords(sys.argv[1:]))
