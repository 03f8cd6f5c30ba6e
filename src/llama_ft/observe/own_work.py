"""How long a rank works itself on a step, measured without a synchronization.

Every rank waits for the slowest one in its collectives, so all steps take equally long.
"""

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llama_ft.models.base.layers import decoder_layers
from llama_ft.runtime import Ranks

# A layer's backward pass takes about twice as long as its forward pass.
PASSES = 3


class OwnWork:
    """The time in which this rank itself works on a step: it computes, or waits for its own data.

    On a CPU that is the time in which the main thread runs or waits for a free core. In a
    collective it sleeps. On a GPU it is estimated from the forward passes of one decoder layer,
    between the all-gather of its weights and its output.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_cuda = ranks.device.type == "cuda"
        self._waited_seconds = 0.0
        self._started = 0.0
        # run queue of the thread that computes, see sched-stats.rst of the kernel
        self._queue = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._events = deque[tuple[Any, Any]]()  # start and end of forward passes on the GPU
        self._start: Any = None
        self._layers = 0

    def watch(self, model: nn.Module) -> None:
        """On a GPU, measure a layer of the model from now on. `model`: after fully_shard."""
        layers = decoder_layers(model)
        self._layers = len(layers)
        if self._is_cuda and layers:
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
