"""Element-wise computations as one CUDA kernel: one pass over memory instead of one per operator."""

from collections.abc import Callable
from typing import Any

import torch

from llama_ft.errors import reason
from llama_ft.runtime.console import log


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Whether a kernel is made for this tensor's device. In a graph of --compile it is fused anyway."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


class OneKernel:
    """A function that torch.compile makes one kernel of on CUDA. Elsewhere, and once compiling has failed, it is called
    as it is. It must not round to 16 bits in between: a compiled kernel would leave that out.

    Args:
        function: of tensors; the first one says where it computes.
        dynamic: as of torch.compile; False makes a kernel for each shape, of at most 8.
    """

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = None) -> None:
        self._function, self._dynamic = function, dynamic
        self._compiled: Callable[..., Any] | None = None
        self._has_failed = False

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """What the function returns, without gradients."""
        with torch.no_grad():
            if self._has_failed or not runs_compiled(first):
                return self._function(first, *others)
            try:
                if self._compiled is None:  # only now: torch's compiler takes 2 s to import
                    # Or a part of a larger tensor, whose place varies, would be read element by element.
                    options: Any = {"assume_aligned_inputs": True}
                    self._compiled = torch.compile(self._function, dynamic=self._dynamic, options=options)
                return self._compiled(first, *others)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # no Triton, no C compiler, no place for its files
                self._has_failed = True
                log.warning(f"torch.compile: {self._function.__name__} runs uncompiled and slower ({reason(error)}).")
                return self._function(first, *others)
