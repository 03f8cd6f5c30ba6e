"""Pieces: all of them in a run, a few in a plan."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from llama_ft.models.computing.pieces import compute_pieces, sampled_pieces


def test_a_run_computes_every_piece_in_order() -> None:
    assert compute_pieces(lambda number: number * number, 4) == [0, 1, 4, 9]
    assert compute_pieces(lambda number: number, 0) == []


def test_a_plan_computes_a_few_pieces_and_has_the_shapes_and_the_memory_of_the_others() -> None:
    computed = list[int]()
    counted = list[tuple[int, list[int]]]()

    @contextmanager
    def repeated(times: int) -> Iterator[None]:
        before = len(computed)
        yield
        counted.append((times, computed[before:]))

    def compute(number: int) -> dict[str, torch.Tensor]:
        computed.append(number)
        return {"losses": torch.full((2 if number < 9 else 1,), float(number))}

    with sampled_pieces(repeated):
        results = compute_pieces(compute, 10)
    assert computed == [0, 1, 2, 9]
    assert counted == [(7, [2])]  # piece 2 stands for 2 to 8
    assert [len(result["losses"]) for result in results] == [2] * 9 + [1]
    storages = [result["losses"].untyped_storage() for result in results]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(sizes.values()) == 4 * 19  # the memory of all pieces
    assert compute_pieces(lambda number: number, 5) == [0, 1, 2, 3, 4]


def test_a_plan_computes_all_of_few_pieces() -> None:
    with sampled_pieces(nullcontext):
        for count in range(5):
            assert compute_pieces(lambda number: number, count) == list(range(count))
