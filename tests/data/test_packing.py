"""Packs are full, hold whole rows, and are few."""

import math
from collections.abc import Callable

import numpy
import pytest

from llama_ft.data.packing import pack_rows

CHANCE = numpy.random.default_rng(0)
CAPACITY = 2048


def natural(draw: Callable[[int], numpy.ndarray], rows: int = 20_000, longest: int = CAPACITY) -> numpy.ndarray:
    return numpy.clip(draw(rows), 1, longest).astype(numpy.int64)


LENGTHS = {
    "log-normal": natural(lambda n: CHANCE.lognormal(5, 1, n)),
    "exponential": natural(lambda n: CHANCE.exponential(300, n)),
    "uniform": natural(lambda n: CHANCE.integers(1, CAPACITY + 1, n)),
    "nearly equal": natural(lambda n: CHANCE.normal(480, 80, n)),
    "few": natural(lambda n: CHANCE.lognormal(5, 1, n), 70),
    "mostly long": natural(lambda n: CHANCE.normal(1500, 300, n)),
}


def least_number(lengths: numpy.ndarray, pack_length: int) -> int:
    """A bound no packing can go below (Martello and Toth's L2): for every size, rows that leave no room for rows of
    that size count whole, and the small ones fill what the middle ones leave."""
    best = math.ceil(lengths.sum() / pack_length)
    for small in numpy.unique(lengths[2 * lengths <= pack_length]).tolist():
        alone = lengths > pack_length - small
        middle = (2 * lengths > pack_length) & ~alone
        little = (2 * lengths <= pack_length) & (lengths >= small)
        over = lengths[little].sum() - (middle.sum() * pack_length - lengths[middle].sum())
        best = max(best, int(alone.sum() + middle.sum()) + max(0, math.ceil(over / pack_length)))
    return best


@pytest.mark.parametrize("kind", LENGTHS)
def test_packs_are_within_1_percent_of_the_least_number_or_4_for_rows_of_nearly_one_length(kind: str) -> None:
    least, most = least_number(LENGTHS[kind], CAPACITY), 1.04 if kind == "nearly equal" else 1.01
    lengths, packs = LENGTHS[kind], pack_rows(LENGTHS[kind], CAPACITY)
    assert len(packs) <= max(most * least, least + 1 if kind == "few" else 0)
    longest_first = numpy.sort(lengths)[::-1]
    assert numpy.array_equal(numpy.sort(packs.slots), numpy.arange(len(lengths)))  # each whole and in one pack
    filled = [longest_first[slots].sum() for slots in numpy.split(packs.slots, packs.offsets[1:-1])]
    assert filled == packs.tokens.tolist() and max(filled) <= CAPACITY and packs.offsets[-1] == len(lengths)
