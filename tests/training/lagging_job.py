"""recipes/finetuning.py with losses that are read a step late, as on a GPU, and one step that goes
wrong on rank 1.

lagging_job.py CASES.json      a list of runs, all in one launch: `lags`, `bad_step` (0: none), `flags`, and `sums`, a
                               file that gets a line with the weights' sum at the beginning of each step
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from llama_ft import training

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "finetuning.py"
ACCUMULATE = training.accumulate_gradients


def run(lags: bool, bad_step: int, sums: str, flags: list[str]) -> None:
    found: list[float] = []

    def accumulate(built: Any, *arguments: Any, **keywords: Any) -> list[training.LossSum]:
        trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        found.append(sum(parameter.to_local().double().abs().sum().item() for parameter in trained))
        losses = ACCUMULATE(built, *arguments, **keywords)
        if len(found) == bad_step and os.environ["RANK"] == "1":
            losses[0].loss.fill_(float("nan"))
            trained[0].grad.to_local().fill_(float("nan"))
        if os.environ["RANK"] == "0":
            Path(sums).write_text("\n".join(map(repr, found)))
        return losses

    training.accumulate_gradients = accumulate  # type: ignore[assignment]
    training.PendingMetrics.LAGGING = ("cpu",) if lags else ()  # type: ignore[assignment]
    sys.argv = [str(RECIPE), *flags]
    runpy.run_path(str(RECIPE), run_name="__main__")


for case in json.loads(Path(sys.argv[1]).read_text()):
    run(**case)
