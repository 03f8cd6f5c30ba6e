import pytest

from llama_ft.plan.cuda_allocator import reserved_bytes

MIB = 2**20
CASES = {
    # rounded to 1024
    "small tensors share pages of 2 MiB": ([(number, 1000) for number in range(2048)], 2),
    "one more takes another page": ([(number, 1000) for number in range(2049)], 4),
    "large ones share pages of 20 MiB": ([(1, 3 * MIB), (2, 11 * MIB), (3, 6 * MIB)], 20),
    "small and large ones share none": ([(1, MIB), (2, MIB + 1)], 22),
    "freed memory is used again, halves are merged": (
        [
            (1, 64 * MIB),
            (1, -64 * MIB),
            (2, 32 * MIB),
            (3, 32 * MIB),
            (2, -32 * MIB),
            (3, -32 * MIB),
            (4, 64 * MIB),
        ],
        80,
    ),
    # Blocks 0 to 96 of 100. 40 do not fit into the hole from 32 to 64. Of this hole the page from
    # 40 to 60 is returned, and two pages are added at the end.
    "a whole free page in a hole that is too small is returned": (
        [
            (1, 96 * MIB),
            (1, -96 * MIB),
            *((n, 32 * MIB) for n in (2, 3, 4)),
            (3, -32 * MIB),
            (5, 40 * MIB),
        ],
        120,
    ),
    # the block of 13 in the hole of 14, then that of 30 in its hole
    "the smallest block that is large enough is used": (
        [
            *((1, 30 * MIB), (2, 5 * MIB), (3, 14 * MIB), (4, 5 * MIB)),
            *((1, -30 * MIB), (3, -14 * MIB)),
            *((5, 13 * MIB), (6, 30 * MIB)),
        ],
        60,
    ),
    # The last 10 of 60 can grow, so the block of 8 is put in the hole of 40. Of that hole one page
    # is returned, and two are added at the end.
    "a block that can grow counts with what it can grow to": (
        [(1, 40 * MIB), (2, 10 * MIB), (1, -40 * MIB), (3, 8 * MIB), (4, 40 * MIB)],
        80,
    ),
    # With number 7 at the higher address, 64 would be free at the lowest.
    "of two blocks of one size that at the lower address is used": (
        [
            (1, 160 * MIB),
            (1, -160 * MIB),
            *((n, 32 * MIB) for n in (2, 3, 4, 5, 6)),
            (3, -32 * MIB),
            (5, -32 * MIB),
        ]
        + [(7, 32 * MIB), (2, -32 * MIB), (8, 64 * MIB)],
        200,
    ),
    # Block 2 is in the page from 60 to 80. The other three are returned, and five are added.
    "free pages are returned before more memory is needed": (
        [(1, 64 * MIB), (2, 2 * MIB), (1, -64 * MIB), (3, 100 * MIB)],
        120,
    ),
    "the other pool's free pages are returned, too": (
        [*((n, MIB) for n in range(20)), *((n, -MIB) for n in range(20)), (20, 39 * MIB)],
        40,
    ),
    "a storage that is resized is freed and allocated": (
        [(1, 50 * MIB), (1, -50 * MIB), (1, 50 * MIB), (1, -20 * MIB)],
        60,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reserved_bytes_are_those_of_the_cuda_allocator(name: str) -> None:
    events, expected = CASES[name]
    assert reserved_bytes(events) == expected * MIB
