"""Bytes that a planned step moves through a GPU's memory.

Each operator is a kernel: it reads its arguments and writes its results. Matmuls and attention are left
out, since they wait for their FLOPs, but not products with few FLOPs per byte, such as those with LoRA's
factors. Collectives are left out, too: their bytes move between GPUs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from llama_ft.models.adapters import lora_linear
from llama_ft.phases import Phase

# A product with fewer FLOPs per byte waits for its bytes on every GPU of `plan.duration`.
FLOPS_PER_BYTE = 64
COLLECTIVES = ("c10d", "_c10d_functional")
# They allocate, or return a view that their schema does not show.
MOVE_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "set_", "resize_", "is_pinned", "is_same_size", "_local_scalar_dense", "record_stream",
}  # fmt: skip
# They do not read what they overwrite.
OVERWRITE = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "_foreach_copy_",
}
OVERWRITE |= {"_foreach_zero_"}
# They read as much of a table as they write.
READ_ROWS = {"embedding", "index", "index_select", "gather"}
# They read and write as much of a table as their other arguments have.
WRITE_ROWS = {
    "index_put_",
    "_index_put_impl_",
    "index_add_",
    "index_copy_",
    "scatter_",
    "scatter_add_",
}


@dataclass
class PhaseBytes:
    """What the operators of a phase have moved."""

    phase: Phase
    bytes: int = 0


class MovedBytes:
    """Adds up what operators move.

    Attributes:
        phases: in the order of the run. Each micro-batch has a forward and a backward phase.
    """

    def __init__(self) -> None:
        self.phases: list[PhaseBytes] = []
        self._factor = 1  # for each operator; 0: operators of a kernel that is counted as a whole

    def enter(self, phase: Phase) -> None:
        """What follows belongs to a phase."""
        self.phases.append(PhaseBytes(phase))

    def add(self, nbytes: int) -> None:
        """Count bytes for the current phase."""
        self.phases[-1].bytes += self._factor * nbytes

    def count(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operator."""
        if self._factor:
            self.add(bytes_of(operator, args, kwargs, result))

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """In the block, operators count so many times."""
        before = self._factor
        self._factor *= times
        try:
            yield
        finally:
            self._factor = before

    def count_kernel(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function that is one kernel on a GPU, whatever its operators are here."""
        tensors = list(tensors_of(args))
        versions = [tensor._version for tensor in tensors]
        with self.repeated(0):
            result = function(*args)
        self.add(_sizes_of(tensors))
        self.add(_sizes_of((result,)))
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version > version:  # changed in place
                self.add(size_of(tensor))
        return result

    def of_step(self, micro_batches: int) -> int:
        """Return the bytes of an optimizer step. Micro-batches that were not planned move as many as the
        last one that was."""
        planned = list[int]()
        optimizer = 0
        for each in self.phases:
            match each.phase:
                case "forward":
                    planned.append(each.bytes)
                case "backward":
                    planned[-1] += each.bytes
                case "optimizer step":
                    optimizer += each.bytes
        if not planned:  # a copy of the recipe without phases
            return 0
        others = micro_batches - len(planned)
        return sum(planned) + others * planned[-1] + optimizer


def bytes_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operator reads and writes.

    Args:
        operator: an overload of torch.ops.
        args: its arguments. Values are not read.
        kwargs: named ones.
        result: what it returned.
    """
    name = operator._opname
    if _moves_nothing(operator):
        return 0
    if name in READ_ROWS:
        return 2 * _sizes_of((result,))
    if name == "all_gather_copy_in":  # of FSDP: the second argument is its buffer
        return 2 * _sizes_of(args[:1])
    read = 0
    written = 0
    arguments = _arguments(operator)
    for position, (argument, is_read, is_written) in enumerate(arguments):
        value = args[position] if position < len(args) else kwargs.get(argument)
        nbytes = _sizes_of((value,))
        is_unused = argument == "self" and kwargs.get("beta") == 0  # of addmm_
        read += nbytes if is_read and not is_unused else 0
        written += nbytes if is_written else 0
    if not any(is_written for _, _, is_written in arguments):
        written = _sizes_of((result,))
    if name in WRITE_ROWS:
        return 2 * (read - written)
    if _flops_of(operator, args, kwargs, result) >= FLOPS_PER_BYTE * (read + written):
        is_lora = operator is torch.ops.llama_ft.lora_linear.default
        return lora_linear.moved_bytes(args, result) if is_lora else 0
    return read + written


@cache
def _moves_nothing(operator: Any) -> bool:
    name = operator._opname
    is_attention = "attention" in name or "attn" in name
    is_other = operator.namespace in COLLECTIVES or name in MOVE_NOTHING
    return operator.is_view or is_attention or is_other


@cache
def _arguments(operator: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Return the name of each argument, and whether the operator reads and writes it."""
    arguments = list[tuple[str, bool, bool]]()
    for argument in operator._schema.arguments:
        alias = argument.alias_info
        is_written = alias is not None and alias.is_write
        if operator._opname.startswith("_fused_") and argument.name == "grads":
            is_written = False  # only with a loss scale
        is_overwritten = operator._opname in OVERWRITE or argument.name == "out"
        arguments.append((argument.name, not (is_written and is_overwritten), is_written))
    return tuple(arguments)


def _flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    if operator._opname == "_grouped_mm":
        first, second, *_ = args
        return int(2 * first.numel() * second.shape[-1])
    formula = flop_registry.get(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _sizes_of(values: Iterable[Any]) -> int:
    return sum(map(size_of, tensors_of(values)))


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements. Those that were expanded are read once."""
    count: int = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results. 4 times faster than pytree."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)
