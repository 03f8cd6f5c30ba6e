import pytest

from llama_ft.plan.cuda_allocator import reserved_bytes

MIB = 2**20
CASES = {
    # rounded to 1024
    "small tensors share segments of 2 MiB": ([(number, 1000) for number in range(2048)], 2),
    "one more takes another": ([(number, 1000) for number in range(2049)], 4),
    "middling ones share segments of 20 MiB": ([(1, 3 * MIB), (2, 3 * MIB)], 20),
    "large ones have their own": ([(1, 11 * MIB + 1)], 12),
    "what is freed is used again, halves are merged": (
        [
            (1, 64 * MIB),
            (1, -64 * MIB),
            (2, 32 * MIB),
            (3, 32 * MIB),
            (2, -32 * MIB),
            (3, -32 * MIB),
            (4, 64 * MIB),
        ],
        64,
    ),
    "the middle one of three neighbours leaves a hole that is too small": (
        [
            (1, 96 * MIB),
            (1, -96 * MIB),
            *((n, 32 * MIB) for n in (2, 3, 4)),
            (3, -32 * MIB),
            (5, 40 * MIB),
        ],
        136,
    ),
    "the smallest block that is large enough is taken": (
        [
            *((n, n * MIB) for n in (30, 20, 12)),
            (30, -30 * MIB),
            (20, -20 * MIB),
            (1, 13 * MIB),
            (2, 30 * MIB),
        ],
        62,
    ),
    "of two that are alike the one at the lower address is taken": (
        [
            (1, 160 * MIB),
            (1, -160 * MIB),
            *((n, 32 * MIB) for n in (2, 3, 4, 5, 6)),
            (3, -32 * MIB),
            (5, -32 * MIB),
        ]
        + [(7, 32 * MIB), (2, -32 * MIB), (8, 64 * MIB)],
        224,
    ),
    "free segments are given back before more is asked for": (
        [(1, 64 * MIB), (1, -64 * MIB), (2, 100 * MIB)],
        100,
    ),
    "a storage that is resized comes and goes": (
        [(1, 50 * MIB), (1, -50 * MIB), (1, 50 * MIB), (1, -20 * MIB)],
        50,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reserved_bytes_are_those_of_the_cuda_allocator(name: str) -> None:
    events, expected = CASES[name]
    assert reserved_bytes(events) == expected * MIB
