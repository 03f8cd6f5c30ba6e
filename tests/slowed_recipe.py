"""recipes/finetuning.py, with steps that take longer, so that a test can act between two of them.

BRAKE: a file with the seconds that every step takes at least; the test may change it.
HOLD_AT: before this step, the run waits to be killed.
SLOW_RANK: this rank gets its batches SLOW_SECONDS later (LATE=data), or computes as much longer in
each step (LATE=computing).
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from conftest import RECIPE, load_script

from llama_ft.config.parse import as_keywords
from llama_ft.data.prefetch import PreparedBatches
from llama_ft.observe import flops
from llama_ft.run import TrainingRun

begin_step = TrainingRun.begin_step
steps = PreparedBatches.steps


def slowly(run: TrainingRun, step: Any, *arguments: Any) -> None:
    if os.environ.get("HOLD_AT") == str(step.step):
        threading.Event().wait()
    with suppress(OSError, ValueError):  # no brake, or it is being written
        time.sleep(float(Path(os.environ["BRAKE"]).read_text()))
    begin_step(run, step, *arguments)
    if is_slow and late == "computing":
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass


def late_steps(*arguments: Any) -> Iterator[Any]:
    for step in steps(*arguments):
        if is_slow and late == "data":
            time.sleep(seconds)
        yield step


if __name__ == "__main__":
    os.environ.setdefault("BRAKE", "")
    is_slow = os.environ.get("SLOW_RANK") == os.environ["RANK"]
    seconds = float(os.environ.get("SLOW_SECONDS", "0"))
    late = os.environ.get("LATE")
    TrainingRun.begin_step = slowly  # type: ignore[method-assign]
    PreparedBatches.steps = late_steps  # type: ignore[assignment, method-assign]
    flops.SECONDS_MEASURED = 0.0
    load_script(RECIPE).main(**as_keywords(sys.argv[1:]))
