"""Find a rank that is slower than the others while training.

Every rank waits for the slowest one in its collectives, so all steps take equally long. What differs
is how long a rank works itself. It is gathered with the numbers that the ranks exchange in each step
anyway.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch

from llama_ft.data import StepBatches
from llama_ft.observe import OwnWork
from llama_ft.run.parts.part import Part
from llama_ft.runtime import Ranks, log
from llama_ft.training import StepOutcome

if TYPE_CHECKING:
    from llama_ft.run.training_run import TrainingRun

STEPS_COMPARED = 20
SLOW = 1.2  # times the median
LEAST_SECONDS = 0.01  # per step above the median: less is noise of the machine


class SlowRanks(Part):
    """Names each rank whose own work takes 1.2 times the median, once. Rank 0 logs.

    Args:
        ranks: the ranks, more than one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._own_work = OwnWork(ranks)
        self._per_node = ranks.local_world_size
        # A GPU's work is measured with its exchanges of tokens, in which a slow rank holds up all ranks
        # that share its sequences. A CPU sleeps in them.
        self._measured_together = ranks.data.processes if ranks.device.type == "cuda" else 1
        self._named = set[int]()
        self._reported = list[str]()  # what was logged
        self._steps = 0
        self._sums = torch.zeros(ranks.world_size, 3, dtype=torch.float64)
        self._is_first = True

    def opened(self, run: TrainingRun) -> None:
        """See Part."""
        self._own_work.watch(run.built.model)

    def before_step(self, run: TrainingRun, step: StepBatches) -> None:
        """See Part."""
        self._own_work.begin_step(run.waited_seconds)

    def numbers(self, run: TrainingRun) -> dict[str, float]:
        """Return the seconds in which the rank itself worked."""
        return {"own_work": self._own_work.seconds()}

    def after_step(self, run: TrainingRun, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Count a step, and log the slow ranks of the last 20 steps. The first step of a launch
        does not count: it allocates and compiles."""
        if self._is_first:
            self._is_first = False
            return
        numbers = outcome.numbers
        # [ranks, (own work, waiting for data, model FLOPs)]
        self._sums += torch.stack(
            [numbers[name] for name in ("own_work", "waited", "flops")], dim=1
        )
        self._steps += 1
        if self._steps < STEPS_COMPARED:
            return
        for rank in slow_ranks(self._sums, self._steps):
            first = rank - rank % self._measured_together
            if first not in self._named:
                self._named.add(first)
                self._log(rank)
                run.facts.add(slow_ranks=self._reported)
        self._sums.zero_()
        self._steps = 0

    def _log(self, rank: int) -> None:
        per_step = self._sums / self._steps
        own, waited, _ = per_step[rank].tolist()
        usual = median_low(per_step[:, 0].tolist())
        slow = who(rank, self._measured_together, self._per_node)
        self._reported.append(
            f"{slow} is slow, and the others wait for it: its own work took {own / usual:.1f} times the median "
            f"over {self._steps} steps ({own:.3f} s per step, {waited:.3f} s of it for data; the median is "
            f"{usual:.3f} s)."
        )
        log.warning(self._reported[-1])


def who(rank: int, together: int, per_node: int) -> str:
    """Return the name of a slow rank, or of the ranks one of which it is. `together`: neighboring
    ranks that are measured together; `per_node`: ranks of a node."""
    node = f"on node {rank // per_node}"
    if together == 1:
        return f"rank {rank} {node}"
    first = rank - rank % together
    return f"one of ranks {first} to {first + together - 1} {node}, which share sequences,"


def slow_ranks(sums: torch.Tensor, steps: int) -> list[int]:
    """Return the ranks whose own work takes 1.2 times the median, also per FLOP: a rank with more
    samples is not slow. `sums` over the steps is [ranks, (work, waited, flops)]."""
    work = sums[:, 0].tolist()
    flops = sums[:, 2].tolist()
    usual = median_low(work)
    cost = [seconds / max(count, 1.0) for seconds, count in zip(work, flops, strict=True)]
    usual_cost = median_low(cost)
    slow = []
    for rank, seconds in enumerate(work):
        is_noise = seconds - usual < LEAST_SECONDS * steps
        if seconds >= SLOW * usual and cost[rank] >= SLOW * usual_cost and not is_noise:
            slow.append(rank)
    return slow
