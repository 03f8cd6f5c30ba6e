"""Run element-wise computations as one CUDA kernel, with one pass over memory instead of one per
operator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from llama_ft.errors import reason
from llama_ft.runtime.console import log

# Computes a function with arguments.
Count = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
_COUNT: ContextVar[Count | None] = ContextVar("kernels are counted", default=None)


@contextmanager
def counted_as_one(count: Count) -> Iterator[None]:
    """In the block, each call of a `OneKernel` goes through `count`: a plan counts one kernel."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Return whether `OneKernel` compiles for this tensor's device. Inside --compile operators are
    fused anyway."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


class OneKernel:
    """A function that torch.compile turns into one kernel on CUDA. On the CPU, and after a failed
    compilation, it runs as plain Python. It must not round to 16 bits in between, because a
    compiled kernel skips such rounding.

    Args:
        function: a function of tensors. The device of the first one decides.
        dynamic: as in torch.compile; False makes one kernel per shape, for at most 8 shapes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        dynamic: bool | None = None,
    ) -> None:
        self._function = function
        self._dynamic = dynamic
        self._compiled: Callable[..., Any] | None = None
        self._has_failed = False

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """Return the function's result, computed without gradients."""
        count = _COUNT.get()
        if count is not None:
            return count(torch.no_grad()(self._function), (first, *others))
        with torch.no_grad():
            if self._has_failed or not runs_compiled(first):
                return self._function(first, *others)
            try:
                if self._compiled is None:  # not earlier: importing torch's compiler takes 2 s
                    # Without it, slices at changing offsets of a larger tensor would be read
                    # element by element.
                    options: Any = {"assume_aligned_inputs": True}
                    self._compiled = torch.compile(
                        self._function, dynamic=self._dynamic, options=options
                    )
                return self._compiled(first, *others)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # no Triton, no C compiler, or no directory for its files
                self._has_failed = True
                log.warning(
                    f"torch.compile: {self._function.__name__} runs uncompiled and slower ({reason(error)})."
                )
                return self._function(first, *others)
