"""The recipe with the flags given after its path: it prints a line when an evaluation begins."""

import runpy
import sys
from typing import Any

from llama_ft.run.training_run import TrainingRun

evaluate = TrainingRun.evaluate


def announce(run: TrainingRun, *arguments: Any, **more: Any) -> Any:
    print("evaluation begins", flush=True)
    return evaluate(run, *arguments, **more)


if __name__ == "__main__":
    TrainingRun.evaluate = announce  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
