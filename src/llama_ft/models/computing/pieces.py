"""Work that is done piece by piece, so that the memory of one piece is enough: chunks of a loss, pieces
of an MLP."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Result = TypeVar("Result")

COMPUTED_FIRST = 3  # sums over pieces have their final dtype from the second piece on

# In the block that it returns, a piece counts so many times.
Repeat = Callable[[int], AbstractContextManager[None]]
_REPEAT: ContextVar[Repeat | None] = ContextVar("few of many pieces are computed", default=None)


def compute_pieces(compute: Callable[[int], Result], count: int) -> list[Result]:
    """Return `compute(number)` of each piece; in `sampled_pieces` of a few, and one result without values
    for all others."""
    repeat = _REPEAT.get()
    others = count - COMPUTED_FIRST - 1
    if repeat is None or others <= 0:
        return [compute(number) for number in range(count)]
    results = [compute(number) for number in range(COMPUTED_FIRST - 1)]
    with repeat(1 + others):
        results.append(compute(COMPUTED_FIRST - 1))
    results += [_without_values(results[-1], others)] * others
    results.append(compute(count - 1))  # it may be smaller
    return results


def _without_values(result: Result, pieces: int) -> Result:
    """Return a result whose tensors have the memory of so many pieces: operators take as long for one
    piece as for all."""

    def first_of_all(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.new_empty(pieces, *value.shape)[0]

    return tree_map(first_of_all, result)


@contextmanager
def sampled_pieces(repeat: Repeat) -> Iterator[None]:
    """In the block, compute only the first pieces and the last one. All others take the same memory, so
    that a plan does not take longer for longer sequences."""
    token = _REPEAT.set(repeat)
    try:
        yield
    finally:
        _REPEAT.reset(token)
