"""Work that is done piece by piece, so that the memory of one piece is enough: chunks of a loss, pieces
of an MLP."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Result = TypeVar("Result")

COMPUTED_FIRST = 3  # sums over pieces have their final dtype from the second piece on

_IS_SAMPLED: ContextVar[bool] = ContextVar("few of many pieces are computed", default=False)


def compute_pieces(compute: Callable[[int], Result], count: int) -> list[Result]:
    """Return `compute(number)` of each piece; in `sampled_pieces` of a few, and one result without values
    for all others."""
    if not _IS_SAMPLED.get():
        return [compute(number) for number in range(count)]
    results = [compute(number) for number in range(min(count, COMPUTED_FIRST))]
    others = count - 1 - len(results)
    if others > 0:
        results += [_without_values(results[-1], others)] * others
    if len(results) < count:  # it may be smaller
        results.append(compute(count - 1))
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
def sampled_pieces() -> Iterator[None]:
    """In the block, compute only the first pieces and the last one. All others take the same memory, so
    that a plan does not take longer for longer sequences."""
    token = _IS_SAMPLED.set(True)
    try:
        yield
    finally:
        _IS_SAMPLED.reset(token)
