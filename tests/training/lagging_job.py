"""recipes/finetuning.py with losses that are read a step late, as on a GPU, one step that goes wrong
on rank 1, and each rank's number among those whose largest one is logged.

lagging_job.py CASES.json      a list of runs, all in one launch: `lags`, `bad_step` (0: none), `flags`, and `sums`, a
                               file that gets a line with the weights' sum at the beginning of each step
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from llama_ft import training
from llama_ft.data import Batch

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "finetuning.py"
MICRO_BATCHES = training.micro_batches
REDUCE = training.reduce_losses_and_norm


def run(lags: bool, bad_step: int, sums: str, flags: list[str]) -> None:
    found: list[float] = []

    def micro_batches(built: Any, *arguments: Any) -> Iterator[Batch]:
        trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        found.append(sum(parameter.to_local().double().abs().sum().item() for parameter in trained))
        if os.environ["RANK"] == "0":
            Path(sums).write_text("\n".join(map(repr, found)))
        return MICRO_BATCHES(built, *arguments)

    def reduce(
        losses: Sequence[training.LossSum], gradients: Sequence[torch.Tensor], *arguments: Any
    ) -> torch.Tensor:
        if len(found) == bad_step and os.environ["RANK"] == "1":
            losses[0].loss.fill_(float("nan"))
            gradients[0].fill_(float("nan"))
        for number, loss in enumerate(losses):
            loss.largest["rank"] = torch.tensor(float(os.environ["RANK"]) - number)
        return REDUCE(losses, gradients, *arguments)

    training.micro_batches = micro_batches  # type: ignore[assignment]
    training.reduce_losses_and_norm = reduce  # type: ignore[assignment]
    training.PendingMetrics.LAGGING = ("cpu",) if lags else ()  # type: ignore[assignment]
    sys.argv = [str(RECIPE), *flags]
    runpy.run_path(str(RECIPE), run_name="__main__")


for case in json.loads(Path(sys.argv[1]).read_text()):
    run(**case)
