"""Simulate torch's CUDA allocator: how much memory it takes from the device for a sequence of
allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Blocks
up to 1 MiB come from segments of 2 MiB, blocks up to 10 MiB from segments of 20 MiB. A larger block
gets its own segment, rounded up to 2 MiB. The smallest sufficient free block of a pool is used, and
split if more than 512 bytes (small pool) or 1 MiB (large pool) remain. Neighboring free blocks are
merged. Free segments are kept until the device has no more memory: so the need is what is reserved
if they are returned before new ones are taken. One stream, without expandable segments.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

ROUND = 512
SMALL = 2**20
LARGE_BUFFER = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
SEGMENT_ROUND = 2 * 2**20


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    is_free: bool = False


class CachingAllocator:
    """The allocator's blocks."""

    def __init__(self) -> None:
        # bytes reserved now, their maximum, end of the last segment
        self.reserved = self.most = self._end = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least `nbytes` bytes."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        is_small = size <= SMALL
        pool = self._free[is_small]
        place = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, is_small)
        block.is_free = False
        left = block.size - size
        if left >= ROUND if is_small else left > SMALL:
            rest = _Block(block.address + size, left, is_small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size = size
            block.after = rest
            self._put_back(rest)
        return block

    def free(self, block: _Block) -> None:
        """Return a block to its pool, and merge it with free neighbors."""
        if (other := block.before) is not None and other.is_free:
            self._take_out(other)
            block.address = other.address
            block.size = block.size + other.size
            block.before = other.before
            if block.before is not None:
                block.before.after = block
        if (other := block.after) is not None and other.is_free:
            self._take_out(other)
            block.size = block.size + other.size
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        self._put_back(block)

    def _segment(self, size: int, is_small: bool) -> _Block:
        large = LARGE_BUFFER if size < OWN_SEGMENT else -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        whole = 2 * SMALL if is_small else large
        for pool in self._free.values():
            for _, _, block in [
                entry for entry in pool if entry[2].before is None and entry[2].after is None
            ]:
                self._take_out(block)
                self.reserved -= block.size
        self.reserved += whole
        self.most = max(self.most, self.reserved)
        self._end += whole
        return _Block(self._end - whole, whole, is_small)

    def _put_back(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take_out(self, block: _Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
        block.is_free = False


def reserved_bytes(events: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that a device needs for a sequence of (number of a storage, change in
    bytes)."""
    allocator = CachingAllocator()
    blocks = dict[int, tuple[_Block, int]]()
    for number, more in events:
        block, size = blocks.pop(number, (None, 0))
        if block is not None:
            allocator.free(block)
        if size + more > 0:
            blocks[number] = (allocator.allocate(size + more), size + more)
    return allocator.most
