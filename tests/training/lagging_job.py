"""recipes/finetuning.py with losses that are read a step late, as on a GPU, and one step that goes
wrong on rank 1.

lagging_job.py LAGS BAD_STEP FILE FLAGS...      FILE gets a line with the weights' sum at the beginning of each step
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from llama_ft import training

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "finetuning.py"
ACCUMULATE = training.accumulate_gradients
lags = sys.argv[1] == "True"
bad_step = int(sys.argv[2])
file = Path(sys.argv[3])
flags = sys.argv[4:]
sums: list[float] = []


def accumulate(built: Any, *arguments: Any, **keywords: Any) -> list[training.LossSum]:
    trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    sums.append(sum(parameter.to_local().double().abs().sum().item() for parameter in trained))
    losses = ACCUMULATE(built, *arguments, **keywords)
    if len(sums) == bad_step and os.environ["RANK"] == "1":
        losses[0].loss.fill_(float("nan"))
        trained[0].grad.to_local().fill_(float("nan"))
    if os.environ["RANK"] == "0":
        file.write_text("\n".join(map(repr, sums)))
    return losses


training.accumulate_gradients = accumulate  # type: ignore[assignment]
training.PendingMetrics.LAGGING = ("cpu",) if lags else ()  # type: ignore[assignment]
sys.argv = [str(RECIPE), *flags]
runpy.run_path(str(RECIPE), run_name="__main__")
