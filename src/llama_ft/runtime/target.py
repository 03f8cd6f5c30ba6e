"""What a run computes on: a `Target`. `runtime.start` makes one for a run, and the planner for a plan.

Code that chooses a kernel, a size or a collective asks `current_target()`, not a tensor: a plan for
GPUs is made with tensors on the CPU. Code that copies a tensor, or waits for its device, asks the
tensor.

It is not an argument, because most of those who ask are operators: autograd and Transformers call
them with tensors only. It is not a context variable either, because autograd computes backward
passes in threads of its own, which would not see it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Target:
    """What a run computes on; without arguments, a CPU."""

    device: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] | None = None  # compute capability of the GPU; None: a CPU
    backend: Literal["gloo", "nccl"] = "gloo"  # carries tensors of the device between ranks

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @staticmethod
    def of(device: torch.device) -> "Target":
        """Return the target of a device of this process."""
        if device.type == "cuda":
            return Target("cuda", torch.cuda.get_device_capability(device), "nccl")
        return Target()


_current = Target()


def current_target() -> Target:
    """Return what is computed on now. Before `runtime.start` it is a CPU."""
    return _current


@contextmanager
def computing_on(target: Target) -> Iterator[None]:
    """In the block, in all threads, `target` is what is computed on."""
    global _current
    before = _current
    _current = target
    try:
        yield
    finally:
        _current = before
