"""Batches made in a thread: in order, ahead of time, and gone when they are no longer wanted."""

import threading
import time
from collections.abc import Generator

import pytest

from llama_ft.data import Prefetcher


def numbers(
    made: list[int], closed: threading.Event, count: int = 1000
) -> Generator[int, None, None]:
    try:
        for number in range(count):
            made.append(number)
            yield number
    finally:
        closed.set()


def test_items_come_in_order_and_a_few_are_prefetched() -> None:
    made: list[int] = []
    with Prefetcher(numbers(made, threading.Event(), 20), 2) as ahead:
        items = iter(ahead)
        assert next(items) == 0
        until = time.monotonic() + 60
        # one taken, two waiting, one in the thread's hand
        while len(made) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert made == [0, 1, 2, 3]
        assert list(items) == list(range(1, 20))


def test_leaving_early_closes_the_generator() -> None:
    closed = threading.Event()
    with Prefetcher(numbers([], closed)) as ahead:
        for number in ahead:
            if number == 3:
                break
    assert closed.is_set()
    with pytest.raises(KeyError), Prefetcher(numbers([], closed := threading.Event())) as ahead:
        next(iter(ahead))
        raise KeyError
    assert closed.wait(60)


def test_an_error_is_raised_where_its_item_was_due() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise ValueError("no more")

    taken = []
    with pytest.raises(ValueError, match="no more"), Prefetcher(failing()) as ahead:
        for number in ahead:
            taken.append(number)
    assert taken == [1]
