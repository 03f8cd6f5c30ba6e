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
    """Return `compute(number)` of each piece; in `sampled_pieces` of a few, and copies without values."""
    if not _IS_SAMPLED.get():
        return [compute(number) for number in range(count)]
    results = [compute(number) for number in range(min(count, COMPUTED_FIRST))]
    while len(results) < count - 1:
        results.append(tree_map(_without_values, results[-1]))
    if len(results) < count:  # it may be smaller
        results.append(compute(count - 1))
    return results


def _without_values(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def sampled_pieces() -> Iterator[None]:
    """In the block, compute only the first pieces and the last one. All others take the same memory, so
    that a plan does not take longer for longer sequences."""
    token = _IS_SAMPLED.set(True)
    try:
        yield
    finally:
        _IS_SAMPLED.reset(token)
