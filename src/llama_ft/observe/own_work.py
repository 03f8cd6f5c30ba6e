"""Find a rank that is slower than the others while training.

Every rank waits for the slowest one in its collectives, so all steps take equally long. What differs
is how long a rank works itself. It is measured without a synchronization, and gathered with numbers
that the ranks exchange in each step anyway.
"""

import threading
import time
from collections import deque
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import nn

from llama_ft.models.base.layers import decoder_layers
from llama_ft.runtime import Ranks, log

STEPS_COMPARED = 20
SLOW = 1.2  # times the median
LEAST_SECONDS = 0.01  # per step above the median: less is noise of the machine
# A layer's backward pass takes about twice as long as its forward pass.
PASSES = 3


class OwnWork:
    """The time in which this rank itself works on a step: it computes, or waits for its own data.

    On a CPU that is the time in which the main thread runs or waits for a free core. In a
    collective it sleeps. On a GPU it is estimated from the forward passes of one decoder layer,
    between the all-gather of its weights and its output.

    Args:
        model: after fully_shard.
        ranks: the ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._is_cuda = ranks.device.type == "cuda"
        self._waited_seconds = 0.0
        self._started = 0.0
        # run queue of the thread that computes, see sched-stats.rst of the kernel
        self._queue = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._events = deque[tuple[Any, Any]]()  # start and end of forward passes on the GPU
        self._start: Any = None
        layers = decoder_layers(model)
        self._layers = len(layers)
        if self._is_cuda and layers and ranks.world_size > 1:
            middle = layers[len(layers) // 2]
            # after the hooks of fully_shard, which wait for the weights
            middle.register_forward_pre_hook(self._before_layer)
            middle.register_forward_hook(self._after_layer)

    def begin_step(self, waited_seconds: float) -> None:
        """Begin to measure a step. `waited_seconds` is how long it waited for its batches."""
        self._waited_seconds = waited_seconds
        self._started = self._thread_seconds()

    def seconds(self) -> float:
        """Return the own work since `begin_step`. On a GPU, the computation of an earlier step is
        returned, which has ended: this one is still queued."""
        if not self._is_cuda:
            return self._waited_seconds + self._thread_seconds() - self._started
        milliseconds = 0.0
        while self._events and self._events[0][1].query():
            start, end = self._events.popleft()
            milliseconds += start.elapsed_time(end)
        return self._waited_seconds + milliseconds / 1000 * self._layers * PASSES

    def _thread_seconds(self) -> float:
        """Return how long this thread has run, or was ready to run while its core was taken."""
        try:
            waited_nanoseconds = int(self._queue.read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # a kernel without these statistics
            waited_nanoseconds = 0
        return time.thread_time() + waited_nanoseconds / 1e9

    def _before_layer(self, layer: nn.Module, _: object) -> None:
        self._start = None
        if layer.training:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def _after_layer(self, *_: object) -> None:
        if self._start is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._start, end))
            self._start = None


class SlowRanks:
    """Names each rank whose own work takes 1.2 times the median, once.

    Args:
        ranks: the ranks. Rank 0 logs.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._per_node = ranks.local_world_size
        self._named = set[int]()
        self._steps = 0
        self._sums = torch.zeros(ranks.world_size, 3, dtype=torch.float64)
        self._is_first = True

    def add(self, work: torch.Tensor, waited: torch.Tensor, flops: torch.Tensor) -> None:
        """Count a step, and log the slow ranks of the last 20 steps. The first step of a launch
        does not count: it allocates and compiles.

        Args:
            work: seconds of each rank's own work, [ranks].
            waited: seconds that each rank waited for its data, [ranks].
            flops: model FLOPs of each rank's samples, [ranks].
        """
        if self._is_first:
            self._is_first = False
            return
        self._sums += torch.stack([work, waited, flops], dim=1)
        self._steps += 1
        if self._steps < STEPS_COMPARED:
            return
        for rank in slow_ranks(self._sums, self._steps):
            if rank not in self._named:
                self._named.add(rank)
                self._log(rank)
        self._sums.zero_()
        self._steps = 0

    def _log(self, rank: int) -> None:
        per_step = self._sums / self._steps
        own, waited, _ = per_step[rank].tolist()
        usual = median_low(per_step[:, 0].tolist())
        log.warning(
            f"rank {rank} on node {rank // self._per_node} is slow, and the others wait for it: its own work took "
            f"{own / usual:.1f} times the median over {self._steps} steps ({own:.3f} s per step, {waited:.3f} s of it "
            f"for data; the median is {usual:.3f} s)."
        )


def slow_ranks(sums: torch.Tensor, steps: int) -> list[int]:
    """Return the ranks whose own work takes 1.2 times the median, also per FLOP: a rank with more
    samples is not slow. `sums` over the steps is [ranks, (work, waited, flops)]."""
    work = sums[:, 0].tolist()
    flops = sums[:, 2].tolist()
    usual = median_low(work)
    cost = [seconds / max(count, 1.0) for seconds, count in zip(work, flops, strict=True)]
    usual_cost = median_low(cost)
    found = []
    for rank, seconds in enumerate(work):
        is_noise = seconds - usual < LEAST_SECONDS * steps
        if seconds >= SLOW * usual and cost[rank] >= SLOW * usual_cost and not is_noise:
            found.append(rank)
    return found
