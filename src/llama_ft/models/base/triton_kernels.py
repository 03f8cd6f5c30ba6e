"""Kernels that are written in Triton, each with the computation by torch's operators that stands for it
where it fails."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

from llama_ft.cpu import one_kernel
from llama_ft.errors import reason
from llama_ft.runtime.console import log


class Comparison(NamedTuple):
    """What a function of kernels is compared with.

    Attributes:
        function: the same by torch's operators.
        shorten: returns arguments with a few of the rows, for both.
        tolerance: largest difference, as a share of the largest value.
    """

    function: Callable[..., torch.Tensor]
    shorten: Callable[..., tuple[Any, ...]]
    tolerance: float


class TritonKernels:
    """The functions of a module of kernels in Triton, which is imported at the first call on CUDA.

    The first call for a GPU, dtypes and shapes compares a function with torch's operators, on a few rows
    of its arguments. That is in the first micro-batch or before, and the only time that the host waits. A
    function that fails or differs is not called again. Each rank decides for itself: both ways agree
    within rounding.

    Args:
        module: its name.
        without: what happens without them, for the log.
        references: name of a function -> what it is compared with.
    """

    def __init__(self, module: str, without: str, references: Mapping[str, Comparison]) -> None:
        self._module = module
        self._without = without
        self._references = references
        self._compared = set[tuple[Any, ...]]()
        self._has_failed = False

    def can_run(self, tensor: torch.Tensor) -> bool:
        """Return whether there is a GPU to run them on, and they have not failed."""
        return not self._has_failed and one_kernel.runs_compiled(tensor)

    def call(self, name: str, *args: Any) -> Any:
        """Return the result of a function; None if it failed or differs, and from then on."""
        if self._has_failed:
            return None
        try:
            function = getattr(import_module(self._module), name)
            problem = self._difference(name, function, args)
            if not problem:
                return function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no Triton, no C compiler, or no directory for its files
            problem = reason(error)
        self._has_failed = True
        log.warning(f"Triton: {self._without} ({problem}).")
        return None

    def _difference(
        self, name: str, function: Callable[..., torch.Tensor], args: tuple[Any, ...]
    ) -> str:
        """Return how a function differs from its reference; "" if it does not, or if it was compared for
        such arguments before."""
        kind = (name, *_kinds(args))
        if kind in self._compared:
            return ""
        reference = self._references[name]
        few = [_without_zeros(value) for value in reference.shorten(*args)]
        result = function(*few).float()
        expected = reference.function(*few).float()
        largest = expected.abs().max().item()
        if not math.isfinite(largest):  # the loss will end the run
            return ""
        difference = (result - expected).abs().max().item()
        self._compared.add(kind)
        if difference <= reference.tolerance * largest:
            return ""
        size = f"{difference:.1e}, the largest value is {largest:.1e}"
        return f"{name} differs from torch's operators by {size}: {_place(expected.device)}"


def _kinds(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what a kernel is compiled for, of each argument. The number of rows changes with each call."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.device, value.dtype, value.shape[1:], value.stride(-1) == 1
        elif isinstance(value, tuple):
            yield from _kinds(value)
        else:
            yield value


def _without_zeros(value: Any) -> Any:
    """Return numbers in place of a tensor of zeros, such as LoRA's B before the first step: products with
    it would tell nothing."""
    if isinstance(value, tuple):
        return tuple(_without_zeros(each) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.any():
        return value
    numbers = torch.arange(value.numel(), device=value.device) % 17 - 8
    return torch.empty_like(value).copy_(numbers.view(value.shape))


def _place(device: torch.device) -> str:
    """Return the GPU and the version of Triton."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return f"{gpu}, Triton {import_module('triton').__version__}"
