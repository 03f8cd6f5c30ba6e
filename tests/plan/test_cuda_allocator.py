from llama_ft.plan.cuda_allocator import CachingAllocator, reserved_bytes

MIB = 2**20


def test_small_tensors_share_segments_of_2_mib() -> None:
    assert reserved_bytes([(number, 1000) for number in range(2048)]) == 2 * MIB  # 1000 is rounded to 1024
    assert reserved_bytes([(number, 1000) for number in range(2049)]) == 4 * MIB


def test_middling_tensors_share_segments_of_20_mib_and_large_ones_have_their_own() -> None:
    assert reserved_bytes([(1, 3 * MIB), (2, 3 * MIB)]) == 20 * MIB
    assert reserved_bytes([(1, 11 * MIB + 1)]) == 12 * MIB


def test_what_is_freed_is_used_again() -> None:
    events = [(1, 64 * MIB), (1, -64 * MIB), (2, 32 * MIB), (3, 32 * MIB), (2, -32 * MIB), (3, -32 * MIB)]
    assert reserved_bytes([*events, (4, 64 * MIB)]) == 64 * MIB  # the halves were merged again


def test_a_hole_that_is_too_small_is_slack() -> None:
    """Three neighbours in one segment: the middle one's place does for nothing that is larger."""
    begin = [(1, 96 * MIB), (1, -96 * MIB), (2, 32 * MIB), (3, 32 * MIB), (4, 32 * MIB), (3, -32 * MIB)]
    assert reserved_bytes([*begin, (5, 40 * MIB)]) == 136 * MIB


def test_free_segments_are_given_back_before_more_is_asked_for() -> None:
    assert reserved_bytes([(1, 64 * MIB), (1, -64 * MIB), (2, 100 * MIB)]) == 100 * MIB


def test_a_storage_that_is_resized_comes_and_goes() -> None:
    """As fully_shard frees and allocates a gathered parameter."""
    events = [(1, 50 * MIB), (1, -50 * MIB), (1, 50 * MIB), (1, -20 * MIB)]
    assert reserved_bytes(events) == 50 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 20, 12)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(13 * MIB).size == 13 * MIB
    assert allocator.reserved == 62 * MIB
    sizes = sorted(block.size // MIB for _, _, block in allocator._free[False])
    assert sizes == [7, 12, 30]
